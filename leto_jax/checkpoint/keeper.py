"""Copies of the state while a job trains: when each tier's next one is due, what training waits for, and what is done beside it."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from leto_jax import errors
from leto_jax.checkpoint import frozen, persistent
from leto_jax.checkpoint.frozen import Form, Frozen
from leto_jax.checkpoint.hostmemory import HostMemory
from leto_jax.checkpoint.interval import daly_interval_secs
from leto_jax.config import Interval, Tiers

type Leaves = Callable[[str], Iterable[np.ndarray]]


class Schedule:
    """When the next copy is due. Times in seconds of any one clock."""

    def __init__(self, every: Interval, mttf_secs: float):
        self.every, self._mttf_secs = every, mttf_secs
        self._step: int | None = None
        self._at = 0.0
        self._cost_secs: float | None = None

    def due(self, step: int, now: float) -> bool:
        """Whether the state of `step` is to be copied. The first that is asked for is where counting begins; one to be tuned is taken then."""
        if self._step is None:
            self._step, self._at = step, now
        if step == self._step and self._cost_secs is not None:
            return False
        if self.every.steps is not None:
            return step - self._step >= self.every.steps
        return now - self._at >= self.interval_secs and step > 0

    @property
    def interval_secs(self) -> float:
        """Seconds between copies, where it goes by time."""
        if self.every.secs is not None:
            return self.every.secs
        return 0.0 if self._cost_secs is None else daly_interval_secs(self._cost_secs, self._mttf_secs)

    def taken(self, step: int, now: float, cost_secs: float) -> None:
        """A copy of `step` has cost the training `cost_secs`; it is over now."""
        self._step, self._at, self._cost_secs = step, now, cost_secs


class Keeper:
    """Takes copies when they are due, between two steps, into the tiers that a job has. tell(tier=..., ...): for the journal; from any thread.

    A tier whose last copy is still under way is passed over until it is done: a copy is complete or absent.
    """

    def __init__(self, form: Form, tiers: Tiers, host: HostMemory | None, tell: Callable[..., None]):
        self._form, self._tiers, self._host, self._tell = form, tiers, host, tell
        self._pool = ThreadPoolExecutor(2, "leto-keeper")
        self._running: dict[str, Future] = {}
        self._schedules: dict[str, Schedule] = {}
        if host is not None and tiers.copies_every:
            self._schedules["host memory"] = Schedule(Interval.parse(tiers.copies_every, "--copy-every"), tiers.mttf_secs)
        if tiers.directory and tiers.every:
            self._schedules["persistent"] = Schedule(Interval.parse(tiers.every, "--checkpoint-every"), tiers.mttf_secs)

    def serve(self, step: int, leaves: Leaves, position: Callable[[], bytes]) -> None:
        """Called between two steps. Raises what nobody expected of an earlier copy.

        Cost: of a tier that is due, one copy of the state; of a persistent one that is synchronous all of it.
        """
        for tier, schedule in self._schedules.items():
            if tier in self._running:
                if not self._running[tier].done():
                    continue
                self._running.pop(tier).result()
            if not schedule.due(step, time.monotonic()):
                continue
            begin = time.monotonic()
            rest = self._begin(tier, step, leaves, position())
            if tier == "persistent" and not self._tiers.asynchronous:
                stall = self._finish(tier, step, begin, None, rest)
            else:
                stall = time.monotonic() - begin
                self._running[tier] = self._pool.submit(self._finish, tier, step, begin, stall, rest)
            schedule.taken(step, time.monotonic(), stall)

    def close(self) -> None:
        """Waits for what is under way."""
        for running in self._running.values():
            running.result()
        self._running.clear()
        self._pool.shutdown()

    def _begin(self, tier: str, step: int, leaves: Leaves, position: bytes) -> Callable[[], Any]:
        """What training waits for; returns what can be done beside it."""
        if tier == "host memory":
            assert self._host is not None
            return self._host.begin(step, leaves, position)
        state = frozen.copy(step, leaves, position)
        return lambda: persistent.save(self._form, state, self._tiers.directory, self._tiers.keep)

    def _finish(self, tier: str, step: int, begin: float, stall_secs: float | None, rest: Callable[[], Any]) -> float:
        """Does what is left to do for a copy, and tells the journal. stall_secs: None if training waits for this too. Returns the seconds in all."""
        problem = ""
        try:
            rest()
        except errors.LetoError as exception:  # training goes on: what was there before still is
            problem = str(exception)
            print(f"leto: no copy of step {step} ({tier}): {problem}", file=sys.stderr, flush=True)
        secs = time.monotonic() - begin
        self._tell(tier=tier, commit=step, stall_secs=secs if stall_secs is None else stall_secs, secs=secs, error=problem)
        return secs


def newest(form: Form, host: HostMemory | None, directories: Iterable[str]) -> tuple[Frozen, str] | None:
    """The newest good copy that any tier has, and which; None if no tier has one.

    Raises LayoutError if a checkpoint is of another model. What is damaged is passed over for the next older one, with a warning.
    """
    found: list[tuple[int, bool, str, Callable[[], Frozen]]] = []
    if host is not None:
        found += [(step, True, "host memory", functools.partial(host.restore, step)) for step in host.versions()]
    for directory in directories:
        with contextlib.suppress(errors.CheckpointError):  # nothing was written there yet
            for step in persistent.versions(directory):
                found.append((step, False, directory, functools.partial(persistent.restore_version, form, directory, step)))
    found.sort(key=lambda item: item[:3], reverse=True)  # of equal steps the one in memory, which is read sooner
    return persistent.first_good((step, where, load) for step, _, where, load in found)
