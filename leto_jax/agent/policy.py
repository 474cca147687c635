"""What a failure is and what to do about it: pure functions, each with its reason. The agent carries them out."""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from leto_jax import errors
from leto_jax.config import Deadlines
from leto_jax.faults import Phase

GAVE_UP = errors.GAVE_UP
PREEMPTED = 5
STOPPED = 143  # as a process that was told to end
USAGE = 2
MAX_COLD_DELAY_SECS = 30.0
OUTSIDE = (Phase.INIT, Phase.BODY, Phase.SECTION)


class Kind(enum.StrEnum):
    """Observed kinds of failure."""

    SIGNAL = enum.auto()
    EXIT = enum.auto()
    HANG = enum.auto()
    STOPPED = enum.auto()
    DAMAGED = enum.auto()  # the control words cannot be what the trainer wrote
    REFUSED = enum.auto()  # the process said that it cannot take part, and why


@dataclasses.dataclass(frozen=True)
class Failure:
    """One failure of a trainer. step: commit when it happened. detect_secs: None where the failure announced itself. lost: what is
    retained cannot be repaired. rank: None where there is only one."""

    kind: Kind
    detail: str
    phase: Phase
    step: int
    detect_secs: float | None = None
    lost: bool = False
    rank: int | None = None

    @property
    def what(self) -> tuple[Kind, str, int]:
        """Equal for failures that are the same one again. Not the rank: of several that fail alike the one seen first is blamed."""
        return self.kind, self.detail, self.step

    def describe(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{where}{self.detail} in {self.phase.value} after commit {self.step}"


class Action(enum.StrEnum):
    PROMOTE = enum.auto()  # a shadow is ready
    WAIT = enum.auto()  # a shadow is loading: it will be ready sooner than a new process
    SPARE = enum.auto()  # other memory, filled from the newest copy
    COLD = enum.auto()  # start a new trainer, which attaches to the retained state
    STOP = enum.auto()  # give up, state kept


@dataclasses.dataclass(frozen=True)
class Decision:
    action: Action
    reason: str


@dataclasses.dataclass(frozen=True)
class Limits:
    """When to stop restarting. max_restarts: None = no limit. without_progress: restarts after equal failures at one step."""

    max_restarts: int | None = None
    without_progress: int = 3


@dataclasses.dataclass(frozen=True)
class Progress:
    """What the control words say, read once. Times in CLOCK_MONOTONIC nanoseconds, 0 = not set."""

    phase: Phase
    phase_since_ns: int
    commit: int
    steps_done: int
    armed_since_ns: int
    section_deadline_ns: int
    state: str  # the process' state letter in /proc


def classify(returncode: int) -> tuple[Kind, str]:
    """Kind and words for an exit status (negative: signal)."""
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        return Kind.SIGNAL, name
    return Kind.EXIT, f"exit code {returncode}"


def gave_up(kind: Kind, detail: str) -> bool:
    """Whether a trainer ended on purpose, in a way that no other one would mend."""
    return kind is Kind.EXIT and detail == f"exit code {GAVE_UP}"


def root_cause(dead: Sequence[tuple[int, Kind, str]], injected: int | None) -> int:
    """Which of several ranks that died together was the first: an index of `dead`, (rank, kind, detail) as they were seen.

    The one that was told to fail; else one that gave up; else one that was killed, since those whose collective breaks exit by themselves.
    """

    def order(index: int) -> tuple[bool, bool, bool, int]:
        rank, kind, detail = dead[index]
        return rank != injected, not gave_up(kind, detail), kind is not Kind.SIGNAL, index

    return min(range(len(dead)), key=order)


def decide(
    failure: Failure, history: Sequence[Failure], limits: Limits, operable: tuple[bool, str], shadow: str, spare: tuple[bool, str]
) -> Decision:
    """What to do about `failure`. history: earlier ones, oldest first. shadow: 'ready', 'loading' or 'none'. spare: whether there is one with a
    copy for it, or why not."""
    if not operable[0] or failure.lost:
        reason = failure.detail if operable[0] else f"the device cannot go on: {operable[1]}"
        if spare[0]:
            return Decision(Action.SPARE, f"{reason}; {spare[1]}")
        return Decision(Action.STOP, f"{reason}; no spare takes over: {spare[1]}")
    if failure.kind is Kind.REFUSED:
        return Decision(Action.STOP, failure.detail)
    if gave_up(failure.kind, failure.detail):
        return Decision(Action.STOP, "the trainer gave up on purpose")
    same = 1
    for earlier in reversed(history):
        if earlier.what != failure.what:
            break
        same += 1
    if same > limits.without_progress:
        return Decision(
            Action.STOP,
            f"{failure.detail} {same} times after commit {failure.step} without progress (--max-restarts-without-progress {limits.without_progress})",
        )
    if limits.max_restarts is not None and len(history) >= limits.max_restarts:
        return Decision(Action.STOP, f"{len(history)} restarts were made (--max-restarts {limits.max_restarts})")
    return successor(shadow)


def successor(shadow: str) -> Decision:
    """Who comes next. shadow: 'ready', 'loading' or 'none'."""
    if shadow == "ready":
        return Decision(Action.PROMOTE, "a shadow is ready")
    if shadow == "loading":
        return Decision(Action.WAIT, "a shadow is loading")
    return Decision(Action.COLD, "no shadow is ready")


def cold_delay(starts: int) -> float:
    """Seconds until the next cold start, after `starts` of them that led to a failure at the same step: 0, 1, 2, 4 and so on."""
    return min(2.0 ** (starts - 1), MAX_COLD_DELAY_SECS) if starts else 0.0


class Late(NamedTuple):
    """A rank that is overdue. since_ns: CLOCK_MONOTONIC when what it hangs in began."""

    kind: Kind
    why: str
    since_ns: int


def blame(
    progress: Mapping[int, Progress], late: Mapping[int, Late], now_ns: int, body_ns: int, injected: int | None = None
) -> tuple[int, Late] | None:
    """The rank that holds the others up, and how; None if nobody is overdue. progress, late: by rank. injected: one that was told to fail.

    When one rank stops or spins, its peers wait for it in a collective, and become overdue with it or before it. So a stopped one is blamed
    first, then one that is not inside a step, then the one that has committed least, then the lowest. And if all who are overdue wait in a
    step, while the loop body of one that has committed no more keeps it out, that one is blamed, once its body has taken `body_ns`.
    """
    if not late:
        return None
    if injected is not None and injected in late:
        return injected, late[injected]
    rank = min(
        late, key=lambda rank: (late[rank].kind is not Kind.STOPPED, progress[rank].phase not in OUTSIDE, progress[rank].commit, rank)
    )
    found = late[rank]
    if found.kind is not Kind.STOPPED and progress[rank].armed_since_ns:
        away = [
            peer
            for peer, its in progress.items()
            if peer not in late and not its.armed_since_ns and its.phase is Phase.BODY and its.commit <= progress[rank].commit
        ]
        if away:
            peer = min(away, key=lambda peer: (progress[peer].commit, peer))
            if now_ns - progress[peer].phase_since_ns < body_ns:
                return None
            why = f"the loop body kept the other ranks waiting (rank {rank}: {found.why}); wrap long work in `with s.section(name, timeout_secs=...)`"
            return peer, Late(Kind.HANG, why, progress[peer].phase_since_ns)
    return rank, found


def overdue(progress: Progress, now_ns: int, deadlines: Deadlines, median_step_secs: float | None, stopped_since_ns: int) -> Late | None:
    """Whether a trainer hangs, None if not.

    A debugger (state `t`) pauses the watchdog. A stopped process is told from a slow one by its state. Otherwise each part of the
    life of a trainer has its own deadline, and a running step the one learnt from earlier steps.
    """
    if progress.state == "t":
        return None
    if stopped_since_ns and (now_ns - stopped_since_ns) / 1e9 > deadlines.stopped:
        return Late(Kind.STOPPED, f"the process was stopped (SIGSTOP) for more than {deadlines.stopped:g} s", stopped_since_ns)
    if progress.phase is Phase.SECTION:
        if progress.section_deadline_ns and now_ns > progress.section_deadline_ns:
            return Late(Kind.HANG, "a section outlasted its timeout_secs", progress.phase_since_ns)
        return None
    if progress.armed_since_ns:
        limit = deadlines.first_step
        if progress.phase is Phase.TAKEOVER:
            limit = deadlines.takeover
        elif progress.steps_done and median_step_secs is not None:
            limit = step_deadline(deadlines, median_step_secs)
        if (now_ns - progress.armed_since_ns) / 1e9 > limit:
            return Late(
                Kind.HANG,
                f"no commit within {limit:.1f} s of its step's start (learnt from steps of {median_step_secs or 0:.3f} s)",
                progress.armed_since_ns,
            )
        return None
    since = (now_ns - progress.phase_since_ns) / 1e9
    if progress.phase is Phase.INIT and since > deadlines.init:
        return Late(Kind.HANG, f"the state was not filled or attached within {deadlines.init:g} s", progress.phase_since_ns)
    if progress.phase is Phase.TAKEOVER and since > deadlines.takeover:
        return Late(Kind.HANG, f"the takeover did not end within {deadlines.takeover:g} s", progress.phase_since_ns)
    if progress.phase is Phase.BODY and since > deadlines.body:
        return Late(
            Kind.HANG,
            f"the loop body took more than {deadlines.body:g} s outside of a section; wrap long work in `with s.section(name, timeout_secs=...)`",
            progress.phase_since_ns,
        )
    return None


def step_deadline(deadlines: Deadlines, median_step_secs: float) -> float:
    """How long a step may take, from what steps took: seconds."""
    return max(deadlines.hang_floor, deadlines.hang_factor * median_step_secs)
