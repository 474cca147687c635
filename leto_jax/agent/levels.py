"""At which level the shadows of a job should wait: a pure policy over samples of free device memory.

    loaded --(free < MARGIN)--> parked where that works, else waiting in a new process that has not opened the device
    either --(free >= MARGIN + what a shadow takes, for as long as patience says)--> loaded

Nobody can take device memory from a process that has it, so the way down is to park it, or to end it. Each way up makes the next one wait
twice as long: memory that is needed again and again is not there for a shadow.
"""

from __future__ import annotations

from typing import NamedTuple

from leto_jax.config import AUTO, PARKED, Level

MARGIN_BYTES = 1 << 30  # with less, the trainer's next allocation may fail; as in train.budget
FIRST_BYTES = 2 << 30  # what a shadow takes, until one was seen to get ready: its context and a few programs
PATIENCE_SECS = 30.0
MAX_PATIENCE_SECS = 960.0


class Top(NamedTuple):
    """Where the shadows should wait. parked: with their GPU state in host memory."""

    level: Level
    parked: bool = False

    @property
    def shown(self) -> int | str:
        """For people and the journal."""
        return PARKED if self.parked else int(self.level)


LOADED, ASIDE, OUT = Top(Level.LOADED), Top(Level.LOADED, parked=True), Top(Level.PROCESS)


class Change(NamedTuple):
    """A new top, and why."""

    top: Top
    reason: str


class Policy:
    """What was seen of one job's device. setting: of SHADOW_LEVELS. several: there are several ranks, none of which can be parked.

    Times in seconds of any one clock, memory in bytes.
    """

    def __init__(self, setting: str, several: bool = False):
        self.auto = setting == AUTO
        self.top = LOADED if self.auto else ASIDE if setting == PARKED else Top(Level(int(setting)))
        self.shadow_bytes = FIRST_BYTES
        self._parks = not several
        self._patience = PATIENCE_SECS
        self._room_since: float | None = None
        self._before: int | None = None  # free when the shadow that gets ready had taken nothing
        self._least = 0  # and the least since then

    def look(self, free: int, now: float, shadow: str) -> Change | None:
        """A sample, and what follows from it. shadow: 'none', 'loading', 'ready' or 'parked'."""
        if not self.auto:
            return None
        self._measure(free, shadow)
        needed = MARGIN_BYTES + self.shadow_bytes
        if self.top == LOADED:
            if free >= (needed if shadow == "none" else MARGIN_BYTES):
                return None
            return self._down(ASIDE if shadow == "ready" and self._parks else OUT, f"{_gib(free)} are free")
        if self.top == ASIDE and shadow != "parked":
            return self._down(OUT, "the parked shadow has taken over, or is dead")
        if free < needed:
            self._room_since = None
            return None
        self._room_since = now if self._room_since is None else self._room_since
        if now - self._room_since < self._patience:
            return None
        reason = f"{_gib(needed)} and more have been free for {self._patience:g} s"
        self.top, self._room_since, self._patience = LOADED, None, min(2 * self._patience, MAX_PATIENCE_SECS)
        return Change(LOADED, reason)

    def reclaimed(self) -> Change | None:
        """The trainer ran out of memory, and the shadows were ended for it."""
        return self._down(OUT, "the trainer ran out of memory") if self.auto and self.top != OUT else None

    def cannot_park(self, reason: str) -> Change:
        """Parking has failed: it is not tried again, not even where it was asked for."""
        self._parks = False
        return self._down(OUT, f"a shadow cannot be parked: {reason}")

    def _down(self, top: Top, reason: str) -> Change:
        self.top, self._room_since = top, None
        return Change(top, reason)

    def _measure(self, free: int, shadow: str) -> None:
        """What a shadow takes, from the least that was free while it got ready."""
        if self.top != LOADED or shadow == "parked":
            self._before = None
        elif shadow == "none" or (shadow == "loading" and self._before is None):
            self._before = self._least = free
        elif shadow == "loading":
            self._least = min(self._least, free)
        elif self._before is not None:
            self.shadow_bytes, self._before = max(FIRST_BYTES, self._before - min(self._least, free)), None


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
