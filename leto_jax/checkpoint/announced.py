"""Which copies the ranks of a job take of which step: rank 0 says it one step ahead, in its control words, which all of them read."""

from __future__ import annotations

from collections.abc import Iterable

from leto_jax.arena.control import Control, Word

_PLACES = (Word.COPIES_EVEN, Word.COPIES_ODD)


class Announced:
    """control: of rank 0, which alone says something. names: of what may be taken, in the same order on all ranks.

    A rank that has committed a step has been through its collectives; so rank 0 had begun it, and said before what is taken behind it. And rank 0
    is at most one step ahead: two words in turn are enough.
    """

    def __init__(self, control: Control, names: Iterable[str]):
        self._control, self._names = control, tuple(names)
        self._taken = -1

    def say(self, step: int, due: Iterable[str]) -> None:
        """All ranks shall take these of `step`. Rank 0 calls it for each step, before it begins the step; for the first one before a barrier."""
        found = set(due)
        mask = sum(1 << n for n, name in enumerate(self._names) if name in found)
        self._control[_PLACES[step % 2]] = step << len(self._names) | mask

    def take(self, step: int) -> set[str]:
        """What is to be taken of `step`, the first time that it is asked for."""
        word = self._control[_PLACES[step % 2]]
        if word >> len(self._names) != step or step == self._taken:
            return set()
        self._taken = step
        return {name for n, name in enumerate(self._names) if word >> n & 1}
