"""The commands as scripts and people use them: one JSON object each, with the keys of docs/design.md, section 10."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from jobs import END_SECS, REPOSITORY, TINY, alone, leto, result, wait_until

STATUS_KEYS = {"job", "state", "step", "ranks", "restarts"}
RANK_KEYS = {"rank", "pid", "role", "phase", "level", "step"}
REPORT_KEYS = {"job", "steps", "wall_secs", "takeovers", "goodput", "ettr", "badput_secs", "coverage"}
TAKEOVER_KEYS = {"kind", "phase", "step", "takeover_secs", "detect_secs", "stages", "lost_steps"}


def one_object(*command: object, code: int = 0) -> dict[str, Any]:
    """What a command prints with --json: one object on one line, and nothing else."""
    done = leto(*command, "--json")
    assert done.returncode == code, done
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


@pytest.mark.timeout(300)
def test_a_job_from_start_to_stop(jobs):
    run = jobs.start(steps=50)
    job = run.job
    run.wait_for_shadow()
    with ThreadPoolExecutor(2) as pool:
        status, listed, doctor, table = pool.map(
            lambda work: work(),
            (
                lambda: one_object("status"),
                lambda: one_object("ls"),
                lambda: leto("doctor", "--json"),
                lambda: leto("status", "--job", job).stdout,
            ),
        )
    assert set(status) >= STATUS_KEYS
    assert (status["job"], status["state"], status["step"], status["restarts"]) == (job, "running", 1, 0)
    assert [set(rank) for rank in status["ranks"]] == [RANK_KEYS] * 2
    trainer, shadow = status["ranks"]
    assert (trainer["rank"], trainer["role"], trainer["phase"], trainer["level"], trainer["step"]) == (0, "trainer", "body", None, 1)
    assert (shadow["rank"], shadow["role"], shadow["phase"], shadow["level"], shadow["step"]) == (0, "shadow", "ready", 3, None)
    assert listed == {"jobs": [{"job": job, "state": "running", "step": 1, "restarts": 0}]}
    assert f"{job}: running, step 1 of 50, 0 restarts" in table
    checks = json.loads(doctor.stdout)
    assert set(checks) == {"ok", "checks"}
    assert {frozenset(check) for check in checks["checks"]} == {frozenset(("check", "ok", "found", "advice"))}
    assert doctor.returncode == (0 if checks["ok"] else 4)

    with ThreadPoolExecutor(1) as pool:
        fired = pool.submit(one_object, "inject", "--kind", "sigkill", "--phase", "update", "--chunk", 2, "--step", 3, "--when-ready")
        run.wait_for("inject")
        run.allow(6)
        assert fired.result() == {"job": job, "kind": "sigkill", "fired_step": 3}
    run.wait_for("takeover")
    report = one_object("report")
    assert set(report) >= REPORT_KEYS
    assert report["job"] == job
    assert sum(report["badput_secs"].values()) == pytest.approx(report["wall_secs"])
    (takeover,) = report["takeovers"]
    assert set(takeover) >= TAKEOVER_KEYS
    assert (takeover["kind"], takeover["phase"], takeover["step"], takeover["lost_steps"]) == ("sigkill", "update", 2, 0)
    assert set(takeover["stages"]) >= {"detect", "fence", "attach", "verify", "roll_forward", "first_step"}

    assert leto("stop").stdout == f"stopped {job}\n"
    assert run.finish(5) == 143  # stop returns when it is done; a script that waits for the job must not take it for trained
    assert jobs.leftovers() == []
    assert one_object("ls") == {"jobs": []}
    assert one_object("ls", "--all") == {"jobs": [{"job": job, "state": "ended", "step": None, "restarts": None}]}
    assert one_object("report", job)["takeovers"] == report["takeovers"]
    said = leto("report", job).stdout
    for words in ("goodput", "ETTR", "takeovers", "wall time by cause"):
        assert words in said


def test_output_passes_byte_for_byte(jobs):
    run = jobs.run(options=("--shadow-level", 0))
    by_itself = subprocess.run([sys.executable, str(TINY)], cwd=REPOSITORY, capture_output=True, check=True, timeout=END_SECS)
    assert run.finish() == 0, run.err
    assert run.out.encode() == by_itself.stdout
    assert result(run.out) == alone()


def test_plan_shows_what_would_be_taken_and_takes_nothing(jobs):
    with ThreadPoolExecutor(2) as pool:
        small, huge = pool.map(lambda arguments: leto("run", "--plan", TINY, *arguments), ((), ("--frozen-gib", 1000)))
    assert (small.returncode, huge.returncode) == (0, 0), (small, huge)
    for row in ("parameters", "optimizer state", "gap", "gradient buffer", "staging", "parity", "ring", "log", "shadow"):
        assert f"│ {row}" in small.stdout, small.stdout
    assert "1024000.00" in huge.stdout, huge.stdout
    assert list((jobs.root / "run").iterdir()) == list((jobs.root / "state").iterdir()) == []


def test_the_plan_of_several_ranks_is_that_of_one_ranks_shards(jobs):
    whole = leto("run", "--plan", TINY, "--width", 1024)
    half = leto("run", "--plan", "--nproc-per-node", 2, TINY, "--width", 1024, "--cut", "rows")
    assert (whole.returncode, half.returncode) == (0, 0), half.stderr
    mib = lambda done: float(re.search(r"parameters +│ +([0-9.]+)", done.stdout)[1])
    assert mib(half) == pytest.approx(mib(whole) / 2, rel=0.2)
    assert half.stdout.count("memory plan, rank 0") == 1
    failed = leto("run", "--plan", "--nproc-per-node", 2, TINY, "--cut", "rows", "--width", 255)
    assert failed.returncode == 2
    assert "cuts evenly, found [255]" in failed.stderr


def test_debug_has_no_shadow_and_no_watchdog_and_the_terminal(jobs):
    run = jobs.run("--ask", options=("--debug", "--hang-floor-secs", 0.1, "--body-timeout-secs", 0.1), stdin=subprocess.PIPE)
    run.wait_for_step(1)
    pid = run.kill(number=signal.SIGSTOP)
    time.sleep(1.5)  # longer than a stopped trainer has otherwise
    run.kill(number=signal.SIGCONT)
    assert run.pid("trainer") == pid
    run.process.stdin.write(b"hello\n")
    run.process.stdin.close()
    assert run.finish() == 0, run.err
    assert "answer 'hello'\n" in run.out
    assert run.result == alone()
    assert [(item["role"], item["path"]) for item in run.events("spawn")] == [("trainer", "first")]
    assert run.events("failure") == []


def test_imports_have_no_effect():
    """No JAX where no model is: `leto ls` must be quick, and the state manager must live on where JAX would not."""
    code = """if True:
        import sys
        before = set(sys.modules)
        import leto_jax
        assert "numpy" not in sys.modules, "import leto_jax is lazy"
        import leto_jax.manager.client, leto_jax.manager.server, leto_jax.manager.fence, leto_jax.manager.runtime
        assert "numpy" not in sys.modules, "the manager is standard library only"
        import leto_jax.layout, leto_jax.config, leto_jax.errors, leto_jax.records
        import leto_jax.agent.agent, leto_jax.agent.client, leto_jax.agent.doctor, leto_jax.goodput.report, leto_jax.cli
        found = sorted({name.partition(".")[0] for name in set(sys.modules) - before} & {"jax", "jaxlib", "flax", "optax", "orbax", "grain"})
        assert not found, found
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=END_SECS, check=False)
    assert done.returncode == 0, done.stderr


def test_the_environment_of_a_job_is_whole_or_refused(jobs):
    """Somebody's shell with one of our variables in it must not look like a job."""
    done = subprocess.run(
        [sys.executable, str(TINY)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=END_SECS * 2,
        check=False,
        env={**os.environ, "LETO_JOB": "half"},
    )
    assert done.returncode == 1
    assert (
        "expected all of LETO_JOB, LETO_ROLE, LETO_RANK, LETO_SOCKET, LETO_INCARNATION, LETO_JOB_DIR (set by `leto run`), found none for"
        in done.stderr
    )


def test_ls_shows_a_job_that_nobody_attends(jobs):
    run = jobs.start(options=("--shadow-level", 0))
    run.wait_for_step(1)
    run.kill_agent()
    wait_until(lambda: not run.carriers(), END_SECS, "the end of the trainer")
    assert one_object("ls") == {"jobs": [{"job": run.job, "state": "kept", "step": 1, "restarts": None}]}
    assert one_object("status", "--job", run.job)["step"] == 1
    assert leto("stop", "--job", run.job).stdout == f"stopped {run.job}\n"
