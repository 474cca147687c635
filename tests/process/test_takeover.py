"""Real processes that are killed at named places and at random times: the state goes on from process to process, to the bit."""

from __future__ import annotations

import random
import signal
import time

import pytest

from leto_jax.config import Deadlines
from leto_jax.goodput import report

CHUNKS = 4  # of the tiny model
NAMED = (
    ("compute", -1),
    ("decide", -1),
    ("update", 0),
    ("update", 1),
    ("update", CHUNKS - 1),
    ("commit", -1),
    ("drain", -1),
    ("body", -1),
)
RANDOM_KILLS = 10
STEPS = 600
STEPS_PER_KILL = 30


@pytest.mark.timeout(900)
def test_killed_at_ten_places_and_ten_times_at_random(jobs, seed):
    run = jobs.start(steps=STEPS)
    run.wait_for("first_step")
    failures = takeovers = 0

    def failed(**expected: object) -> dict:
        nonlocal failures
        failures += 1
        found = run.wait_for("failure", failures)
        assert {key: found[key] for key in expected} == expected
        return found

    def taken_over(*paths: str) -> dict:
        nonlocal takeovers
        takeovers += 1
        found = run.wait_for("takeover", takeovers)
        assert found["path"] in paths, found
        return found

    for phase, chunk in NAMED:
        step = run.inject_on_the_way("sigkill", phase, chunk=chunk)
        failed(kind="sigkill", phase=phase, reason="SIGKILL", step=step if phase in ("body", "drain") else step - 1)
        found = taken_over("shadow")
        assert found["plan"] == ("roll_forward" if phase in ("update", "commit") else "redo")
        assert found["lost_steps"] == (phase in ("compute", "decide"))

    # The ninth place is the takeover itself: then no shadow is left, and a new process attaches to what two dead ones left.
    run.wait_for_shadow()
    run.inject_in_the_next_takeover("sigkill")
    run.kill()
    failed(kind="signal", phase="body", reason="SIGKILL")
    failed(kind="sigkill", phase="takeover", reason="SIGKILL")
    run.wait_for("decision", action="cold")
    run.allow(run.status()["step"] + 2)
    taken_over("cold")
    # The tenth comes while the next shadow is still loading.
    run.wait_for("spawn", len(run.events("spawn", role="shadow")), role="shadow")
    step = run.inject_on_the_way("sigkill", "decide", when_ready=False)
    failed(kind="sigkill", phase="decide", step=step - 1)
    taken_over("late_shadow", "shadow")

    chance = random.Random(seed)
    for number in range(RANDOM_KILLS):
        if number % 5 < 3:  # of five, three find a ready shadow, one is late, and one comes into a takeover
            run.wait_for_shadow()
        run.allow(run.status()["step"] + STEPS_PER_KILL)
        time.sleep(chance.uniform(0, 0.5))
        run.kill()
        failed(reason="SIGKILL")
        if number % 5 == 4:
            time.sleep(chance.uniform(0, 0.1))
            run.kill()
            failed(reason="SIGKILL")
        taken_over("shadow", "late_shadow", "cold")

    run.finish_as_if_nothing_had_happened(STEPS)
    reasons = [item["reason"] for item in run.events("failure")]
    assert reasons == ["SIGKILL"] * failures
    assert failures >= 20


KINDS = (
    ("exception", "decide", "exit code 1"),
    ("exit", "commit", "exit code 17"),
    ("page_loss", "update", "SIGKILL"),
    ("page_corruption", "decide", "SIGKILL"),
    ("sigstop", "update", "the process was stopped (SIGSTOP) for more than 1 s"),
    ("spin", "compute", "no commit within 3.0 s of its step's start (learnt from steps of "),
)


