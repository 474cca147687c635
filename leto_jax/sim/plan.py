"""What the event loop needs to know of a system: integers only, no names of systems and no formulas.

Position. A job's progress is one number, in nanoseconds of failure-free operation: `interval` iterations, each lengthened by the system's
overhead, then the stall of a checkpoint, and so on. What is productive, what can be restored and where an iteration began all follow from
it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import ceil
from typing import NamedTuple

from leto_jax.sim.failures import Kind


class Cause(Enum):
    """Where wall time goes. PRODUCTIVE is training as if nothing had been done for fault tolerance; the rest is badput."""

    PRODUCTIVE = "productive"
    OVERHEAD = "overhead"
    CHECKPOINT = "checkpoint"
    DETECT = "detect"
    INIT = "init"
    RESTORE = "restore"
    RECOMPUTE = "recompute"
    SPARE_WAIT = "spare_wait"
    DEGRADED = "degraded"


class Resume(Enum):
    """Where training goes on: where it stopped, at the start of the iteration in progress, or at the newest durable checkpoint."""

    POSITION = "position"
    ITERATION = "iteration"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Recovery:
    """What one failure costs.

    `stages` run one after the other and begin again if another failure strikes. `spare`: they begin only when each lost node has a spare;
    an operable node that is swapped out all the same is a spare again after `return_ns`. `outage_ns`: for how long a job that shrinks
    trains without the replica once it has a node for it; such a job waits for no spare.
    """

    stages: tuple[tuple[Cause, int], ...]
    resume: Resume
    spare: bool = False
    return_ns: int = 0
    outage_ns: int = 0

    @property
    def total_ns(self) -> int:
        return sum(ns for _, ns in self.stages)


class Split(NamedTuple):
    """A position, split by cause; the three parts add up to it exactly."""

    productive: int
    overhead: int
    checkpoint: int


@dataclass(frozen=True)
class Cycle:
    """Iterations and the checkpoint after them.

    `lag_ns`: how long after its stall a checkpoint counts (an asynchronous copy takes that long). `update_ns`: the end of each iteration
    in which an interrupted update is rolled forward instead of computed again.
    """

    iteration_ns: int
    overhead_ns: int
    interval: int
    stall_ns: int
    lag_ns: int = 0
    update_ns: int = 0

    @property
    def step_ns(self) -> int:
        return self.iteration_ns + self.overhead_ns

    @property
    def length_ns(self) -> int:
        return self.interval * self.step_ns + self.stall_ns

    def split(self, position: int) -> Split:
        """Productive time, overhead and checkpoint stalls in `position` ns of operation."""
        cycles, offset = divmod(position, self.length_ns)
        busy = min(offset, self.interval * self.step_ns)
        steps, part = divmod(busy, self.step_ns)
        productive = (cycles * self.interval + steps) * self.iteration_ns + part * self.iteration_ns // self.step_ns
        checkpoint = cycles * self.stall_ns + offset - busy
        return Split(productive, position - productive - checkpoint, checkpoint)

    def durable(self, position: int) -> int:
        """Position of the newest checkpoint that counts when operation has reached `position` without a failure."""
        return max(0, (position - self.lag_ns) // self.length_ns) * self.length_ns

    def iteration_start(self, position: int) -> int:
        """Where retained state lets training go on after a failure: a checkpoint in progress is begun again, an update goes on."""
        cycles, offset = divmod(position, self.length_ns)
        steps, part = divmod(min(offset, self.interval * self.step_ns), self.step_ns)
        kept = part if part >= self.step_ns - self.update_ns else 0
        return cycles * self.length_ns + steps * self.step_ns + kept


@dataclass(frozen=True)
class Plan:
    """One system on one workload and cluster. `replicas` is 0 for a job that never shrinks; else replicas of `replica_nodes` nodes each."""

    system: str
    cycle: Cycle
    recovery: Mapping[Kind, Recovery]
    replay_speedup: float = 1.0
    replicas: int = 0
    replica_nodes: float = 1.0

    def replicas_lost(self, nodes: int) -> int:
        """Replicas that a failure of `nodes` nodes stops (an HOF, 0 nodes, stops one)."""
        return max(1, ceil(nodes / self.replica_nodes))
