"""Failure traces: a CSV with the columns time, node, kind."""

import csv
from pathlib import Path

from leto_jax.errors import UsageError
from leto_jax.sim.failures import Failure, Kind
from leto_jax.sim.units import not_negative, parse_duration, to_ns, to_secs

KINDS = {"hof": Kind.HOF, "node": Kind.NODE}
COLUMNS = ["time", "node", "kind"]


def read_trace(path: str | Path, repair_secs: float = 4 * 3600.0) -> list[Failure]:
    """Failures of a trace file.

    The first line is `time,node,kind`. `time` counts from the start of the job: seconds, or a number with a unit (`90m`). `kind` is hof or
    node. Node failures with equal times are one event that takes several nodes. Every lost node is repaired after `repair_secs`.

    Raises:
        UsageError: names the line when a field is missing, a time is negative or earlier than the line before, or a kind is unknown.
    """
    try:
        lines = list(csv.reader(Path(path).read_text().splitlines()))
    except OSError as error:
        raise UsageError(f"--trace: expected a readable CSV file, found {str(path)!r} ({error.strerror})") from error
    if not lines or [name.strip() for name in lines[0]] != COLUMNS:
        raise UsageError(f"{path}: expected the header {','.join(COLUMNS)}, found {','.join(lines[0]) if lines else 'an empty file'}")
    failures: list[Failure] = []
    previous = 0.0
    for number, line in enumerate(lines[1:], start=2):
        if not line:
            continue
        where = f"{path}, line {number}"
        if len(line) != len(COLUMNS):
            raise UsageError(f"{where}: expected {len(COLUMNS)} fields ({','.join(COLUMNS)}), found {len(line)}: {','.join(line)}")
        time, _node, kind = (text.strip() for text in line)
        secs = not_negative(_seconds(time, where), f"{where}: time")
        if secs < previous:
            raise UsageError(f"{where}: expected a time of {previous:g} s or later, found {secs:g} s; sort the trace by time")
        previous = secs
        if kind.lower() not in KINDS:
            raise UsageError(f"{where}: kind: expected one of {', '.join(KINDS)}, found {kind!r}")
        failure = Failure(to_ns(secs), Kind.HOF) if kind.lower() == "hof" else Failure(to_ns(secs), Kind.NODE, 1, to_ns(repair_secs))
        together = failures and failure.kind is failures[-1].kind is Kind.NODE and failure.at_ns == failures[-1].at_ns
        if together:
            failure = failure._replace(nodes=failures.pop().nodes + 1)
        failures.append(failure)
    return failures


def trace_statistics(failures: list[Failure], horizon_secs: float | None = None) -> tuple[float, float, float]:
    """(horizon in seconds, MTTF in seconds, HOF ratio) of a trace, for tuning: without a horizon it ends one mean gap after its last
    failure.

    Raises:
        UsageError: no failure before the horizon.
    """
    inside = failures if horizon_secs is None else [f for f in failures if f.at_ns < to_ns(horizon_secs)]
    if not inside or (horizon_secs is None and not failures[-1].at_ns):
        raise UsageError(f"--trace: expected a failure after time 0 and before the end of the simulated time, found {len(failures)} in all")
    horizon = horizon_secs if horizon_secs is not None else to_secs(inside[-1].at_ns) * (1 + 1 / len(inside))
    return horizon, horizon / len(inside), sum(f.kind is Kind.HOF for f in inside) / len(inside)


def _seconds(text: str, where: str) -> float:
    try:
        return float(text)
    except ValueError:
        return parse_duration(text, f"{where}: time")
