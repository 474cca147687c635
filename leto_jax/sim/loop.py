"""The event loop: one job, one system, one sequence of failures, every nanosecond accounted for.

Nothing happens between failures that arithmetic cannot tell, so the loop visits failures, ends of recoveries and returns of replicas only:
its cost does not depend on the length of an iteration or on the number of GPUs.
"""

import heapq
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from leto_jax.sim.failures import Failure, Kind
from leto_jax.sim.plan import Cause, Plan, Recovery, Resume
from leto_jax.sim.spares import SparePool


@dataclass(frozen=True)
class Ledger:
    """Wall time of one run by cause, in integer nanoseconds: the causes add up to `wall_ns` exactly.

    `lost_ns` is the part that failures cost, by the kind of failure and by cause; `failures` counts those that struck.
    """

    wall_ns: int
    by_cause: dict[Cause, int]
    lost_ns: dict[Kind, dict[Cause, int]]
    failures: dict[Kind, int]

    @property
    def ettr(self) -> float:
        """Effective training time ratio: productive time over wall time."""
        return self.by_cause[Cause.PRODUCTIVE] / self.wall_ns


def run(plan: Plan, failures: Iterable[Failure], horizon_ns: int, spares: int | None = None) -> Ledger:
    """The ledger of `plan` over `horizon_ns`, given failures in order of time; those at or after the horizon are ignored.

    Cost: a few microseconds for each failure.
    """
    job = _Job(plan, spares)
    for failure in failures:
        if failure.at_ns >= horizon_ns:
            break
        job.advance(failure.at_ns)
        job.fail(failure)
    job.advance(horizon_ns)
    return job.ledger()


class _Job:
    """The state of a run. Between failures it is either recovering (`now < up_at`) or operating.

    Order matters: more failures, longer stages or a larger overhead never put a job ahead of where it would have been, since positions,
    `durable` and `up_at` all depend on earlier ones without ever decreasing in them. The property tests rely on it.
    """

    def __init__(self, plan: Plan, spares: int | None):
        self.plan = plan
        self.pool = SparePool(spares)
        self.now = 0
        self.position = 0
        self.peak = 0
        self.durable = 0
        self.up_at = 0
        self.stages_at = 0
        self.recovery: Recovery | None = None
        self.kind = Kind.HOF
        self.returns: list[int] = []
        self.spent: Counter[tuple[Cause, Kind]] = Counter()
        self.failures: Counter[Kind] = Counter()

    def advance(self, until: int) -> None:
        """Let time pass without a failure."""
        if self.now < self.up_at:
            self._recover(min(until, self.up_at))
        while self.now < until:
            while self.returns and self.returns[0] <= self.now:
                heapq.heappop(self.returns)
            self._operate(min(until, self.returns[0]) if self.returns else until)

    def fail(self, failure: Failure) -> None:
        """Apply one failure at the current time."""
        kind = failure.kind
        recovery = self.plan.recovery[kind]
        self.failures[kind] += 1
        self._fall_back(recovery.resume, kind)

        ready = self.now
        if recovery.spare:
            ready = self.pool.replace(max(1, failure.nodes), self.now, failure.repair_ns if kind is Kind.NODE else recovery.return_ns)
        elif self.plan.replicas:
            back = self.now if kind is Kind.HOF else self.pool.replace(failure.nodes, self.now, failure.repair_ns)
            for _ in range(self.plan.replicas_lost(failure.nodes)):
                heapq.heappush(self.returns, back + recovery.outage_ns)

        recovering = self.now < self.up_at
        if recovering and self.recovery is not None and self.recovery.total_ns > recovery.total_ns:
            recovery, kind = self.recovery, self.kind  # the harder recovery of the two begins again
        self.stages_at = max(ready, self.stages_at) if recovering else ready
        self.recovery, self.kind = recovery, kind
        self.up_at = self.stages_at + recovery.total_ns

    def ledger(self) -> Ledger:
        split = self.plan.cycle.split(self.position)
        fault_free = {Cause.PRODUCTIVE: split.productive, Cause.OVERHEAD: split.overhead, Cause.CHECKPOINT: split.checkpoint}
        lost = {kind: {cause: self.spent[cause, kind] for cause in Cause if cause not in fault_free} for kind in Kind}
        by_cause = {cause: fault_free[cause] if cause in fault_free else sum(lost[kind][cause] for kind in Kind) for cause in Cause}
        return Ledger(self.now, by_cause, lost, {kind: self.failures[kind] for kind in Kind})

    def _fall_back(self, resume: Resume, kind: Kind) -> None:
        """Give up what the failure destroyed; the work must be done again and is booked as recompute."""
        cycle = self.plan.cycle
        self.durable = max(self.durable, cycle.durable(self.position))
        self.peak = max(self.peak, self.position)
        match resume:
            case Resume.CHECKPOINT:
                target = self.durable
            case Resume.ITERATION:
                target = cycle.iteration_start(self.position)
            case Resume.POSITION:
                target = self.position
        self.spent[Cause.RECOMPUTE, kind] += self.position - target
        self.position = target

    def _recover(self, until: int) -> None:
        """Book the time up to `until` to the wait for a spare and to the stages, in their order."""
        assert self.recovery is not None
        begin, self.now = self.now, until
        waited = max(0, min(until, self.stages_at) - begin)
        self.spent[Cause.SPARE_WAIT, self.kind] += waited
        start = self.stages_at
        for cause, length in self.recovery.stages:
            self.spent[cause, self.kind] += max(0, min(until, start + length) - max(begin, start))
            start += length

    def _operate(self, until: int) -> None:
        """Train up to `until` with the replicas there are; work below `peak` is replayed at the system's replay speed."""
        plan = self.plan
        span = until - self.now
        done = span
        if plan.replicas and self.returns:
            working = max(0, plan.replicas - len(self.returns))
            done = span * working // plan.replicas
            self.spent[Cause.DEGRADED if working else Cause.SPARE_WAIT, self.kind] += span - done
        if plan.replay_speedup > 1 and self.position < self.peak:
            behind = self.peak - self.position
            replay = min(done, ceil(behind / plan.replay_speedup))
            gained = min(int(replay * plan.replay_speedup), behind) - replay
            self.position += gained
            self.spent[Cause.RECOMPUTE, self.kind] -= gained
        self.position += done
        self.now = until
