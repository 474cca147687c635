"""A finished study as a table for people, as one JSON object for scripts."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from leto_jax.sim.failures import FailureModel
from leto_jax.sim.measured import MeasuredRun
from leto_jax.sim.plan import Cause
from leto_jax.sim.study import Outcome
from leto_jax.sim.system import Setting, System, assumptions
from leto_jax.sim.tuner import Recommendation
from leto_jax.sim.units import duration_text, to_secs


@dataclass(frozen=True)
class Shown:
    """One `leto simulate`: what was asked, what came out. `outcomes` and `tuned` follow the order of `systems`; `tuned` may be empty."""

    systems: list[System]
    setting: Setting
    failures: FailureModel
    outcomes: list[Outcome]
    tuned: list[Recommendation]
    spares: int | None = None
    trace: str | None = None
    report: MeasuredRun | None = None

    def headline(self) -> str:
        workload, first = self.setting.workload, self.outcomes[0]
        source = f"trace {self.trace}" if self.trace else f"{self.failures.arrivals} failures"
        return (
            f"{workload.title}, {workload.gpus:,} GPUs, iteration {self.setting.iteration_secs:.3g} s; {source}, "
            f"MTTF {duration_text(self.failures.mttf_secs)}, {self.failures.hof_ratio:.0%} HOF; "
            f"{first.seeds} x {duration_text(first.wall_secs)}"
        )

    def assumptions(self) -> list[str]:
        """Every assumption behind any of the systems, once."""
        spare = (
            "a spare node is always there"
            if self.spares is None
            else f"{self.spares} spare nodes; repairs last {self._repair()} on average"
        )
        lines = [line for system in self.systems for line in assumptions(system, self.setting)]
        return list(dict.fromkeys([*lines, spare, "a failure during a recovery begins the harder of the two recoveries again"]))

    def as_dict(self) -> dict[str, Any]:
        workload = self.setting.workload
        return {
            "workload": {"name": workload.name, "title": workload.title, "source": workload.source, "gpus": workload.gpus}
            | asdict(workload.parallelism)
            | {"iteration_secs": self.setting.iteration_secs},
            "failures": {"trace": self.trace} | asdict(self.failures),
            "spares": self.spares,
            "from_report": None if self.report is None else asdict(self.report),
            "systems": [self._system_dict(system, outcome) for system, outcome in zip(self.systems, self.outcomes, strict=True)],
            "tuned": [asdict(line) for line in self.tuned],
        }

    def print(self, console: Console) -> None:
        console.print(self.headline(), highlight=False, markup=False)
        console.print(self._table())
        if self.tuned:
            console.print(self._tuning_table())
        console.print("Assumptions that the paper does not give:", highlight=False)
        listed = Table.grid(padding=(0, 1))
        for line in self.assumptions():
            listed.add_row("-", line)
        console.print(listed, highlight=False, markup=False)

    def _system_dict(self, system: System, outcome: Outcome) -> dict[str, Any]:
        return {
            "system": system.name,
            "title": system.title,
            "source": system.source,
            "interval": outcome.plan.cycle.interval,
            "checkpoint_cost_secs": to_secs(outcome.plan.cycle.stall_ns),
            "seeds": outcome.seeds,
            "wall_secs": outcome.wall_secs,
            "ettr": outcome.ettr,
            "ettr_ci95": outcome.ettr_ci95,
            "badput_secs": outcome.secs_by_cause,
            "lost_secs_by_kind": outcome.lost_secs_by_kind,
            "failures_by_kind": outcome.failures_by_kind,
            "assumptions": list(assumptions(system, self.setting)),
        }

    def _repair(self) -> str:
        return duration_text(self.failures.repair_secs)

    def _table(self) -> Table:
        table = Table(
            caption="I: iterations between checkpoints; s/HOF, s/node: seconds lost for each failure of a kind", caption_justify="left"
        )
        table.add_column("system")
        for name in ("ETTR %", "I", "s/HOF", "s/node"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("lost, % of wall time")
        for system, outcome in zip(self.systems, self.outcomes, strict=True):
            spread = "" if outcome.ettr_ci95 is None else f" ± {100 * outcome.ettr_ci95:.2f}"
            interval = str(outcome.plan.cycle.interval)
            table.add_row(
                system.title, f"{100 * outcome.ettr:.2f}{spread}", interval, _each(outcome, "hof"), _each(outcome, "node"), _lost(outcome)
            )
        return table

    def _tuning_table(self) -> Table:
        table = Table(
            caption="checkpoint interval in iterations (ETTR % by formula); spare nodes for 1 wait in 1000", caption_justify="left"
        )
        table.add_column("system")
        for name in ("Young", "Daly", "best", "spares"):
            table.add_column(name, justify="right")
        for line in self.tuned:
            young = f"{line.young_interval} ({100 * line.ettr_at_young:.2f})"
            best = f"{line.best_interval} ({100 * line.ettr_at_best:.2f})"
            table.add_row(line.system, young, str(line.daly_interval), best, str(line.spare_nodes))
        return table


def _each(outcome: Outcome, kind: str) -> str:
    count = outcome.failures_by_kind[kind]
    return f"{outcome.lost_secs(kind) / count:.1f}" if count else "-"


def _lost(outcome: Outcome) -> str:
    """'init 2.85, recompute 0.72, ...': largest first, without what rounds to nothing."""
    shares = {cause: 100 * secs / outcome.wall_secs for cause, secs in outcome.secs_by_cause.items() if cause != Cause.PRODUCTIVE.value}
    largest = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause.replace('_', ' ')} {share:.2f}" for cause, share in largest if share >= 0.005) or "nothing"
