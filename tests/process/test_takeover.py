"""Real processes that are killed at named places and at random times: the state goes on from process to process, to the bit."""

from __future__ import annotations

import random
import time

import pytest
from jobs import Jobs, Run, alone, limit_file

from leto_jax.config import Deadlines

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
STEPS = 400


def start(jobs: Jobs, steps: int, *options: object) -> Run:
    """A job that waits in the body of its first step until `allow` lets it go on."""
    job = jobs.name()
    return jobs.run("--steps", steps, "--limit", limit_file(jobs.root, job), job=job, options=options)


def finish_and_compare(run: Run, steps: int) -> None:
    """Lets the job go to its end: it must be as if nothing had happened."""
    run.allow(steps)
    assert run.finish() == 0, run.err
    assert run.result == alone("--steps", str(steps))
    assert [row["step"] for row in run.metrics()] == list(range(1, steps + 1))
    assert all(repr(row["loss"]) == run.result.losses[row["step"]] for row in run.metrics())
    takeovers = run.events("takeover")
    assert {item["compiles"] for item in takeovers if item["path"] in ("shadow", "late_shadow")} <= {0}, takeovers
    assert run.events("finish") == [run.events()[-1]]
    assert (run.events("finish")[0]["code"], run.events("done")[-1]["commit"]) == (0, steps)


@pytest.mark.timeout(900)
def test_killed_at_ten_places_and_ten_times_at_random(jobs, seed):
    run = start(jobs, STEPS)
    run.wait_for("first_step")
    failures = 0

    for phase, chunk in NAMED:
        step = run.inject_on_the_way("sigkill", phase, chunk=chunk)
        failures += 1
        found = run.wait_for("failure", failures)
        assert (found["kind"], found["phase"], found["reason"]) == ("sigkill", phase, "SIGKILL")
        assert found["step"] == (step if phase in ("body", "drain") else step - 1)
        taken = run.wait_for("takeover", failures)
        assert (taken["path"], taken["plan"]) == ("shadow", "roll_forward" if phase in ("update", "commit") else "redo")

    # Twice in a row: in the takeover itself, so that no shadow is left.
    run.inject_on_the_way("sigkill", "takeover")
    ...
