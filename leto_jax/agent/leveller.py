"""Keeps the shadows of a job at the level that was asked for, or that its device has room for: `levels` decides, here it is carried out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from leto_jax import errors
from leto_jax.agent.generation import Generation
from leto_jax.agent.headroom import Headroom, Sample
from leto_jax.agent.levels import ASIDE, LOADED, Change, Policy, Top
from leto_jax.agent.parking import Parking
from leto_jax.goodput.journal import Journal
from leto_jax.manager import protocol


class Leveller:
    """Owns the look at the free memory, and the process that is moved aside.

    setting: one of `config.SHADOW_LEVELS`. tell(shadows, message): to all of them, or raises. Where a method returns words, the shadows must be
    ended for that reason, and the next ones start at `top`.
    """

    def __init__(
        self,
        setting: str,
        ranks: int,
        journal: Journal,
        say: Callable[[str], None],
        tell: Callable[[Generation, protocol.Message], None],
    ):
        self._journal, self._say, self._tell = journal, say, tell
        self._policy, self._parking = Policy(setting, several=ranks > 1), Parking()
        self._headroom: Headroom | None = None
        self._seen: Sample | None = None

    @property
    def top(self) -> Top:
        """Where shadows should wait."""
        return self._policy.top

    def watch(self, gpus: Sequence[int], environ: Mapping[str, str]) -> None:
        """From here on the memory of these GPUs counts, if the level is ours to choose."""
        self.close()
        if gpus and self._policy.auto:
            self._headroom = Headroom(gpus, environ)

    def poll(self, shadows: Generation | None) -> str:
        """What became of a move, and of the free memory. Called in each turn of the loop; never waits."""
        if self._parking.ended and (reason := self._moved(shadows)):
            return reason
        headroom = self._headroom
        if headroom is None or self._parking.moving:
            return ""
        if headroom.problem:
            self._say(f"free memory cannot be watched, the shadow stays at its level: {headroom.problem}")
            self.close()
            return ""
        sample = headroom.latest
        if sample is None or sample is self._seen:
            return ""
        self._seen = sample
        change = self._policy.look(sample.free, sample.at, _state(shadows))
        return "" if change is None else self._carry_out(change, shadows, sample.free)

    def ready(self, shadows: Generation) -> str:
        """All of them are. What they wait for may have changed since they were started."""
        if shadows.level < self.top.level:
            return self._rise(shadows)
        return self._set_aside(shadows) if self.top.parked else ""

    def bring_back(self, shadows: Generation) -> None:
        """Before they are promoted. Raises DeviceError, DeadlineError: then they are of no use.

        Cost: nothing, unless they are parked; then half a second, and more if they are only on their way there.
        """
        for child in shadows.children:
            if self._parking.moving and self._parking.pid == child.pid:
                self._parking.wait()
                child.parked = self._parking.aside
            if child.parked:
                self._parking.begin(child.pid, aside=False)
                self._parking.wait()
                child.parked = False

    def reclaimed(self) -> None:
        """The trainer has run out of memory, and the shadows have been ended for it."""
        change = self._policy.reclaimed() if self._headroom is not None else None
        if change is not None:
            self._note(change, None)

    def close(self) -> None:
        """Ends the look at the memory."""
        if self._headroom is not None:
            self._headroom.close()
            self._headroom = None

    # ------------------------------------------------------------------------------------------------------------------------------

    def _note(self, change: Change, free: int | None) -> None:
        self._journal.write("level", level=change.top.shown, reason=change.reason, free_bytes=free)

    def _carry_out(self, change: Change, shadows: Generation | None, free: int) -> str:
        self._note(change, free)
        if shadows is None:
            return ""
        if change.top == ASIDE:
            return self._set_aside(shadows)
        if change.top == LOADED:
            if any(child.parked for child in shadows.children):
                self._parking.begin(shadows.children[0].pid, aside=False)
                return ""
            return self._rise(shadows) if shadows.ready else ""  # else once they are
        return change.reason

    def _rise(self, shadows: Generation) -> str:
        try:
            self._tell(shadows, {"op": "rise", "level": int(self.top.level)})
        except errors.LetoError as exception:
            return str(exception)
        shadows.rising()
        return ""

    def _set_aside(self, shadows: Generation) -> str:
        if self._parking.moving:
            return self._cannot_park(f"process {self._parking.pid} is still on its way")
        self._parking.begin(shadows.children[0].pid, aside=True)
        return ""

    def _moved(self, shadows: Generation | None) -> str:
        """A move is over: of the shadow, or of a process that is none any more."""
        problem = ""
        try:
            self._parking.wait()
        except errors.DeviceError as exception:
            problem = str(exception)
        child = next((child for child in shadows.children if child.pid == self._parking.pid), None) if shadows is not None else None
        if child is None:
            return ""
        if problem:
            return self._cannot_park(problem)
        child.parked = self._parking.aside
        return ""

    def _cannot_park(self, problem: str) -> str:
        change = self._policy.cannot_park(problem)
        self._note(change, None)
        return change.reason


def _state(shadows: Generation | None) -> str:
    if shadows is None:
        return "none"
    if not shadows.ready:
        return "loading"
    return "parked" if any(child.parked for child in shadows.children) else "ready"
