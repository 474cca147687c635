"""What a failure is and what to do about it, as tables: the agent only carries it out."""

from __future__ import annotations

import dataclasses

import pytest

from leto_jax.agent.policy import (
    Action,
    Decision,
    Failure,
    Kind,
    Late,
    Limits,
    Progress,
    blame,
    classify,
    cold_delay,
    decide,
    overdue,
    root_cause,
    step_deadline,
)
from leto_jax.config import Deadlines
from leto_jax.faults import Phase

FINE = (True, "")
NO_SPARE = (False, "there is none")
SPARE = (True, "a spare goes on from the newest copy")
S = 1_000_000_000
NOW = 1000 * S
DEADLINES = Deadlines(init=600.0, first_step=500.0, takeover=60.0, body=300.0, hang_floor=3.0, hang_factor=5.0, stopped=1.0)


def failure(detail: str = "SIGKILL", step: int = 7, kind: Kind = Kind.SIGNAL, rank: int | None = None) -> Failure:
    return Failure(kind, detail, Phase.COMPUTE, step, rank=rank)


def test_classify():
    assert classify(-9) == (Kind.SIGNAL, "SIGKILL")
    assert classify(-60) == (Kind.SIGNAL, "signal 60")
    assert classify(17) == (Kind.EXIT, "exit code 17")


@pytest.mark.parametrize(("shadow", "action"), [("ready", Action.PROMOTE), ("loading", Action.WAIT), ("none", Action.COLD)])
def test_who_takes_over(shadow, action):
    assert decide(failure(), [], Limits(), FINE, shadow, NO_SPARE).action is action


@pytest.mark.parametrize(
    ("now", "history", "limits", "reason"),
    [
        (
            failure(),
            [failure()] * 3,
            Limits(without_progress=3),
            "SIGKILL 4 times after commit 7 without progress (--max-restarts-without-progress 3)",
        ),
        (failure(), [failure()] * 2, Limits(without_progress=3), ""),
        (failure(), [failure()] * 3 + [failure(step=6)], Limits(without_progress=3), ""),
        (failure(), [failure(step=6)] * 9, Limits(without_progress=3), ""),
        (failure(), [failure("SIGSEGV")] * 9, Limits(without_progress=3), ""),
        (failure(), [failure()], Limits(without_progress=1), "SIGKILL 2 times after commit 7"),
        (failure(rank=1), [failure(rank=1)], Limits(without_progress=1), "SIGKILL 2 times after commit 7"),
        (failure(rank=1), [failure(rank=0)], Limits(without_progress=1), "SIGKILL 2 times after commit 7"),
        (failure(), [], Limits(max_restarts=0), "0 restarts were made (--max-restarts 0)"),
        (failure(), [failure(step=1)], Limits(max_restarts=1), "1 restarts were made (--max-restarts 1)"),
        (failure(), [failure(step=1)], Limits(max_restarts=2), ""),
        (failure("exit code 3", kind=Kind.EXIT), [], Limits(), "the trainer gave up on purpose"),
        (failure("params: the job holds", kind=Kind.REFUSED), [], Limits(), "params: the job holds"),
    ],
)
def test_when_it_stops(now, history, limits, reason):
    decision = decide(now, history, limits, FINE, "ready", NO_SPARE)
    assert decision.action is (Action.STOP if reason else Action.PROMOTE)
    assert decision.reason.startswith(reason or "a shadow is ready")


def test_a_machine_that_cannot_go_on_comes_first():
    decision = decide(failure(), [], Limits(), (False, "expected 256 MiB of free memory"), "ready", NO_SPARE)
    assert decision == Decision(Action.STOP, "the device cannot go on: expected 256 MiB of free memory; no spare takes over: there is none")


