"""Real processes that are killed at named places and at random times: the state goes on from process to process, to the bit."""

from __future__ import annotations

import random
import time

import pytest
from jobs import Jobs, Run, alone, limit_file

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


def start(jobs: Jobs, steps: int, *options: object) -> Run:
    """A job that waits in the body of its first step until `allow` lets it go on."""
    job = jobs.name()
    run = jobs.run("--steps", steps, "--limit", limit_file(jobs.root, job), job=job, options=options)
    run.wait_for("first_step")
    return run


def finish_and_compare(run: Run, steps: int) -> None:
    """Lets the job go to its end: it must be as if nothing had happened."""
    run.allow(steps)
    assert run.finish() == 0, run.err
    assert run.result == alone("--steps", str(steps))
    assert [row["step"] for row in run.metrics()] == list(range(1, steps + 1))
    assert all(repr(row["loss"]) == run.result.losses[row["step"]] for row in run.metrics())
    by_shadow = [item for item in run.events("takeover") if item["path"] in ("shadow", "late_shadow")]
    assert [item for item in by_shadow if item["compiles"]] == []
    assert len(run.events("fence")) == len(run.events("failure"))
    assert [item for item in run.events("fence") if item["remaining"]] == []
    assert (run.events()[-1]["event"], run.events()[-1]["code"], run.events("done")[-1]["commit"]) == ("finish", 0, steps)


@pytest.mark.timeout(900)
def test_killed_at_ten_places_and_ten_times_at_random(jobs, seed):
    run = start(jobs, STEPS)
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
        assert found["lost_steps"] == (phase in ("compute", "decide", "drain"))

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
        time.sleep(chance.uniform(0, 0.4))
        run.kill()
        failed(reason="SIGKILL")
        if number % 5 == 4:
            time.sleep(chance.uniform(0, 0.1))
            run.kill()
            failed(reason="SIGKILL")
        taken_over("shadow", "late_shadow", "cold")

    finish_and_compare(run, STEPS)
    reasons = [item["reason"] for item in run.events("failure")]
    assert reasons == ["SIGKILL"] * failures
    assert failures >= 20
