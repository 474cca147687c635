"""What a failure is and what to do about it: pure functions, each with its reason. The agent carries them out."""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Sequence

from leto_jax import errors
from leto_jax.config import Deadlines
from leto_jax.faults import Phase

GAVE_UP = errors.GAVE_UP
PREEMPTED = 5
STOPPED = 143  # as a process that was told to end
USAGE = 2


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
    retained cannot be repaired."""

    kind: Kind
    detail: str
    phase: Phase
    step: int
    detect_secs: float | None = None
    lost: bool = False

    def describe(self) -> str:
        return f"{self.detail} in {self.phase.value} after commit {self.step}"


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
    if failure.kind is Kind.EXIT and failure.detail == f"exit code {GAVE_UP}":
        return Decision(Action.STOP, "the trainer gave up on purpose")
    same = 1
    for earlier in reversed(history):
        if (earlier.kind, earlier.detail, earlier.step) != (failure.kind, failure.detail, failure.step):
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


def overdue(
    progress: Progress, now_ns: int, deadlines: Deadlines, median_step_secs: float | None, stopped_since_ns: int
) -> tuple[Kind, str, int] | None:
    """Whether the trainer hangs: (kind, why, since when), or None.

    A debugger (state `t`) pauses the watchdog. A stopped process is told from a slow one by its state. Otherwise each part of the
    life of a trainer has its own deadline, and a running step the one learnt from earlier steps.
    """
    if progress.state == "t":
        return None
    if stopped_since_ns and (now_ns - stopped_since_ns) / 1e9 > deadlines.stopped:
        return Kind.STOPPED, f"the process was stopped (SIGSTOP) for more than {deadlines.stopped:g} s", stopped_since_ns
    if progress.phase is Phase.SECTION:
        if progress.section_deadline_ns and now_ns > progress.section_deadline_ns:
            return Kind.HANG, "a section outlasted its timeout_secs", progress.phase_since_ns
        return None
    if progress.armed_since_ns:
        limit = deadlines.first_step
        if progress.phase is Phase.TAKEOVER:
            limit = deadlines.takeover
        elif progress.steps_done and median_step_secs is not None:
            limit = step_deadline(deadlines, median_step_secs)
        if (now_ns - progress.armed_since_ns) / 1e9 > limit:
            return (
                Kind.HANG,
                f"no commit within {limit:.1f} s of its step's start (learnt from steps of {median_step_secs or 0:.3f} s)",
                progress.armed_since_ns,
            )
        return None
    since = (now_ns - progress.phase_since_ns) / 1e9
    if progress.phase is Phase.INIT and since > deadlines.init:
        return Kind.HANG, f"the state was not filled or attached within {deadlines.init:g} s", progress.phase_since_ns
    if progress.phase is Phase.TAKEOVER and since > deadlines.takeover:
        return Kind.HANG, f"the takeover did not end within {deadlines.takeover:g} s", progress.phase_since_ns
    if progress.phase is Phase.BODY and since > deadlines.body:
        return (
            Kind.HANG,
            f"the loop body took more than {deadlines.body:g} s outside of a section; wrap long work in `with s.section(name, timeout_secs=...)`",
            progress.phase_since_ns,
        )
    return None


def step_deadline(deadlines: Deadlines, median_step_secs: float) -> float:
    """How long a step may take, from what steps took: seconds."""
    return max(deadlines.hang_floor, deadlines.hang_factor * median_step_secs)
