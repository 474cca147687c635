"""`leto checkpoint`, `leto run --resume`, and SIGTERM with --checkpoint-dir: real jobs, real Orbax."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from jobs import END_SECS, START_SECS, alone, leto, read_plainly, result, shapes, wait_until

from leto_jax import errors
from leto_jax.agent.processes import state_letter

STEPS = 12
SHAPES = {"b": [256], "w0": [64, 256], "w1": [256, 256], "w2": [256, 10]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("data", ["function", "grain"])
def test_a_job_that_runs_is_written_and_another_goes_on_from_it(jobs, tmp_path, data):
    run = jobs.start("--data", data, steps=STEPS, options=("--shadow-level", 0))
    run.allow(5)
    run.wait_for_step(4)
    asked = subprocess.Popen(
        [sys.executable, "-m", "leto_jax.cli", "checkpoint", "--job", run.job, "--json", str(tmp_path / "saved")],
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until(lambda: (run.directory / "checkpoint.json").exists(), START_SECS, "the request")
    run.allow(6)  # it is between two steps now
    out, _ = asked.communicate(timeout=START_SECS)
    found = json.loads(out)
    assert (asked.returncode, found["job"], found["step"]) == (0, run.job, 5)
    assert run.events("checkpoint")[0]["commit"] == 5
    shown = read_plainly(tmp_path / "saved")
    assert (shown["step"], shown["leaves"]["['extras']['steps']"]["first"]) == (5, 5)
    assert {path.split("]")[0] for path in shown["leaves"]} == {"['extras'", "['opt_state'", "['params'"}
    assert shapes(shown, "params") == {f"['params']['{name}']": shape for name, shape in SHAPES.items()}
    run.finish_as_if_nothing_had_happened(STEPS, like=("--data", data))

    again = jobs.run("--data", data, "--steps", STEPS, options=("--shadow-level", 0, "--resume", tmp_path / "saved"))
    assert again.finish() == 0, again.err
    assert f"leto: resumed from step 5 of {tmp_path / 'saved'}" in again.err
    whole = alone("--data", data, "--steps", str(STEPS))
    assert again.result.final == whole.final
    assert again.result.losses == {step: loss for step, loss in whole.losses.items() if step > 5}


@pytest.mark.timeout(600)
def test_everybody_dead_written_and_resumed_to_the_bit(jobs, tmp_path):
    """All trainers and the agent killed in the middle of an update; a fresh process rolls it forward and writes it; another job goes on."""
    run = jobs.start(steps=STEPS, options=("--shadow-level", 0))
    run.allow(5)
    run.wait_for_step(4)
    trainer = run.pid("trainer")
    assert trainer is not None

    def stop_between_two_marks() -> None:
        with contextlib.suppress(errors.LetoError):  # nobody is left to answer
            run.inject("sigstop", "update", when_ready=False)

    threading.Thread(target=stop_between_two_marks, daemon=True).start()
    run.wait_for("inject")
    run.allow(6)
    wait_until(lambda: state_letter(trainer) == "T", END_SECS, "the trainer to stop")
    run.kill_agent()
    wait_until(lambda: not run.carriers(), END_SECS, "the agent's processes to end")
    written = leto("checkpoint", "--job", run.job, tmp_path / "saved")
    assert written.returncode == 0, written.stderr
    step = int(re.fullmatch(rf"step (\d+) of job {run.job} is in {tmp_path / 'saved'}\n", written.stdout)[1])
    assert step in (5, 6)
    assert json.loads(leto("status", "--job", run.job, "--json").stdout)["state"] == "kept"

    fresh = jobs.run("--steps", STEPS, options=("--resume", tmp_path / "saved"))
    fresh.wait_for("first_step")
    assert fresh.finish() == 0, fresh.err
    assert fresh.result.final == alone("--steps", str(STEPS)).final

    again = jobs.run("--steps", STEPS, job=run.job)  # the retained state was not touched
    assert again.finish() == 0, again.err
    assert result(run.out + again.out).final == alone("--steps", str(STEPS)).final


@pytest.mark.timeout(600)
def test_a_resumed_job_that_is_killed_before_and_after_its_first_step(jobs, tmp_path):
    first = jobs.start("--data", "grain", steps=STEPS, options=("--shadow-level", 0, "--checkpoint-dir", tmp_path / "saved"))
    first.allow(7)
    first.wait_for_step(6)
    first.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM: finishing the step" in first.err, END_SECS, "the agent to hear of it")
    first.allow(8)
    assert first.finish() == 5, first.err
    (saved,) = first.events("checkpoint")
    assert (saved["commit"], saved["error"]) == (7, "")
    assert not first.directory.exists()

    run = jobs.start("--data", "grain", steps=STEPS, options=("--resume", tmp_path / "saved"))
    run.allow(8)
    attached = run.wait_for("attached")
    assert (attached["commit"], attached["action"]) == (7, "fill")
    run.kill()  # it waits in the body of its first step
    assert run.wait_for("attached", 2)["action"] == "redo"
    run.wait_for_shadow()
    run.inject_on_the_way("sigkill", "update")
    run.allow(STEPS + 1)
    assert run.finish() == 0, run.err
    whole = alone("--data", "grain", "--steps", str(STEPS))
    assert run.result.final == whole.final
    assert run.result.losses == {step: loss for step, loss in whole.losses.items() if step > 7}


@pytest.mark.timeout(600)
def test_what_cannot_be_written_or_resumed(jobs, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    run = jobs.start(steps=STEPS, options=("--shadow-level", 0, "--checkpoint-dir", file / "below"))
    run.allow(4)
    run.wait_for_step(3)
    asked = subprocess.Popen(
        [sys.executable, "-m", "leto_jax.cli", "checkpoint", "--job", run.job, str(file / "below")], stderr=subprocess.PIPE, text=True
    )
    wait_until(lambda: (run.directory / "checkpoint.json").exists(), START_SECS, "the request")
    run.allow(5)
    _, err = asked.communicate(timeout=START_SECS)
    assert asked.returncode == 2
    assert err.startswith("leto: the checkpoint of step 4 cannot be written to ")
    run.process.send_signal(signal.SIGTERM)  # it cannot be written now either: then it stays in memory
    wait_until(lambda: "SIGTERM: finishing the step" in run.err, END_SECS, "the agent to hear of it")
    run.allow(6)
    assert run.finish() == 3, run.err
    good = leto("checkpoint", "--job", run.job, tmp_path / "saved")
    assert good.returncode == 0, good.stderr
    assert leto("stop", "--job", run.job).returncode == 0

    for words, message in {
        ("--resume", file): f"--resume: expected a directory of checkpoints, found a file at {file}",
        ("--resume", tmp_path / "nowhere"): f"--resume: expected a directory of checkpoints, found nothing at {tmp_path / 'nowhere'}",
    }.items():
        refused = leto("run", *words, str(run_script()))
        assert (refused.returncode, refused.stderr) == (2, f"leto: {message}\n")
    other = jobs.run("--steps", STEPS, "--width", 320, options=("--shadow-level", 0, "--resume", tmp_path / "saved"))
    assert other.finish() == 2
    assert "holds params['b']: float32[256], this script has params['b']: float32[320]; resume with the model and optimizer" in other.err
    (tmp_path / "empty").mkdir()
    empty = jobs.run("--steps", STEPS, options=("--shadow-level", 0, "--resume", tmp_path / "empty"))
    assert empty.finish() == 2
    assert f"no version in {tmp_path / 'empty'} can be restored (there is none); name another directory" in empty.err
    assert leto("checkpoint", "--job", "nobody", tmp_path / "x").returncode == 2


def run_script() -> str:
    return os.path.join(os.path.dirname(__file__), "scripts", "tiny.py")
