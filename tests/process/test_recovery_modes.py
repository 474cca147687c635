"""One script, run with each `--recovery`: real processes, a real SIGKILL, and the result of a run in which nothing failed."""

from __future__ import annotations

import json
import os
import signal

import pytest
from jobs import END_SECS, TINY, Jobs, Result, leto, wait_until

STEPS = 12
MODES = {
    "none": ((), "cold"),
    "persistent": (("--checkpoint-every", 2), "cold"),
    "persistent, synchronous": (("--checkpoint-every", 2, "--synchronous"), "cold"),
    "host-memory": (("--copy-every", 2), "cold"),
    "host-memory+spare": (("--copy-every", 2), "shadow"),
}
_undisturbed: dict[str, Result] = {}


def options(mode: str, directory) -> tuple:
    recovery, more = mode.partition(",")[0], MODES[mode][0]
    return ("--recovery", recovery, *more, *(("--checkpoint-dir", directory) if recovery == "persistent" else ()))


def undisturbed(jobs: Jobs, data: str) -> Result:
    """What plain programs give: the same in all modes."""
    if data not in _undisturbed:
        run = jobs.run("--steps", STEPS, "--data", data, options=("--recovery", "none"))
        assert run.finish() == 0, run.err
        _undisturbed[data] = run.result
    return _undisturbed[data]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_trainer_is_followed_by_one_that_goes_on(jobs, tmp_path, mode):
    data = "grain" if "persistent" in mode else "function"
    run = jobs.start("--data", data, steps=STEPS, options=options(mode, tmp_path / "saved"))
    run.allow(7)  # copies of 2, 4 and 6; the body of 7 waits
    run.wait_for_step(6)
    if mode != "none":
        run.wait_for("saved", 1)
    if MODES[mode][1] == "shadow":
        run.wait_for_shadow()
    run.kill()
    run.allow(STEPS + 1)
    assert run.finish() == 0, run.err
    assert run.result == undisturbed(jobs, data)
    (found,) = run.events("takeover")
    restored = found["step"] - found["lost_steps"]
    assert (found["path"], found["kind"]) == (MODES[mode][1], "signal")
    assert restored == 0 if mode == "none" else restored in (2, 4, 6)
    assert (f"leto: resumed from step {restored} of " in run.err) == (mode != "none")
    assert {"detect", "fence", "restore", "body", "recompute", "first_step"} <= set(found["stages"])
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
    report = json.loads(leto("report", run.job, "--json").stdout)
    assert report["steps"] == STEPS
    assert sum(report["badput_secs"].values()) == pytest.approx(report["wall_secs"], abs=1e-6)
    assert (report["badput_secs"]["checkpoint_stall"] > 0) == (mode != "none")


@pytest.mark.timeout(300)
def test_copies_beside_retained_memory_and_a_new_job_from_them(jobs, tmp_path):
    """Agent, manager and trainer are gone; what is left is the directory."""
    tiers = ("--shadow-level", 0, "--checkpoint-dir", tmp_path / "saved", "--checkpoint-every", 3, "--copy-every", 2)
    run = jobs.start("--data", "grain", steps=STEPS, options=tiers)
    for number, step in enumerate((3, 6), 1):
        run.allow(step + 1)
        assert run.wait_for("saved", number, tier="persistent")["commit"] == step
    assert run.events("saved", tier="host memory")
    manager = run.status()["manager_pid"]
    run.kill_agent()
    wait_until(lambda: not run.carriers(), END_SECS, "the agent's processes to end")

    os.kill(manager, signal.SIGKILL)
    assert leto("run", *map(str, tiers), str(TINY)).returncode == 2  # what is there must not be overwritten by chance
    again = jobs.run("--data", "grain", "--steps", STEPS, job=run.job, options=(*tiers, "--resume", tmp_path / "saved"))
    assert again.finish() == 0, again.err
    assert "leto: resumed from step 6 of " in again.err
    whole = jobs.run("--data", "grain", "--steps", STEPS, options=("--shadow-level", 0))
    assert whole.finish() == 0
    assert again.result.final == whole.result.final


@pytest.mark.timeout(300)
def test_a_trainer_that_dies_on_its_way_back(jobs, tmp_path):
    """Twice before it has done again what was lost: one takeover, counted from the first failure."""
    run = jobs.start(steps=STEPS, options=("--recovery", "host-memory", "--copy-every", 4))
    run.allow(8)
    run.wait_for_step(7)
    run.wait_for("saved")
    run.allow(6)
    run.kill()
    run.wait_for("first_step", 2)
    run.kill()
    run.allow(STEPS + 1)
    assert run.finish() == 0, run.err
    assert run.result == undisturbed(jobs, "function")
    assert len(run.events("failure")) == 2
    (found,) = run.events("takeover")
    assert found["takeover_secs"] > sum(item["secs"] for item in run.events("fence"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recovery", "hope"), "--recovery: expected one of in-place, persistent, host-memory, host-memory+spare, none, found 'hope'"),
        (("--recovery", "persistent"), "--recovery persistent: expected --checkpoint-dir and --checkpoint-every with it"),
        (("--recovery", "host-memory"), "--recovery host-memory: expected --copy-every with it"),
        (("--checkpoint-every", "3"), "--checkpoint-every: expected --checkpoint-dir with it, found none"),
        (("--recovery", "none", "--copy-every", "3"), "--recovery none: expected neither --checkpoint-every nor --copy-every, since nothing would read the copies"),
        (("--copy-every", "soon"), "--copy-every: expected a number of steps such as 100, seconds such as 30s, or auto, found 'soon'"),
        (("--mttf-secs", "0"), "--mttf-secs: expected a positive number of seconds, found 0.0"),
        (("--keep", "0"), "--keep: expected 1 or more, found 0"),
    ],
)  # fmt: skip
def test_ways_to_go_on_that_cannot_work(words, message):
    done = leto("run", *words, TINY)
    assert (done.returncode, done.stderr) == (2, f"leto: {message}\n")


def test_memory_that_is_not_retained_cannot_be_damaged(jobs):
    run = jobs.start(steps=STEPS, options=("--recovery", "none"))
    run.allow(2)
    run.wait_for_step(1)
    done = leto("inject", "--job", run.job, "--kind", "page_loss")
    assert done.returncode == 2
    assert "--kind page_loss: there is no retained memory, this job runs with --recovery none" in done.stderr
    run.interrupt()
    assert run.finish() == 130
