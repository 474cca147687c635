"""A whole state of what several ranks hold: each copies its shards to memory of the state manager, and rank 0 puts them together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from leto_jax import errors
from leto_jax.arena.memory import Arena
from leto_jax.checkpoint.frozen import Form, Frozen
from leto_jax.checkpoint.hostmemory import HostMemory

WAIT_SECS, LOOK_SECS = 600.0, 0.05


def name(rank: int) -> str:
    """Under which the state manager keeps the shards of a rank."""
    return f"stage.{rank}"


class Stage:
    """arenas: of every rank, in rank order, in rank 0; only its own in the others; each of `hostmemory.nbytes(form)` bytes. epoch: of this generation of ranks.

    What lies there is overwritten by the next state: rank 0 says when that is, once it has written the last one.
    """

    def __init__(self, form: Form, arenas: Sequence[Arena], epoch: int, wait_secs: float = WAIT_SECS):
        self._form, self._wait_secs = form, wait_secs
        self._ranks = [HostMemory(form, [arena], epoch=epoch) for arena in arenas]

    def freeze(self, step: int, leaves: Callable[[str], Iterable[np.ndarray]], position: bytes) -> Callable[[], Frozen | None]:
        """Copies this rank's shards. Returns what is left to do, which gives the whole state in rank 0 and None elsewhere.

        What is left to do raises DeadlineError naming the ranks whose shards have not come, CheckpointError where they are not what was stored.
        Crash: of any rank, there is no whole state.
        Cost: one copy of the shards, blocking; then in rank 0 one of the whole.
        """
        finish = self._ranks[0].begin(step, leaves, position)

        def rest() -> Frozen | None:
            finish()
            return self._join(step) if len(self._ranks) > 1 else None

        return rest

    def _join(self, step: int) -> Frozen:
        shards: list[Frozen | None] = [None] * len(self._ranks)
        end = time.monotonic() + self._wait_secs
        while True:
            shards = [found or rank.look(step) for found, rank in zip(shards, self._ranks, strict=True)]
            there = [found for found in shards if found is not None]
            if len(there) == len(shards):
                return self._form.join(there)
            if time.monotonic() > end:
                late = ", ".join(str(rank) for rank, found in enumerate(shards) if found is None)
                raise errors.DeadlineError(
                    f"checkpoint {step}: expected the shards of all ranks within {self._wait_secs:.0f} s, none came from rank {late}"
                )
            time.sleep(LOOK_SECS)
