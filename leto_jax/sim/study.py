"""Many seeds of one job: means, confidence, and where the time went."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

import numpy as np

from leto_jax.errors import UsageError
from leto_jax.sim.failures import Failure, FailureModel, Kind, draw
from leto_jax.sim.loop import Ledger, run
from leto_jax.sim.plan import Cause, Plan
from leto_jax.sim.units import positive, to_ns, to_secs

# fmt: off
STUDENT_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
               2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
# fmt: on
"""97.5 % quantiles of Student's t for 1 to 30 degrees of freedom; 1.96 is used beyond."""


@dataclass(frozen=True)
class Outcome:
    """What one plan did over all seeds. Times are means over seeds in seconds; `ettr_ci95` is the half-width, None for a single seed."""

    plan: Plan
    seeds: int
    wall_secs: float
    ettr: float
    ettr_ci95: float | None
    secs_by_cause: dict[str, float]
    lost_secs_by_kind: dict[str, dict[str, float]]
    failures_by_kind: dict[str, float]

    def lost_secs(self, kind: str) -> float:
        """Mean time that failures of a kind ('hof', 'node') cost in one run, all causes together."""
        return sum(self.lost_secs_by_kind[kind].values())


def draw_runs(model: FailureModel, gpus: int, horizon_secs: float, seeds: int, seed: int = 0) -> list[list[Failure]]:
    """Failures of `seeds` runs. Every system gets the same runs, so systems are compared on equal luck."""
    positive(horizon_secs, "simulated time")
    if seeds < 1:
        raise UsageError(f"--seeds: expected 1 or more, found {seeds}")
    return [draw(model, gpus, horizon_secs, np.random.default_rng([seed, index])) for index in range(seeds)]


def study(
    plan: Plan,
    runs: Sequence[Sequence[Failure]],
    horizon_secs: float,
    spares: int | None = None,
    on_run: Callable[[], None] | None = None,
) -> Outcome:
    """Simulate `plan` over each run; `on_run` is called after each, for a progress bar."""
    horizon_ns = to_ns(positive(horizon_secs, "simulated time"))
    ledgers = []
    for failures in runs:
        ledgers.append(run(plan, failures, horizon_ns, spares))
        if on_run is not None:
            on_run()
    return summarise(plan, ledgers)


def summarise(plan: Plan, ledgers: Sequence[Ledger]) -> Outcome:
    """Means over ledgers of one plan."""
    ettrs = [ledger.ettr for ledger in ledgers]
    return Outcome(
        plan=plan,
        seeds=len(ledgers),
        wall_secs=to_secs(ledgers[0].wall_ns),
        ettr=fmean(ettrs),
        ettr_ci95=half_width(ettrs),
        secs_by_cause={cause.value: fmean(to_secs(ledger.by_cause[cause]) for ledger in ledgers) for cause in Cause},
        lost_secs_by_kind={
            kind.name.lower(): {
                cause.value: fmean(to_secs(ledger.lost_ns[kind][cause]) for ledger in ledgers) for cause in ledgers[0].lost_ns[kind]
            }
            for kind in Kind
        },
        failures_by_kind={kind.name.lower(): fmean(ledger.failures[kind] for ledger in ledgers) for kind in Kind},
    )


def half_width(values: Sequence[float]) -> float | None:
    """Half-width of the 95 % confidence interval of the mean (Student's t), None for a single value."""
    count = len(values)
    if count < 2:
        return None
    quantile = STUDENT_975[count - 2] if count - 1 <= len(STUDENT_975) else 1.96
    return quantile * stdev(values) / sqrt(count)
