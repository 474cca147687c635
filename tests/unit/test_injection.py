"""One injection at a time: placed when the job is ready for it, answered when its failure is noticed, and never mixed up with the next one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from leto_jax.agent.injection import Injection
from leto_jax.arena.control import PHASES, Control, Word
from leto_jax.config import Deadlines
from leto_jax.errors import JobError, UsageError
from leto_jax.faults import Phase
from leto_jax.manager import protocol
from leto_jax.shadow import inject
from leto_jax.shadow.inject import KINDS, FailureKind, Injector


class Notes:
    def write(self, event: str, **fields: object) -> None:
        pass


@pytest.fixture
def control(control: Control) -> Control:
    control.claim(1234, 1, 100)
    return control


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def ask(injection: Injection, sock: socket.socket, kind: str = "sigkill", phase: str = "compute", **more: object) -> None:
    injection.ask(sock, {"op": "inject", "kind": kind, "phase": phase, "deadline_secs": 30, **more}, on_gpu=False)


def answer(sock: socket.socket) -> protocol.Message:
    return protocol.receive(sock, deadline=time.monotonic() + 5)[0]


def fire(control: Control, step: int) -> int:
    """What the trainer does. Returns when."""
    control[Word.INJECT_TAKEN] = control[Word.INJECT_SEQUENCE]
    control[Word.INJECT_FIRED_STEP] = step
    control[Word.INJECT_FIRED_NS] = now = time.monotonic_ns()
    return now


def test_the_next_one_is_not_placed_before_the_failure_of_the_first_is_noticed(control, sockets):
    ours, theirs = sockets
    injection = Injection([control], Notes(), Deadlines())
    ask(injection, theirs, deadline_secs=0.01)
    injection.serve(in_loop=(), shadow_ready=False)
    assert control[Word.INJECT_SEQUENCE] == 0
    injection.serve(in_loop={0}, shadow_ready=False)
    assert (control[Word.INJECT_KIND], control[Word.INJECT_PHASE]) == (KINDS.index(FailureKind.SIGKILL), PHASES.index(Phase.COMPUTE))
    fired_ns = fire(control, 7)
    time.sleep(0.02)
    injection.serve({0}, False)  # its deadline is over, and it has fired
    assert answer(ours) == {"ok": True, "fired_step": 7, "kind": "sigkill"}
    ask(injection, theirs, kind="sigstop", phase="update")
    injection.serve({0}, True)
    assert (control[Word.INJECT_SEQUENCE], control[Word.INJECT_FIRED_NS]) == (1, fired_ns)
    assert injection.fired() == (0, FailureKind.SIGKILL, fired_ns)
    assert injection.fired() is None
    injection.serve({0}, True)
    assert control[Word.INJECT_SEQUENCE] == 2
    fired_ns = fire(control, 9)
    assert injection.fired() == (0, FailureKind.SIGSTOP, fired_ns)
    assert answer(ours)["fired_step"] == 9


def test_a_failure_of_its_own_is_not_taken_for_the_one_that_waits(control, sockets):
    injection = Injection([control], Notes(), Deadlines())
    ask(injection, sockets[1], when_ready=True)
    injection.serve({0}, shadow_ready=False)
    assert injection.fired() is None
    injection.serve({0}, shadow_ready=True)
    assert injection.fired() is None
    with pytest.raises(JobError, match="another injection is still waiting"):
        ask(injection, sockets[1])
    fire(control, 3)
    assert injection.fired() is not None


def test_what_did_not_fire_in_time(control, sockets):
    ours, theirs = sockets
    injection = Injection([control], Notes(), Deadlines())
    for when_ready, in_loop, wanted in ((False, (), "the first step"), (True, {0}, "a ready shadow"), (False, {0}, "phase commit")):
        ask(injection, theirs, phase="commit", deadline_secs=0.01, when_ready=when_ready)
        injection.serve(in_loop, False)
        time.sleep(0.02)
        injection.serve(in_loop, False)
        assert answer(ours)["error"]["message"] == f"inject: the job did not come to {wanted} in time; nothing was injected"
        assert control[Word.INJECT_TAKEN] == control[Word.INJECT_SEQUENCE]  # it must not fire later


def test_one_that_is_survived_is_answered_when_it_has_fired_for_the_last_time(control, sockets, monkeypatch):
    ours, theirs = sockets
    injection, fired = Injection([control], Notes(), Deadlines()), []
    monkeypatch.setattr(inject, "fail", lambda kind, step, gpu: fired.append((kind, step)))
    injector = Injector(control, chunks=4)
    injection.survived()  # an error of the trainer's own
    ask(injection, theirs, kind="oom", times=2)
    injection.serve({0}, False)
    injection.survived()
    assert injection.fired() is None
    injector.check(Phase.COMPUTE, 5, -1)
    injection.survived()
    injector.check(Phase.COMPUTE, 5, -1)
    with pytest.raises(JobError, match="another injection is still waiting"):
        ask(injection, theirs)
    injection.survived()
    assert answer(ours) == {"ok": True, "fired_step": 5, "kind": "oom"}
    injector.check(Phase.COMPUTE, 6, -1)
    assert fired == [(FailureKind.OOM, 5)] * 2
    assert injection.fired() is None  # the next failure is another one
    ask(injection, theirs, kind="exception", times=2)  # a process dies of it once
    injection.serve({0}, False)
    injector.check(Phase.COMPUTE, 7, -1)
    injector.check(Phase.COMPUTE, 8, -1)
    assert fired[2:] == [(FailureKind.EXCEPTION, 7)]


def test_a_step_that_is_over_or_never_comes(control, sockets):
    control[Word.COMMIT] = 10
    injection = Injection([control], Notes(), Deadlines())
    for step in (10, 101):
        with pytest.raises(UsageError, match=f"--step {step}: expected a step that comes yet, 11 to 100"):
            ask(injection, sockets[1], step=step)
    ask(injection, sockets[1], step=11)