def test_a_spare_is_for_what_cannot_go_on_where_it_is():
    """An inoperable device, or a state beyond repair; not for a failure that a shadow takes over from, nor for a refusal of another kind."""
    inoperable = (False, "Xid 79")
    assert decide(failure(), [], Limits(), FINE, "ready", SPARE).action is Action.PROMOTE
    assert decide(failure(), [], Limits(), inoperable, "ready", SPARE) == Decision(
        Action.SPARE, "the device cannot go on: Xid 79; a spare goes on from the newest copy"
    )
    refused = failure("3 of 32 pages are lost", kind=Kind.REFUSED)
    assert decide(refused, [], Limits(), FINE, "none", SPARE).action is Action.STOP
    lost = dataclasses.replace(refused, lost=True)
    assert decide(lost, [], Limits(), FINE, "none", SPARE) == Decision(
        Action.SPARE, "3 of 32 pages are lost; a spare goes on from the newest copy"
    )
    assert decide(lost, [], Limits(), FINE, "none", NO_SPARE) == Decision(
        Action.STOP, "3 of 32 pages are lost; no spare takes over: there is none"
    )


QUIET = Progress(Phase.BODY, NOW - S, 7, 5, 0, 0, "S")


def late(secs: float, stopped_secs: float = 0.0, median: float | None = 0.1, **changes: object) -> str:
    """Why a trainer is overdue whose phase, and if armed whose step, began `secs` ago; '' if it is not."""
    since = NOW - int(secs * S)
    progress = dataclasses.replace(QUIET, phase_since_ns=since, **changes)
    if changes.get("armed_since_ns"):
        progress = dataclasses.replace(progress, armed_since_ns=since)
    found = overdue(progress, NOW, DEADLINES, median, NOW - int(stopped_secs * S) if stopped_secs else 0)
    if found is None:
        return ""
    kind, why, start = found
    assert kind is (Kind.STOPPED if stopped_secs > DEADLINES.stopped else Kind.HANG)
    assert start == (NOW - int(stopped_secs * S) if stopped_secs else since)
    return why


@pytest.mark.parametrize(
    ("limit", "changes", "why"),
    [
        (3.0, {"phase": Phase.COMPUTE, "armed_since_ns": 1}, "no commit within 3.0 s of its step's start (learnt from steps of 0.100 s)"),
        (10.0, {"phase": Phase.UPDATE, "armed_since_ns": 1, "median": 2.0}, "no commit within 10.0 s of its step's start"),
        (500.0, {"phase": Phase.COMPUTE, "armed_since_ns": 1, "steps_done": 0}, "no commit within 500.0 s"),
        (500.0, {"phase": Phase.DECIDE, "armed_since_ns": 1, "median": None}, "no commit within 500.0 s"),
        (60.0, {"phase": Phase.TAKEOVER, "steps_done": 0}, "the takeover did not end within 60 s"),
        (600.0, {"phase": Phase.INIT, "steps_done": 0}, "the state was not filled or attached within 600 s"),
        (300.0, {}, "the loop body took more than 300 s outside of a section; wrap long work in `with s.section(name, timeout_secs=...)`"),
        (300.0, {"steps_done": 0}, "the loop body took more than 300 s"),  # of a replayed step
    ],
)
def test_each_part_of_a_life_has_its_own_deadline(limit, changes, why):
    assert late(limit - 0.5, **changes) == ""
    assert late(limit + 0.5, **changes).startswith(why)
    assert late(limit + 0.5, **changes, state="t") == ""  # a debugger pauses the watchdog


def test_a_section_has_the_limit_that_it_asked_for():
    section = {"phase": Phase.SECTION}
    assert late(10_000, **section) == ""
    assert late(10_000, **section, section_deadline_ns=NOW + S) == ""
    assert late(10, **section, section_deadline_ns=NOW - 1) == "a section outlasted its timeout_secs"


def test_a_stopped_process_is_told_from_a_slow_one():
    assert late(0.1, stopped_secs=0.5, state="T") == ""
    assert late(0.1, stopped_secs=1.5, state="T") == "the process was stopped (SIGSTOP) for more than 1 s"
    assert late(0.1, phase=Phase.DONE, stopped_secs=0.5) == ""


