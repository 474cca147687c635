"""The watchdog over the trainers: who is overdue, and of several who wait for each other, who is to blame."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import NamedTuple

from leto_jax import errors
from leto_jax.agent import policy
from leto_jax.agent.generation import Generation
from leto_jax.agent.policy import Kind, Late, Progress
from leto_jax.agent.processes import Child, state_letter
from leto_jax.arena.control import Control, Word
from leto_jax.config import Deadlines
from leto_jax.faults import Phase


class Symptom(NamedTuple):
    """What tells of a failure. detect_secs: how long after it began, None if it told of itself. absent: the rank never came to its session."""

    rank: int
    kind: Kind
    detail: str
    detect_secs: float | None
    absent: bool = False


class Watch:
    """Looks at the state letters and control words of all ranks. Owns what it must remember from one look to the next."""

    def __init__(self, controls: Sequence[Control], deadlines: Deadlines):
        self._controls, self._deadlines = controls, deadlines
        self._stopped_since = [0] * len(controls)
        self._excused_ns = 0  # until then a rank had a good reason to keep its peers waiting

    def look(self, generation: Generation, promoted: bool, median_step_secs: float | None, injected: int | None) -> Symptom | None:
        """The rank that is to blame, if one is overdue. promoted: these trainers were shadows, and have not taken over yet. injected: a rank that
        was told to fail."""
        now, deadlines = time.monotonic_ns(), self._deadlines
        running = generation.running
        letters = {child.rank: state_letter(child.pid) for child in running}
        for rank in range(len(self._controls)):
            self._stopped_since[rank] = (self._stopped_since[rank] or now) if letters.get(rank) == "T" else 0
        limit = deadlines.takeover if promoted else deadlines.init
        progress: dict[int, Progress] = {}
        for child in running:
            if self._controls[child.rank][Word.PID] == 0:
                hang = self._before_the_loop(child, now, limit, time.monotonic() - generation.began > limit)
                if hang is not None:
                    return hang
                continue
            try:
                progress[child.rank] = self._read(child, generation.incarnation, letters[child.rank])
            except errors.RecordError as exception:
                return Symptom(child.rank, Kind.DAMAGED, str(exception), None)
        if promoted:  # nothing is left to compile
            deadlines = dataclasses.replace(deadlines, first_step=deadlines.takeover)
        if (found := self._blame(progress, now, deadlines, median_step_secs, injected)) is not None:
            rank, late = found
            return Symptom(rank, late.kind, late.why, (now - late.since_ns) / 1e9)
        return self._after_the_first_exit(generation, running)

    def _read(self, child: Child, incarnation: int, letter: str) -> Progress:
        """Raises RecordError for words that cannot be this child's."""
        control = self._controls[child.rank]
        control.check(child.pid, incarnation)
        return Progress(
            control.phase,
            control[Word.PHASE_SINCE_NS],
            control[Word.COMMIT],
            control[Word.STEPS_DONE],
            control[Word.ARMED_SINCE_NS],
            control[Word.SECTION_DEADLINE_NS],
            letter,
        )

    def _before_the_loop(self, child: Child, now: int, limit: float, late: bool) -> Symptom | None:
        """A rank that has not claimed its control words yet."""
        since = self._stopped_since[child.rank]
        if since and (now - since) / 1e9 > self._deadlines.stopped:
            return Symptom(child.rank, Kind.STOPPED, "the process was stopped before its first step", (now - since) / 1e9)
        if late:
            return Symptom(child.rank, Kind.HANG, f"no first step within {limit:g} s", limit, absent=not child.greeted)
        return None

    def _blame(
        self, progress: dict[int, Progress], now: int, deadlines: Deadlines, median_step_secs: float | None, injected: int | None
    ) -> tuple[int, Late] | None:
        def late_ones(seen: dict[int, Progress]) -> dict[int, Late]:
            found = {r: policy.overdue(p, now, deadlines, median_step_secs, self._stopped_since[r]) for r, p in seen.items()}
            return {rank: late for rank, late in found.items() if late is not None}

        if len(progress) > 1:
            late = late_ones(progress)
            if any(p.state == "t" or (p.phase is Phase.SECTION and rank not in late) for rank, p in progress.items()):
                self._excused_ns = now
            progress = {
                rank: dataclasses.replace(p, armed_since_ns=max(p.armed_since_ns, self._excused_ns)) if p.armed_since_ns else p
                for rank, p in progress.items()
            }
        patience = min(deadlines.peer_body, deadlines.body)
        return policy.blame(progress, late_ones(progress), now, int(patience * 1e9), injected)

    def _after_the_first_exit(self, generation: Generation, running: Sequence[Child]) -> Symptom | None:
        """All ranks end together: one that goes on for long after another's end waits for what does not come."""
        first, limit = generation.first_exit, self._deadlines.takeover
        if first is None or not running or time.monotonic() - first <= limit:
            return None
        return Symptom(
            running[0].rank, Kind.HANG, f"it did not end within {limit:g} s of the first rank that did", time.monotonic() - first
        )
