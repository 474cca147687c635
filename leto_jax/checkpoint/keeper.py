"""Copies of the state while a job trains: when each tier's next one is due, what training waits for, and what is done beside it."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from leto_jax import errors
from leto_jax.checkpoint import persistent
from leto_jax.checkpoint.frozen import Form, Frozen
from leto_jax.checkpoint.hostmemory import HostMemory
from leto_jax.checkpoint.interval import daly_interval_secs
from leto_jax.config import HOST_TIER, PERSISTENT_TIER, Interval, Tiers
from leto_jax.distributed import ALONE, Ranks

type Leaves = Callable[[str], Iterable[np.ndarray]]
type Freeze = Callable[[int, Leaves, bytes], Callable[[], Frozen | None]]

AGREE_SECS = 600.0  # a rank may read and check a whole checkpoint meanwhile


class Schedule:
    """When the next copy is due, counted from `step`. Times in seconds of any one clock."""

    def __init__(self, every: Interval, mttf_secs: float, step: int, now: float):
        self.every, self._mttf_secs = every, mttf_secs
        self._step, self._at = step, now
        self._cost_secs: float | None = None

    def due(self, step: int, now: float) -> bool:
        """Whether the state of `step` is to be copied. The first one is taken at once where the interval is to be tuned."""
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
    """Takes copies into the tiers that a job has, between two steps, from `step` on. tell(tier=..., ...): for the journal; from any thread.

    form: of this rank's shards. freeze(step, leaves, position): copies them, and returns what is left to do to have the whole state, None where
    another rank writes it. A tier whose last copy is still under way is not due until it is done: a copy is complete or absent.
    """

    def __init__(self, form: Form, tiers: Tiers, step: int, host: HostMemory | None, freeze: Freeze, tell: Callable[..., None]):
        self._form, self._tiers, self._host, self._freeze, self._tell = form, tiers, host, freeze, tell
        self._pool = ThreadPoolExecutor(2, "leto-keeper")
        self._running: dict[str, Future] = {}
        self._schedules: dict[str, Schedule] = {}
        schedule = lambda every, option: Schedule(Interval.parse(every, option), tiers.mttf_secs, step, time.monotonic())
        if host is not None and tiers.copies_every:
            self._schedules[HOST_TIER] = schedule(tiers.copies_every, "--copy-every")
        if tiers.directory and tiers.every:
            self._schedules[PERSISTENT_TIER] = schedule(tiers.every, "--checkpoint-every")

    def due(self, step: int) -> set[str]:
        """The tiers that are to take a copy of `step`, as far as this rank knows."""
        now, busy = time.monotonic(), {tier for tier, running in self._running.items() if not running.done()}
        return {tier for tier, schedule in self._schedules.items() if tier not in busy and schedule.due(step, now)}

    @property
    def is_saving(self) -> bool:
        """Whether the persistent tier is under way."""
        return PERSISTENT_TIER in self._running and not self._running[PERSISTENT_TIER].done()

    def take(self, due: Container[str], step: int, leaves: Leaves, position: Callable[[], bytes]) -> None:
        """Copies the state of `step` into the tiers that are due. Raises what nobody expected of an earlier copy.

        Cost: of each one copy of the state; of a persistent one that is synchronous all of it. Waits for what is under way in the same tier.
        """
        for tier, schedule in self._schedules.items():
            if tier not in due:
                continue
            if tier in self._running:
                self._running.pop(tier).result()
            begin = time.monotonic()
            rest = self._begin(tier, step, leaves, position())
            if tier == PERSISTENT_TIER and not self._tiers.asynchronous:
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

    def _begin(self, tier: str, step: int, leaves: Leaves, position: bytes) -> Callable[[], bool]:
        """What training waits for; returns what can be done beside it, which says whether this rank has a copy to tell of."""
        if tier == HOST_TIER:
            assert self._host is not None
            finish = self._host.begin(step, leaves, position)
            return lambda: finish() is None
        rest = self._freeze(step, leaves, position)

        def save() -> bool:
            state = rest()
            if state is not None:
                persistent.save(self._form.whole, state, self._tiers.directory, self._tiers.keep)
            return state is not None

        return save

    def _finish(self, tier: str, step: int, begin: float, stall_secs: float | None, rest: Callable[[], bool]) -> float:
        """Does what is left to do for a copy, and tells the journal. stall_secs: None if training waits for this too. Returns the seconds in all."""
        problem, mine = "", True
        try:
            mine = rest()
        except errors.LetoError as exception:  # training goes on: what was there before still is
            problem = str(exception)
            print(f"leto: no copy of step {step} ({tier}): {problem}", file=sys.stderr, flush=True)
        secs = time.monotonic() - begin
        if mine:
            self._tell(tier=tier, commit=step, stall_secs=secs if stall_secs is None else stall_secs, secs=secs, error=problem)
        return secs


def newest(form: Form, host: HostMemory | None, directories: Iterable[str], ranks: Ranks = ALONE) -> tuple[Frozen, str] | None:
    """This rank's shards of the newest copy that is good on every rank, and where they were; None if there is none. All ranks call it.

    So it is the largest step in the intersection of what the ranks can restore, not the least of their newest ones, which one of them may lack.
    Raises LayoutError if a checkpoint is of another model, UsageError if its data cannot go on with this number of ranks, DeadlineError. What is
    damaged is passed over for the next older one, with a warning.
    """
    found: dict[int, list[tuple[int, str, Callable[[], Frozen]]]] = {}
    if host is not None:
        for step, where, load in host.copies():
            found.setdefault(step, []).append((step, where, load))
    for directory in directories:
        with contextlib.suppress(errors.CheckpointError):  # nothing was written there yet
            for step in persistent.versions(directory):
                load = functools.partial(_shards, form, directory, step, ranks.rank)
                found.setdefault(step, []).append((step, directory, load))  # behind those in memory, which are read sooner
    held = [set(json.loads(steps)) for steps in ranks.gather("versions", json.dumps(sorted(found)).encode(), AGREE_SECS)]
    for step in sorted(set.intersection(*held), reverse=True):
        good = persistent.first_good(found[step])
        if not ranks.agree(f"the copy of step {step}", "" if good is not None else "it has none that is good", AGREE_SECS):
            return good
    return None


def _shards(form: Form, directory: str, step: int, rank: int) -> Frozen:
    return form.cut(persistent.restore_version(form.whole, directory, step), rank)
