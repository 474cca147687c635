"""Durations as people write them, and the integer nanoseconds in which the simulator counts.

Integers, because the causes of a run must add up to its wall time exactly: sums of floats do not.
"""

import re
from collections.abc import Callable

from leto_jax.errors import UsageError

NS_PER_SEC = 1_000_000_000
SECS_PER_UNIT = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-zµ]*)\s*")


def parse_duration(text: str, what: str = "duration") -> float:
    """Seconds of '10m', '1.5h' or '250ms'.

    Args:
        text: a number followed by one of ns, us, ms, s, m, h, d. A bare number is refused: minutes and seconds differ by 60.
        what: the name that an error message uses, for instance '--mttf'.

    Raises:
        UsageError: no number, no unit or an unknown unit. The sign is not checked here.
    """
    match = _DURATION.fullmatch(text)
    units = ", ".join(SECS_PER_UNIT)
    if match is None:
        raise UsageError(f"{what}: expected a number with a unit ({units}), such as 10m or 1.5h, found {text!r}")
    number, unit = match.groups()
    if unit not in SECS_PER_UNIT:
        found = f"the unit {unit!r} in {text!r}" if unit else f"{text!r} without a unit"
        raise UsageError(f"{what}: expected a number with one of the units {units}, found {found}; write for instance {number}m")
    return float(number) * SECS_PER_UNIT[unit]


def positive(secs: float, what: str) -> float:
    """`secs`, if it is a finite time above zero; else a UsageError that names `what`."""
    if not 0 < secs < float("inf"):
        raise UsageError(f"{what}: expected a time above zero, found {secs:g} s; give a positive value such as 10m")
    return secs


def not_negative(secs: float, what: str) -> float:
    """`secs`, if it is finite and not below zero; else a UsageError that names `what`."""
    if not 0 <= secs < float("inf"):
        raise UsageError(f"{what}: expected a time of zero or more, found {secs:g} s")
    return secs


def fraction(value: float, what: str) -> float:
    """`value`, if it lies in [0, 1]; else a UsageError that names `what`."""
    if not 0 <= value <= 1:
        raise UsageError(f"{what}: expected a fraction from 0 to 1, found {value:g}" + ("; 50 % is 0.5" if 1 < value <= 100 else ""))
    return value


def to_ns(secs: float) -> int:
    """Whole nanoseconds, rounded to nearest."""
    return round(secs * NS_PER_SEC)


def to_secs(ns: int) -> float:
    """Seconds as a float: for people and JSON only, never to be added up."""
    return ns / NS_PER_SEC


def duration_text(secs: float) -> str:
    """'14m', '1h' or '1.5h': the largest unit that keeps the number at 1 or above, for titles and messages."""
    scale: Callable[[str], float] = SECS_PER_UNIT.__getitem__
    unit = next((u for u in ("d", "h", "m", "s") if secs >= scale(u)), "ms")
    return f"{secs / scale(unit):.4g}{unit}"
