"""State manager and agent are killed, alone and together: what must go on goes on, what must end ends, and nothing stays behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal

import pytest
from jobs import END_SECS, Jobs, Run, leto, wait_until

from leto_jax.manager import runtime
from leto_jax.shadow.member import AGENT_SOCKET

STEPS = 20


def start(jobs: Jobs, *arguments: object) -> Run:
    """A job that waits in the body of its first step, with a shadow that is ready."""
    run = jobs.start(*arguments, steps=STEPS)
    run.wait_for_shadow()
    return run


def again(jobs: Jobs, run: Run, *arguments: object) -> Run:
    """The same `leto run --job`."""
    return jobs.run("--steps", STEPS, "--limit", run.limit, *arguments, job=run.job)


def go_on_to(run: Run, step: int) -> None:
    run.allow(step)
    run.wait_for_step(step)


def workers_of(run: Run) -> dict[int, str]:
    """Trainer and shadow, each with a forked data worker, one that is forked into its own session, and one that nobody is the parent of."""
    found = run.carriers()
    assert len(found) >= 8, found
    assert sum("sleep 600" in words for words in found.values()) == 2
    sessions = [os.getsid(pid) for pid in found]
    assert len(set(sessions)) >= 6
    return found


def test_kill_9_of_the_state_manager(jobs):
    run = start(jobs)
    first = run.status()["manager_pid"]
    os.kill(first, signal.SIGKILL)
    replaced = run.wait_for("manager")
    assert replaced["reason"] == "the last one died"
    assert run.status()["manager_pid"] == replaced["pid"] != first
    go_on_to(run, 4)  # training has gone on
    run.kill()
    taken = run.wait_for("takeover")  # and the next crash recovers
    assert (taken["path"], taken["step"], taken["plan"]) == ("shadow", 4, "redo")
    # Manager and trainer at the same moment.
    run.wait_for_shadow()
    run.allow(8)
    os.kill(run.status()["manager_pid"], signal.SIGKILL)
    run.kill()
    assert run.wait_for("takeover", 2)["path"] == "shadow"
    run.wait_for("manager", 2)
    assert "the state manager died; starting another one with the agent's descriptors" in run.err
    run.finish_as_if_nothing_had_happened(STEPS)


def test_kill_9_of_the_agent(jobs):
    run = start(jobs, "--workers")
    go_on_to(run, 5)
    workers_of(run)
    manager = run.status()["manager_pid"]
    run.kill_agent()
    wait_until(lambda: not run.carriers(), END_SECS, lambda: f"still there: {run.carriers()}")
    assert list(jobs.processes()) == [manager]
    assert "kept" in leto("ls").stdout

    more = again(jobs, run, "--workers")
    spawned = more.wait_for("spawn", len(run.events("spawn")) + 1)
    assert spawned["path"] == "attach"
    attached = more.wait_for("attached", incarnation=spawned["incarnation"])
    assert (attached["commit"], attached["action"]) == (5, "redo")
    assert f"attached to job {run.job!r}: retained state found" in more.err
    more.finish_as_if_nothing_had_happened(STEPS, run)
    assert "step 4 " not in more.out


def kill_both(run: Run) -> None:
    """At the same moment: the agent must not come to replace the manager."""
    manager = run.status()["manager_pid"]
    run.process.send_signal(signal.SIGSTOP)
    os.kill(manager, signal.SIGKILL)
    run.kill_agent()


def test_kill_9_of_both_at_once(jobs):
    run = start(jobs, "--workers")
    go_on_to(run, 5)
    old = workers_of(run)
    kill_both(run)
    wait_until(lambda: not jobs.processes(), END_SECS, lambda: f"still there: {jobs.processes()}\n{run.err}")
    assert "leto: agent and state manager are gone; this process ends" in run.err
    wait_until(lambda: not memory_of(old), END_SECS, lambda: f"still held: {memory_of(old)}")

    more = again(jobs, run)
    gone = f"the retained state of job {run.job!r} is gone (state manager and agent both died after step 5); starting from step 0, as no checkpoint was asked for"
    wait_until(lambda: gone in more.err, END_SECS, lambda: more.err)
    more.finish_as_if_nothing_had_happened(STEPS, run)


def test_a_new_agent_comes_before_the_old_processes_have_noticed(jobs):
    """They hold on to sockets whose names belong to somebody else now, and one of them is stopped: none may outlive the start."""
    run = start(jobs, "--workers")
    go_on_to(run, 3)
    old = workers_of(run)
    run.kill("shadow", signal.SIGSTOP)
    kill_both(run)
    more = again(jobs, run)
    more.wait_for("start", 2)
    left = set(old) & set(more.carriers())
    assert not left, {pid: old[pid] for pid in left}
    more.finish_as_if_nothing_had_happened(STEPS, run)


BROKEN = """if True:
    from leto_jax import cli
    from leto_jax.agent.agent import Agent
    look = Agent._sample
    def sample(self):
        look(self)
        if self._ranks.commit == 4:
            raise OSError(28, "No space left on device")
    Agent._sample = sample
    cli.main()