def test_the_deadline_of_a_step_is_learnt():
    assert [step_deadline(DEADLINES, secs) for secs in (0.01, 0.6, 1.0, 60.0)] == [3.0, 3.0, 5.0, 300.0]


KILLED, EXITED, GAVE_UP = (Kind.SIGNAL, "SIGKILL"), (Kind.EXIT, "exit code 1"), (Kind.EXIT, "exit code 3")


@pytest.mark.parametrize(
    ("dead", "injected", "rank"),
    [
        ([(0, *KILLED)], None, 0),
        ([(1, *EXITED), (0, *EXITED)], None, 1),  # the first one seen
        ([(0, *EXITED), (2, *EXITED), (1, *KILLED)], None, 1),  # survivors of a broken collective exit by themselves
        ([(2, *KILLED), (1, *KILLED)], None, 2),
        ([(0, *KILLED), (1, *GAVE_UP)], None, 1),
        ([(0, *EXITED), (1, *EXITED)], 1, 1),
        ([(0, *KILLED), (1, *EXITED)], 1, 1),
        ([(0, *EXITED)], 1, 0),  # it lives
    ],
)
def test_the_first_of_several_ranks_that_died(dead, injected, rank):
    assert dead[root_cause(dead, injected)][0] == rank


IN_STEP = dataclasses.replace(QUIET, phase=Phase.COMPUTE, armed_since_ns=NOW - 4 * S)
HUNG, STILL = Late(Kind.HANG, "no commit", NOW - 4 * S), Late(Kind.STOPPED, "stopped", NOW - 2 * S)


@pytest.mark.parametrize(
    ("ranks", "late", "blamed"),
    [
        ([IN_STEP, IN_STEP], {}, None),
        ([IN_STEP, IN_STEP], {0: HUNG, 1: HUNG}, 0),
        ([IN_STEP, IN_STEP], {1: HUNG}, 1),
        ([IN_STEP, IN_STEP], {0: HUNG, 1: STILL}, 1),
        ([IN_STEP, dataclasses.replace(IN_STEP, commit=6)], {0: HUNG, 1: HUNG}, 1),
        ([IN_STEP, QUIET], {0: HUNG, 1: HUNG}, 1),
        ([dataclasses.replace(QUIET, phase=Phase.SECTION), IN_STEP, IN_STEP], {0: HUNG, 1: HUNG, 2: HUNG}, 0),
        ([IN_STEP, IN_STEP, QUIET], {0: HUNG, 1: HUNG}, 2),  # its body goes on for so long that its peers are late
        ([IN_STEP, QUIET, dataclasses.replace(QUIET, commit=6)], {0: HUNG}, 2),
        ([IN_STEP, dataclasses.replace(QUIET, phase=Phase.DONE)], {0: HUNG}, 0),
        ([IN_STEP, QUIET], {0: STILL}, 0),
        ([IN_STEP, dataclasses.replace(QUIET, commit=8)], {0: HUNG}, 0),  # the other one has the collective behind it
    ],
)
def test_of_ranks_that_wait_for_each_other_one_is_to_blame(ranks, late, blamed):
    found = blame(dict(enumerate(ranks)), late, NOW, 0)
    assert (None if found is None else found[0]) == blamed
    patient = blame(dict(enumerate(ranks)), late, NOW, 10_000 * S)
    assert patient == (None if found is not None and blamed not in late else found)  # of a body that has not been away for long enough
    for injected in late:
        assert blame(dict(enumerate(ranks)), late, NOW, 0, injected) == (injected, late[injected])
    if found is not None and blamed not in late:
        assert found[1].why.startswith("the loop body kept the other ranks waiting (rank 0: no commit); wrap long work in ")
        assert found[1].since_ns == ranks[blamed].phase_since_ns


def test_cold_starts_that_lead_nowhere_come_later_each_time():
    assert [cold_delay(starts) for starts in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