@pytest.mark.timeout(600)
def test_every_kind_of_failure(jobs):
    steps = 60
    run = jobs.start(steps=steps)
    run.wait_for("first_step")
    run.allow(6)
    run.wait_for_step(6)  # now step times are known
    for number, (kind, phase, reason) in enumerate(KINDS, 1):
        step = run.inject_on_the_way(kind, phase)
        found, taken = run.wait_for("failure", number), run.wait_for("takeover", number)
        assert (found["kind"], found["phase"], found["step"]) == (kind, phase, step - 1)
        assert found["reason"].startswith(reason)
        assert taken["path"] == "shadow"
        if kind.startswith("page_"):
            damage = run.events("damage")[-1]
            assert (damage["kind"], damage["nbytes"]) == (kind, 4096)
            assert taken["repaired_pages"] == 1
        limit = {"sigstop": Deadlines.stopped, "spin": Deadlines.hang_floor}.get(kind)
        if limit is None:
            assert taken["detect_secs"] < 10  # of an exit: at once, on a machine that is not busy
        else:  # a published time, and a turn of the agent's loop on a busy machine
            armed_before = 0.5 if kind == "spin" else 0.0  # its deadline counts from the dispatch of compute, detect_secs from the fault
            assert limit - armed_before <= taken["detect_secs"] < limit + 1
            assert run.status()["hang_deadline_secs"] >= Deadlines.hang_floor
    ways = [item["stages"] for item in run.events("ready")]
    assert all({"trace", "load", "rehearse the fill", "rehearse the update", "rehearse a takeover"} <= set(stages) for stages in ways)
    assert "leto_jax.shadow.inject.InjectedFault: injected at step" in run.err
    # A stop from outside, while nothing is computed: the same published time.
    run.wait_for_shadow()
    run.kill(number=signal.SIGSTOP)
    taken = run.wait_for("failure", len(KINDS) + 1)
    assert (taken["kind"], taken["phase"]) == ("stopped", "body")
    assert Deadlines.stopped <= taken["detect_secs"] < Deadlines.stopped + 1
    run.finish_as_if_nothing_had_happened(steps)


@pytest.mark.timeout(300)
def test_out_of_memory_is_survived_once_at_each_step(jobs):
    run = jobs.start(steps=30)
    run.wait_for_shadow()
    trainer, shadow = run.pid("trainer"), run.pid("shadow")
    for number, (phase, action) in enumerate([("compute", "redo"), ("update", "roll_forward")], 1):
        step = run.inject_on_the_way("oom", phase, when_ready=number == 1)
        found = run.wait_for("retried", number)
        assert (found["step"], found["action"]) == (step, action)
        assert found["reason"].startswith("RESOURCE_EXHAUSTED")
        assert 0 < found["secs"] < 30
        assert run.pid("trainer") == trainer
    assert run.wait_for("released")["reason"].startswith("the trainer ran out of memory in step ")
    assert run.events("failure") == []
    run.wait_for_shadow()
    assert run.pid("shadow") != shadow
    # Twice at one step: the shadow is gone already, so that a new process goes on.
    step = run.inject_on_the_way("oom", "decide", times=2)
    found = run.wait_for("failure")
    assert (found["kind"], found["phase"], found["step"], found["reason"]) == ("oom", "decide", step - 1, "exit code 1")
    assert run.wait_for("takeover")["path"] == "cold"
    assert "RESOURCE_EXHAUSTED" in run.err
    run.finish_as_if_nothing_had_happened(30)
    assert len(run.events("retried")) == 2
    spent = report.summarise(run.events())
    assert sum(spent["badput_secs"].values()) == pytest.approx(spent["wall_secs"])


@pytest.mark.timeout(300)
def test_a_shadow_that_dies_is_replaced(jobs):
    run = jobs.start(steps=12)
    run.wait_for_shadow()
    shadow = run.kill("shadow")
    refused = run.wait_for("refused")
    assert refused["reason"] == "the shadow ended (SIGKILL)"
    run.wait_for_shadow()
    assert run.pid("shadow") != shadow
    run.kill()
    assert run.wait_for("takeover")["path"] == "shadow"
    run.finish_as_if_nothing_had_happened(12)
    assert len(run.events("failure")) == 1
    assert "the shadow ended (SIGKILL); the next one starts" in run.err


@pytest.mark.timeout(300)
def test_a_grain_dataset_goes_on_where_it_was(jobs):
    run = jobs.start("--data", "grain", steps=12)
    for number, phase in enumerate(("compute", "update"), 1):
        run.inject_on_the_way("sigkill", phase)
        assert run.wait_for("takeover", number)["path"] == "shadow"
    run.finish_as_if_nothing_had_happened(12, like=("--data", "grain"))