"""


def test_an_agent_that_fails_by_itself_keeps_the_state(jobs):
    """As one that is killed: all processes end, and what was trained is there for the next one."""
    run = jobs.start("--workers", steps=STEPS, command=("-c", BROKEN))
    run.wait_for_shadow()
    run.allow(4)
    assert run.finish() == 3
    assert "OSError: [Errno 28] No space left on device" in run.err
    assert "the state is kept: `leto run --job " in run.err
    assert run.carriers() == {}
    more = again(jobs, run)
    more.finish_as_if_nothing_had_happened(STEPS, run)
    assert more.events("attached")[-1]["commit"] >= 1
    assert "retained state found" in more.err


def memory_of(pids: dict[int, str]) -> list[str]:
    """Arenas that these processes still hold."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found += [link for fd in os.listdir(f"/proc/{pid}/fd") if "memfd:leto" in (link := os.readlink(f"/proc/{pid}/fd/{fd}"))]
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c(jobs, number):
    """Nothing may be left behind, which the fixture checks: here after the start of a trainer with workers, and in the middle of a start."""
    early = jobs.run("--steps", 5)
    early.wait_for("spawn")
    early.process.send_signal(number)
    run = start(jobs, "--workers") if number == signal.SIGINT else start(jobs)
    run.process.send_signal(number)
    for each in (early, run):
        assert each.finish(END_SECS) == 128 + number
        assert f"leto: {number.name}: stopping" in each.err
        assert not each.carriers()
        assert each.events()[-1]["reason"] == number.name
        assert "Traceback" not in each.err


def test_what_a_script_leaves_running_ends_with_the_job(jobs):
    run = jobs.run("--steps", 4, "--child-at", 3)
    assert run.finish() == 0, run.err
    assert not run.carriers()


def test_a_data_worker_outlives_the_thread_that_forked_it(jobs):
    """Data pipelines fork in threads of their own, which may end: that is not the end of the trainer."""
    run = jobs.start("--workers", steps=4, options=["--shadow-level", 0])
    run.wait_for_step(1)
    assert sum("sleep" in words for words in run.carriers().values()) == 1
    assert len(run.carriers()) == 4, run.carriers()
    run.allow(5)
    assert run.finish() == 0


def test_a_runtime_directory_that_is_cleaned_away(jobs):
    """Cleaners of temporary files remove what looks unused: manager and agent make their sockets again, and the job goes on."""
    run = start(jobs)
    shutil.rmtree(run.directory)
    wait_until(lambda: (run.directory / AGENT_SOCKET).exists() and (run.directory / runtime.SOCKET_NAME).exists(), END_SECS, "new sockets")
    run.wait_for_step(1)
    run.kill()
    assert run.wait_for("takeover")["path"] == "shadow"
    run.wait_for_shadow()  # the next one has found both
    run.finish_as_if_nothing_had_happened(STEPS)
    assert "leto: the agent's socket had vanished; made it again" in run.err
