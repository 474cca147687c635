"""What users do wrong, and what goes wrong around them: each with the message that says what was expected, what was found, and what to do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from jobs import END_SECS, TINY, Jobs, Run, alone, leto, result, wait_until

from leto_jax import cli, errors
from leto_jax.agent import client
from leto_jax.arena.control import Control, Word
from leto_jax.manager import protocol, runtime
from leto_jax.manager.client import ManagerClient
from leto_jax.shadow.member import AGENT_SOCKET, control_name

ONCE = ("--max-restarts", 0, "--shadow-level", 0)  # the first failure ends the job


class Case(NamedTuple):
    """A job that must end with `code` and say all of `says`; not kept means that nothing of it is left then."""

    arguments: tuple[object, ...]
    code: int
    says: tuple[str, ...]
    options: tuple[object, ...] = ONCE


GAVE_UP = (
    "leto: stopped: 0 restarts were made (--max-restarts 0)",
    "the state is kept: `leto run --job ",
    "` goes on from step 2",
)
CASES = {
    "a batch of another shape": Case(
        ("--odd-batch-at", 3),
        3,
        (
            "UsageError: batch of step 3: expected ['x']: float32[8, 64], found ['x']: float32[7, 64]; every batch must have the shapes of the first",
            *GAVE_UP,
        ),
    ),
    "clear_backends by the script": Case(
        ("--clear-backends-at", 3),
        3,
        ("UsageError: s.step: the JAX backend was replaced (jax.clear_backends, jax.extend.backend.clear_backends)", *GAVE_UP),
    ),
    "a dead state passed on": Case(
        ("--dead-state-at", 2),
        3,
        (
            "DeadStateError: s.step: expected the current state (step 2), found the state of step 1, already consumed; write: state, metrics = s.step(state, batch)",
        ),
    ),
    "a body without a step": Case(
        ("--no-step-at", 3),
        3,
        ("UsageError: session: the loop body of step 3 ended without `state, metrics = s.step(state, batch)`", *GAVE_UP),
    ),
    "a loss that is not finite": Case(
        ("--nan-at", 3),
        3,
        (
            "leto: stopped: step 3: loss nan",
            "the state of step 2 is kept",
            "Pass non_finite='skip' or 'continue' to TrainStep",
            "leto: stopped: the trainer gave up on purpose",
        ),
    ),
    "a body that takes too long": Case(
        ("--sleep-at", 2, "--sleep-secs", 100),
        3,
        ("the loop body took more than 1.5 s outside of a section; wrap long work in `with s.section(name, timeout_secs=...)`", *GAVE_UP),
        (*ONCE, "--body-timeout-secs", 1.5),
    ),
    "jax.distributed.initialize by the script": Case(
        ("--distributed",),
        2,
        ("leto: stopped: jax.distributed: expected it not to be initialized, found process 0 of 1", "remove jax.distributed.initialize()"),
    ),
    "a script that never reaches its session": Case(
        ("--no-session", "wait"),
        2,
        ("tiny.py has not entered a session within 5 s; use `with leto.session(...)`, and keep what is before it short",),
        ("--init-timeout-secs", 5),
    ),
    "a script without a session": Case(("--no-session", "end"), 2, ("tiny.py ended without entering a session: nothing was trained",), ()),
    "an exception before the session": Case(
        ("--raise-at", 0),
        2,
        ("ValueError: raised before the session", "leto: stopped: ", "tiny.py failed before its session (exit code 1)"),
        (),
    ),
    "more than the machine has": Case(
        ("--frozen-gib", 1000),
        2,
        (
            "leto: stopped: cannot reserve ",
            "for arena 'device.0'",
            "MemAvailable",
            "Take a smaller model or fewer ranks per node (`leto run --plan` shows what is needed)",
        ),
        (),
    ),
}


def two_at_a_time(work, items):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, items))


@pytest.mark.timeout(600)
def test_a_script_that_cannot_go_on(jobs):
    """Each is refused once, with its message, and never retried in vain."""

    def check(name: str) -> str:
        case = CASES[name]
        run = jobs.run(*case.arguments, options=case.options, job=jobs.name())
        code = run.finish()
        missing = [text for text in case.says if text not in run.err]
        if code == 3:  # kept until somebody frees it
            kept = json.loads(leto("status", "--job", run.job, "--json").stdout)
            missing += [] if (kept["job"], kept["state"]) == (run.job, "kept") else [f"status {kept}"]
            stopped = leto("stop", "--job", run.job)
            missing += [] if stopped.stdout == f"stopped {run.job}\n" else [f"leto stop: {stopped}"]
        starts = len(run.events("spawn"))
        if code != case.code or missing or starts != 1:
            return f"{name}: exit code {code}, {starts} starts, without {missing}:\n{run.err}"
        return ""

    wrong = [text for text in two_at_a_time(check, CASES) if text]
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.timeout(600)
def test_what_looks_like_one_and_is_none(jobs):
    """The same with what the messages advise: these train to their end."""

    def check(arguments: tuple[object, ...]) -> None:
        run = jobs.run(*arguments, options=("--shadow-level", 0, "--body-timeout-secs", 1.5), job=jobs.name())
        assert run.finish() == 0, run.err
        words = [str(word) for word in arguments]
        assert run.result == alone(*words)
        assert [row["step"] for row in run.metrics()] == list(range(1, 7))

    skipped = ("--nan-at", 3, "--non-finite", "skip")
    went_on = ("--nan-at", 3, "--non-finite", "continue")
    two_at_a_time(check, [skipped, went_on, ("--section-at", 2, "--sleep-secs", 3), ("--data", "grain")])
    assert alone(*map(str, skipped)).losses[4] != "nan" == alone(*map(str, skipped)).losses[3]
    assert alone(*map(str, went_on)).losses[4] == "nan"


@pytest.mark.timeout(600)
def test_an_exception_at_the_same_step_again_and_again(jobs):
    """It ends the job with its traceback, and what was trained is kept: for the same model and optimizer, and for nothing else."""
    run = jobs.run("--raise-at", 4)
    assert run.finish() == 3, run.err
    assert len(run.events("failure")) == 4
    assert run.err.count("ValueError: raised in the body of step 4") == 4
    assert "leto: stopped: exit code 1 4 times after commit 4 without progress (--max-restarts-without-progress 3)" in run.err
    assert f"the state is kept: `leto run --job {run.job} ...` goes on from step 4, `leto stop --job {run.job}` frees it" in run.err
    assert not run.carriers()

    def refused(*arguments: object) -> str:
        other = jobs.run(*arguments, job=run.job)
        assert other.finish() == 3, other.err
        assert len(other.events("finish")) == len(other.events("start"))
        assert "goes on from step 4" in other.err
        return other.err

    changed = {
        (
            "--width",
            320,
        ): "params: the job holds ['b']: float32[256], this process brings ['b']: float32[320]; start the script with the model, ",
        (
            "--optimizer",
            "sgd",
        ): "shared: only the job has [1][0].count: int32[]; start the script with the model, optimizer and settings of the job",
        ("--rate", 0.5): "program 'decide': the job compiled ",
    }
    for arguments, message in changed.items():
        assert f"\nleto: stopped: {message}" in refused(*arguments)

    more = jobs.run(job=run.job)
    assert more.finish() == 0, more.err
    assert result(run.out + more.out) == alone()


def copy_of_tiny(jobs: Jobs) -> Path:
    path = jobs.root / "script.py"
    path.write_text(TINY.read_text())
    return path


@pytest.mark.timeout(600)
def test_a_script_that_is_edited_while_it_runs(jobs):
    script = copy_of_tiny(jobs)
    run = jobs.start(steps=12, script=script)
    run.wait_for_shadow()
    script.write_text(TINY.read_text().replace("jnp.tanh(hidden", "jnp.sin(hidden"))
    run.kill()  # the shadow that is ready has read the old script
    assert run.wait_for("takeover")["path"] == "shadow"
    refused = run.wait_for("refused")
    assert refused["reason"].startswith("program 'compute': the job compiled ")
    assert "the script or what it imports was edited while the job runs" in refused["reason"]
    run.allow(5)
    run.wait_for_step(5)  # training goes on
    assert "leto: the shadow refuses: program 'compute'" in run.err
    assert "training goes on without one, a failure means a cold attach" in run.err
    assert run.status()["shadow"] == refused["reason"]
    script.write_text(TINY.read_text())
    run.kill()
    assert run.wait_for("takeover", 2)["path"] == "cold"
    run.wait_for_shadow()
    run.finish_as_if_nothing_had_happened(12)


@pytest.mark.timeout(600)
def test_jobs_that_are_there_or_not(jobs):
    """`inject` without a job and with several, a second `leto run`, and what talks nonsense to an agent."""
    assert_refused("no job is running; start one with `leto run SCRIPT`", "inject")
    runs = [jobs.start(options=("--shadow-level", 0)) for _ in range(2)]
    first, second = sorted(run.job for run in runs)
    for run in runs:
        run.wait_for_step(1)
    commands = {
        ("inject",): f"expected one running job, found 2: {first}, {second}; choose one with --job",
        ("inject", "--job", "nobody"): f"job 'nobody' is not running; running: {first}, {second}",
        ("run", "--job", first, TINY): f"the agent of job {first!r} (`leto run` is running) already answers at ",
        (
            "inject",
            "--job",
            first,
            "--when-ready",
            "--timeout-secs",
            1,
        ): "inject: the job did not come to a ready shadow in time; nothing was injected",
        ("inject", "--job", second, "--timeout-secs", 1): "inject: the job did not come to phase compute in time; nothing was injected",
        ("inject", "--job", first, "--kind", "trap"): "--kind trap: needs a GPU, this job runs on the CPU",
        ("report", "nobody"): "journal: expected one at ",
    }
    two_at_a_time(lambda command: assert_refused(commands[command], *command), commands)
    # A request that waits is not disturbed by another one, which is told so.
    agent = runs[1]
    agent.inject_in_the_next_takeover("sigkill")
    with pytest.raises(errors.JobError, match="inject: another injection is still waiting for its moment"):
        agent.inject("sigkill", "compute")
    talk_nonsense(agent)
    for run in runs:
        run.allow(7)
        assert run.finish() == 0, run.err
        assert run.result == alone()
        assert run.events("failure") == []


def assert_refused(message: str, *command: object) -> None:
    done = leto(*command)
    assert done.returncode == 2, done
    assert message in done.stderr
    assert done.stderr.startswith("leto: ")
    assert "Traceback" not in done.stderr


def talk_nonsense(run: Run) -> None:
    path = run.directory / AGENT_SOCKET
    for garbage in (b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 70_000, protocol.encode({"op": "status"})[:-1]):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(END_SECS)
            sock.connect(str(path))
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # what is left of the garbage is not read
                while piece := sock.recv(4096):
                    answer += piece
            assert not answer or b"ProtocolError" in answer
    asked = {
        "agent: expected hello, event, status, inject, checkpoint, reclaim or stop, found 'nonsense'": {"op": "nonsense"},
        "agent: expected a request with all its fields, found something else (KeyError: 'incarnation')": {"op": "hello"},
        "found something else (ValueError: 'nonsense' is not a valid FailureKind)": {
            "op": "inject",
            "kind": "nonsense",
            "phase": "compute",
        },
        "found something else (KeyError: 'phase')": {"op": "inject", "kind": "sigkill"},
        "reclaim: expected the trainer of this job, found another process": {"op": "reclaim", "step": 1},
    }
    for message, request in asked.items():
        with pytest.raises(errors.LetoError) as caught:
            client.ask(run.job, request)
        assert message in str(caught.value) or "another injection" in str(caught.value)
    assert run.status()["state"] == "running"


@pytest.mark.timeout(600)
def test_a_stale_runtime_directory(jobs):
    """Sockets that nobody listens to, and notes about a job that is gone: replaced, and said."""
    run_before = jobs.name()
    directory = runtime.ensure_job_dir(run_before)
    for name in (runtime.SOCKET_NAME, AGENT_SOCKET):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.bind(str(directory / name))
    (directory / client.RUN_FILE).write_text('{"state": "kept", "step": 7, "job": ')  # torn
    run = jobs.run(job=run_before, options=("--shadow-level", 0))
    assert run.finish() == 0, run.err
    assert run.result == alone()
    assert "retained state" not in run.err
    directory = runtime.ensure_job_dir(run_before)
    (directory / client.RUN_FILE).write_text('{"state": "kept", "step": 7}')
    run = jobs.run("--steps", 2, job=run_before, options=("--shadow-level", 0))
    assert run.finish() == 0, run.err
    gone = "is gone (its state manager died, or its time was over after step 7); starting from step 0, as no checkpoint was asked for"
    assert f"the retained state of job {run_before!r} {gone}" in run.err
    # Something else in a socket's place is not ours to replace.
    directory = runtime.ensure_job_dir(run_before)
    (directory / AGENT_SOCKET).write_text("mine")
    assert_refused(f"expected a socket or nothing at {directory / AGENT_SOCKET}, found -rw", "run", "--job", run_before, TINY)
    (directory / AGENT_SOCKET).unlink()
    directory.rmdir()


WRONG_VALUES = {
    ("run", "nowhere.py"): "script: expected a Python file, found nothing at 'nowhere.py'",
    ("run", "--job", "a/b", TINY): "a job name is 1 to 64 of the characters",
    ("run", "--copy-every", 5, "--copies", 2, TINY): "--copies: expected 1 to the number of ranks, 1, found 2",
    ("run", "--nproc-per-node", 0, TINY): "--nproc-per-node: expected 1 or more, found 0",
    ("run", "--nproc-per-node", 2, "--debug", TINY): "--debug: expected one rank with it, found --nproc-per-node 2",
    ("inject", "--rank", -1): "--rank: expected 0 or more, found -1",
    ("run", "--nnodes", 2, TINY): "--nnodes, --rdzv-endpoint: not in this version",
    ("run", "--shadow-level", 4, TINY): "--shadow-level: expected one of auto, 3, parked, 2, 1, 0, found '4'",
    (
        "run",
        "--shadow-level",
        "parked",
        "--nproc-per-node",
        2,
        TINY,
    ): "--shadow-level parked: expected one rank with it, found --nproc-per-node 2",
    ("run", "--max-restarts", -1, TINY): "--max-restarts: expected 0 or more",
    ("run", "--max-restarts-without-progress", 0, TINY): "--max-restarts-without-progress: expected 1 or more",
    ("run", "--body-timeout-secs", 0, TINY): "--body-timeout-secs: expected a positive number of seconds, found 0.0",
    ("run", "--init-timeout-secs", "nan", TINY): "--init-timeout-secs: expected a positive number of seconds, found nan",
    (
        "inject",
        "--kind",
        "flood",
    ): "--kind: expected one of sigkill, sigstop, exception, illegal_address, trap, spin, oom, page_loss, page_corruption, exit, inoperable, found 'flood'",
    ("inject", "--phase", "sleep"): "--phase: expected one of compute, decide, update, commit, drain, takeover, body, found 'sleep'",
    ("inject", "--times", 0): "--times: expected 1 or more, found 0",
    ("inject", "--chunk", 1): "--chunk: goes with --phase update, found --phase compute",
    ("report", "a/b"): "a job name is 1 to 64 of the characters",
    ("report",): "report: expected the journal of a job under ",
    ("status",): "no job is running; start one with `leto run SCRIPT`",
    ("stop",): "no job is running; start one with `leto run SCRIPT`",
}


def test_wrong_values_on_the_command_line(leto_dirs, monkeypatch, capsys):
    """In this process: what is refused starts none."""

    def run(*command: object) -> tuple[object, str]:
        monkeypatch.setattr(sys, "argv", ["leto", *map(str, command)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, capsys.readouterr().err

    for command, message in WRONG_VALUES.items():
        code, said = run(*command)
        assert (code, said.startswith("leto: ")) == (2, True)
        assert message in said
    for command in ((), ("run",), ("run", "--max-restarts", "many", TINY), ("inject", "--kind"), ("fly",)):
        assert run(*command)[0] == 2
    assert not list((leto_dirs / "run").rglob("*"))


@pytest.fixture
def damaged(jobs: Jobs) -> Iterator[tuple[Run, Control]]:
    """A job, and its control words to spoil."""
    run = jobs.start(steps=60)
    run.wait_for_shadow()
    with ManagerClient(run.directory / runtime.SOCKET_NAME, "tool") as tool, tool.open(control_name(0)) as descriptor:
        control = Control(descriptor.fd)
    yield run, control
    control.close()


GARBAGE = -0x5A5A5A5A5A5A5A
SEEN = (Word.PID, Word.PHASE, Word.COMMIT)  # all that are noticed: tests/unit/test_control.py
PLAUSIBLE = {  # wrong, but nobody can tell: times long ago
    Word.PHASE_SINCE_NS: "the loop body took more than 300 s",
    Word.ARMED_SINCE_NS: "no commit within ",
}


@pytest.mark.timeout(900)
def test_damaged_control_words(damaged):
    """They are hints: whatever stands in them, the job ends as if nothing had happened, with a takeover at worst."""
    run, control = damaged
    failures, step = 0, 1
    for word in Word:
        if word > Word.PEER_STALE_NS_TOTAL or word in (
            Word.CHECKPOINT_TAKEN,
            Word.INJECT_TAKEN,
            Word.INJECT_FIRED_NS,
            Word.INJECT_FIRED_STEP,
        ):
            control[word] = GARBAGE
    for word in SEEN:
        step += 2
        run.allow(step)
        run.wait_for_step(step)  # it waits in a body now, and writes no words
        assert len(run.events("failure")) == failures
        control[word] = GARBAGE
        failures += 1
        found = run.wait_for("failure", failures)
        assert (found["kind"], found["step"]) == ("damaged", step)
        assert found["reason"].startswith(f"control word {word.name}: expected ")
        assert found["reason"].endswith(f", found {GARBAGE}; the control block is damaged")
        step += 1
        run.allow(step)
        run.wait_for("takeover", failures)
    for word, reason in PLAUSIBLE.items():
        run.wait_for_step(step)
        control[word] = 1
        failures += 1
        assert run.wait_for("failure", failures)["reason"].startswith(reason)
        step += 1
        run.allow(step)
        run.wait_for("takeover", failures)
    run.finish_as_if_nothing_had_happened(60)


def test_a_process_that_is_killed_before_its_first_step(jobs):
    """There is nothing to take over yet: the next one fills the arenas."""
    run = jobs.run(options=("--shadow-level", 0))
    pid = run.wait_for("spawn")["pid"]
    wait_until(lambda: (run.directory / AGENT_SOCKET).exists() and run.status()["ranks"], END_SECS, "a trainer")
    os.kill(pid, signal.SIGKILL)
    assert run.finish() == 0, run.err
    assert run.result == alone()
    assert [item["path"] for item in run.events("spawn")] == ["first", "cold"]
