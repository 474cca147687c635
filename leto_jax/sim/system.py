"""The form in which a fault-tolerance system is described: a handful of pure functions of a setting.

A description says what a failure costs and why; `plan` turns it into the integers of the event loop. Adding a system is adding a value of
`System`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import ceil

from leto_jax.checkpoint.interval import iterations, young_interval_secs
from leto_jax.errors import UsageError
from leto_jax.sim.costs import Costs
from leto_jax.sim.failures import Kind
from leto_jax.sim.plan import Cycle, Plan, Recovery, Resume
from leto_jax.sim.units import fraction, positive, to_ns
from leto_jax.sim.workload import Workload

LONGEST_INTERVAL_SECS = 3600.0
"""A checkpoint at least once an hour, even where the formula sees nothing at risk."""


@dataclass(frozen=True)
class Setting:
    """What a system meets: the workload (its iteration time known), the costs, and the failures for which an interval is tuned.

    `interval` in iterations overrides the tuned one.
    """

    workload: Workload
    costs: Costs
    mttf_secs: float
    hof_ratio: float = 0.5
    interval: int | None = None

    def __post_init__(self) -> None:
        positive(self.mttf_secs, "MTTF")
        fraction(self.hof_ratio, "HOF ratio")
        if self.interval is not None and self.interval < 1:
            raise UsageError(f"checkpoint interval: expected 1 iteration or more, found {self.interval}")

    @property
    def iteration_secs(self) -> float:
        secs = self.workload.iteration_secs
        if secs is None:
            raise UsageError(f"{self.workload.name}: expected an iteration time; predict.with_iteration_time fills it in")
        return secs


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint: `cost_secs` by which it delays training, `lag_secs` until it counts, `every` iterations if the system fixes that."""

    cost_secs: float
    lag_secs: float = 0.0
    every: int | None = None


@dataclass(frozen=True)
class System:
    """A fault-tolerance system.

    Args:
        overhead: fault-free lengthening of an iteration, as a fraction.
        checkpoint: what one checkpoint costs.
        recoveries: for each kind of failure what it costs.
        uses: the fields of `Costs` on which the numbers rest; their sources are printed with every result.
        notes: assumptions in words.
        lag_cycles: whole cycles after which a checkpoint counts (1 for snapshots that are spread over a window).
        rolls_forward: an update that a failure interrupts is finished, not computed again.
        shrinks: the job goes on with fewer replicas.
        needs_experts: cannot work on a dense model.
    """

    name: str
    title: str
    source: str
    overhead: Callable[[Setting], float]
    checkpoint: Callable[[Setting], Checkpoint]
    recoveries: Mapping[Kind, Callable[[Setting], Recovery]]
    uses: tuple[str, ...]
    notes: tuple[str, ...] = ()
    lag_cycles: int = 0
    replays: bool = False
    rolls_forward: bool = False
    shrinks: bool = False
    needs_experts: bool = False


def plan(system: System, setting: Setting) -> Plan:
    """The numbers of `system` in `setting`: a pure function.

    Raises:
        UsageError: the system cannot work on this workload.
    """
    workload = setting.workload
    if system.needs_experts and not workload.model.moe_layers:
        raise UsageError(f"--system {system.name}: expected a workload with experts, found {workload.name}, which is dense; leave it out")
    recovery = {kind: describe(setting) for kind, describe in system.recoveries.items()}
    checkpoint = system.checkpoint(setting)
    iteration_ns = to_ns(setting.iteration_secs)
    overhead_ns = to_ns(setting.iteration_secs * system.overhead(setting))
    cycle = Cycle(
        iteration_ns=iteration_ns,
        overhead_ns=overhead_ns,
        interval=interval(system, setting),
        stall_ns=to_ns(checkpoint.cost_secs),
        lag_ns=to_ns(checkpoint.lag_secs),
        update_ns=to_ns(setting.iteration_secs * setting.costs.update_share) if system.rolls_forward else 0,
    )
    return Plan(
        system=system.name,
        cycle=replace(cycle, lag_ns=cycle.lag_ns + system.lag_cycles * cycle.length_ns),
        recovery=recovery,
        replay_speedup=setting.costs.replay_speedup if system.replays else 1.0,
        replicas=workload.parallelism.dp if system.shrinks else 0,
        replica_nodes=workload.parallelism.replica_gpus / workload.gpus_per_node,
    )


def at_risk(system: System, setting: Setting) -> float:
    """Share of failures after which `system` falls back to a checkpoint."""
    shares = {Kind.HOF: setting.hof_ratio, Kind.NODE: 1 - setting.hof_ratio}
    return sum(share for kind, share in shares.items() if system.recoveries[kind](setting).resume is Resume.CHECKPOINT)


def interval(system: System, setting: Setting) -> int:
    """Iterations between checkpoints: given, fixed by the system, or Young's for the failures that fall back to a checkpoint.

    Never shorter than the time in which the last one is written.
    """
    checkpoint = system.checkpoint(setting)
    if setting.interval is not None:
        return setting.interval
    if checkpoint.every is not None:
        return checkpoint.every
    tuned = young_interval_secs(checkpoint.cost_secs, setting.mttf_secs, at_risk(system, setting))
    return max(iterations(tuned, setting.iteration_secs, LONGEST_INTERVAL_SECS), ceil(checkpoint.lag_secs / setting.iteration_secs))


def assumptions(system: System, setting: Setting) -> tuple[str, ...]:
    """Every number and choice behind a result that the paper does not give, one sentence each."""
    costs = setting.costs
    ours = [name for name in system.uses if not costs.source(name).startswith("paper")]
    listed = [f"{name} = {getattr(costs, name):g}: {costs.source(name)}" for name in ours]
    return (*listed, *system.notes, *setting.workload.assumptions)
