"""Costs from a real run of ours: the file that `leto report --json` writes."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from leto_jax.errors import UsageError
from leto_jax.sim.costs import Costs
from leto_jax.sim.hardware import find_hardware
from leto_jax.sim.units import not_negative, positive
from leto_jax.sim.workload import Model, Parallelism, Workload

HANGS = frozenset({"hang", "stopped", "sigstop", "spin"})
"""Failures whose `takeover_secs` begins at detection; `detect_secs` stands apart and is added. All others count from the failure."""


@dataclass(frozen=True)
class MeasuredRun:
    """What a report says of one job. `takeover_secs` is the median time from a failure to the end of the first finished step, minus one
    step.

    `mttf_secs` is the report's wall time for each takeover.
    """

    job: str
    iteration_secs: float
    takeover_secs: float
    detect_secs: float
    takeovers: int
    mttf_secs: float

    def workload(self, gpus: int) -> Workload:
        """The job itself on `gpus` GPUs, where no workload is named. The report says nothing of its model."""
        return Workload(
            name=self.job,
            title=f"measured job {self.job}",
            source="leto report --json",
            model=Model(params=0.0, active=0.0, layers=1, hidden=1),
            parallelism=Parallelism(dp=gpus),
            hardware=find_hardware("h200"),
            gpus_per_node=8,
            sequences_per_replica=1,
            sequence_length=1,
            optimizer_sharded=True,
            iteration_secs=self.iteration_secs,
            checkpoint_cost_secs=self.iteration_secs,
            assumptions=("a checkpoint costs one iteration: the report does not say; name a WORKLOAD to have its own cost",),
        )

    def costs(self, base: Costs) -> Costs:
        """`base` with the measured cost of an HOF in place of the paper's."""
        return replace(base, in_place_detect_secs=self.detect_secs, in_place_secs=max(0.0, self.takeover_secs - self.detect_secs))


def read_report(path: str | Path) -> MeasuredRun:
    """The measured run in a report file.

    An iteration lasts productive time / steps: `ettr` x `wall_secs` / `steps`.

    Raises:
        UsageError: unreadable, not JSON, a key missing or of another type, no takeover to measure.
    """
    where = f"--from-report {path}"
    try:
        report = json.loads(Path(path).read_text())
    except OSError as error:
        raise UsageError(f"{where}: expected a readable file written by `leto report --json` ({error.strerror})") from error
    except ValueError as error:
        raise UsageError(f"{where}: expected JSON written by `leto report --json`, found: {error}") from error
    takeovers = _take(report, "takeovers", list, where)
    if not takeovers:
        raise UsageError(f"{where}: expected at least one takeover, found none; cause one with `leto inject` and report again")
    detects = [_secs(entry, "detect_secs", f"{where}: takeovers[{i}]") for i, entry in enumerate(takeovers)]
    totals = [
        _secs(entry, "takeover_secs", f"{where}: takeovers[{i}]") + (detects[i] if entry.get("kind") in HANGS else 0.0)
        for i, entry in enumerate(takeovers)
    ]
    steps = _take(report, "steps", int, where)
    if steps < 1:
        raise UsageError(f"{where}: steps: expected 1 or more, found {steps}")
    productive = _secs(report, "wall_secs", where) * float(_take(report, "ettr", (int, float), where))
    total = median(totals)
    return MeasuredRun(
        job=_take(report, "job", str, where),
        iteration_secs=positive(productive / steps, f"{where}: iteration time, ettr x wall_secs / steps"),
        takeover_secs=total,
        detect_secs=min(total, median(detects)),
        takeovers=len(takeovers),
        mttf_secs=positive(_secs(report, "wall_secs", where) / len(takeovers), f"{where}: wall_secs"),
    )


def _take(entry: Any, key: str, kind: Any, where: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise UsageError(f"{where}: expected the key {key!r} of `leto report --json`, found none")
    value = entry[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(f"{where}: {key}: found {value!r}, which is not what `leto report --json` writes")
    return value


def _secs(entry: Any, key: str, where: str) -> float:
    return not_negative(float(_take(entry, key, (int, float), where)), f"{where}: {key}")
