"""When what fails: arrivals, kinds, correlated nodes, repair times. All randomness comes in as a generator."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from math import gamma
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leto_jax.errors import UsageError
from leto_jax.sim.units import fraction, not_negative, positive, to_ns

Seconds = NDArray[np.float64]

DEVICE_MTTF_SECS = 14 * 60 * 131_072
"""Mean time to failure of one GPU: 14 min for a job on 131,072 GPUs, as projected from two clusters at Meta (arXiv 2410.21680)."""


class Kind(IntEnum):
    """HOF: hardware-operable, the same device can go on at once. NODE: the node must be repaired or replaced."""

    HOF = 0
    NODE = 1


class Failure(NamedTuple):
    """One interruption. `nodes` are lost until repaired (0 for an HOF); `repair_ns` counts from `at_ns`."""

    at_ns: int
    kind: Kind
    nodes: int = 0
    repair_ns: int = 0


@dataclass(frozen=True)
class FailureModel:
    """How failures of a whole job come about.

    `mttf_secs` is the mean time between failures of the job, all kinds together. `arrivals`: 'exponential', 'regular', or 'weibull:SHAPE'.
    `group_share` of the node failures take `group_nodes` neighbours at once (a switch, a power shelf). Repairs last an exponential time.
    """

    mttf_secs: float
    hof_ratio: float = 0.5
    arrivals: str = "exponential"
    group_share: float = 0.0
    group_nodes: int = 1
    repair_secs: float = 4 * 3600.0

    def __post_init__(self) -> None:
        positive(self.mttf_secs, "MTTF")
        fraction(self.hof_ratio, "HOF ratio")
        fraction(self.group_share, "share of correlated node failures")
        not_negative(self.repair_secs, "repair time")
        if self.group_nodes < 1:
            raise UsageError(f"nodes of a correlated failure: expected 1 or more, found {self.group_nodes}")
        find_arrivals(self.arrivals)


def draw(model: FailureModel, devices: int, horizon_secs: float, rng: np.random.Generator) -> list[Failure]:
    """All failures of one run in order of time.

    Each failure carries its own kind and repair time, so a subset of the failures is a run in which strictly less went wrong.
    """
    times = find_arrivals(model.arrivals)(rng, model.mttf_secs, devices, horizon_secs)
    hof = rng.random(times.size) < model.hof_ratio
    nodes = np.where(rng.random(times.size) < model.group_share, model.group_nodes, 1)
    repairs = rng.exponential(model.repair_secs, times.size) if model.repair_secs else np.zeros(times.size)
    return [
        Failure(to_ns(at), Kind.HOF) if is_hof else Failure(to_ns(at), Kind.NODE, int(count), to_ns(repair))
        for at, is_hof, count, repair in zip(times.tolist(), hof.tolist(), nodes.tolist(), repairs.tolist(), strict=True)
    ]


Arrivals = Callable[[np.random.Generator, float, int, float], Seconds]
"""(generator, job's MTTF in seconds, devices, horizon in seconds) -> increasing times in seconds below the horizon."""


def find_arrivals(name: str) -> Arrivals:
    """The arrival process that `name` describes; a UsageError lists the known ones."""
    kind, _, parameter = name.partition(":")
    if kind == "weibull":
        try:
            shape = float(parameter)
        except ValueError:
            shape = 0.0
        if not 0.1 <= shape <= 20:
            raise UsageError(f"--arrivals: expected weibull:SHAPE with a shape from 0.1 to 20, found {name!r}; below 1 failures cluster")
        return lambda rng, mttf, devices, horizon: weibull(rng, mttf, devices, horizon, shape)
    known = {"exponential": exponential, "regular": regular}
    if name not in known:
        raise UsageError(f"--arrivals: expected {', '.join(known)} or weibull:SHAPE, found {name!r}")
    return known[name]


def exponential(rng: np.random.Generator, mttf: float, devices: int, horizon: float) -> Seconds:
    """Devices that do not age: together exactly one Poisson process of the job's rate, however many they are."""
    return np.sort(rng.uniform(0.0, horizon, rng.poisson(horizon / mttf)))


def weibull(rng: np.random.Generator, mttf: float, devices: int, horizon: float, shape: float) -> Seconds:
    """Each device a renewal process with Weibull lifetimes of mean `mttf x devices`, already running since long.

    The first life is the residual of a length-biased one (X^shape is then gamma distributed with 1 + 1/shape), so the rate is 1 / mttf
    from the start. With many devices and a short horizon the sum is close to Poisson for any shape (Palm-Khintchine); small clusters show
    the shape.
    """
    scale = mttf * devices / gamma(1 + 1 / shape)
    lives = scale * rng.gamma(1 + 1 / shape, 1.0, devices) ** (1 / shape) * rng.random(devices)
    times = []
    while (lives := lives[lives < horizon]).size:
        times.append(lives)
        lives = lives + scale * rng.weibull(shape, lives.size)
    return np.sort(np.concatenate(times)) if times else np.empty(0)


def regular(rng: np.random.Generator, mttf: float, devices: int, horizon: float) -> Seconds:
    """One failure every `mttf`, as an experimenter injects them, with gaps from half to one and a half of it.

    The gaps are triangular so that failures favour no phase of a checkpoint interval; a constant gap would measure one phase only.
    """
    times = np.cumsum(mttf * rng.triangular(0.5, 1.0, 1.5, 2 * int(horizon / mttf) + 2))
    return times[times < horizon]
