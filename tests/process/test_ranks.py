"""Several ranks as the agent sees them: what happens to one happens to all. The processes speak as trainers do, and train nothing."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest
from jobs import END_SECS, TINY, Jobs, Run, leto, wait_until

from leto_jax.agent.processes import state_letter
from leto_jax.config import Deadlines

SCRIPT = TINY.with_name("ranks.py")
TWO = ("--nproc-per-node", 2)


def start(jobs: Jobs, *arguments: object, steps: int = 40, options: tuple[object, ...] = ()) -> Run:
    """Two ranks that wait in the body of their first step."""
    return jobs.start(*arguments, steps=steps, script=SCRIPT, options=(*TWO, *options))


def pids(run: Run, role: str) -> list[int]:
    return [rank["pid"] for rank in run.status()["ranks"] if rank["role"] == role]


def coordinator(run: Run, role: str) -> int:
    """Of the generation that has this role now."""
    spawned = {event["pid"]: event["incarnation"] for event in run.events("spawn")}
    incarnation = spawned[pids(run, role)[0]]
    return run.events("coordinator", incarnation=incarnation, reason="started")[0]["pid"]


def taken_over(run: Run, count: int, rank: int, step: int, path: str = "shadow") -> dict:
    """The `count`-th takeover, after a failure of `rank`: one for all ranks, as long as that of the slowest."""
    found = run.wait_for("takeover", count)
    assert (found["rank"], found["ranks"], found["step"], found["path"]) == (rank, 2, step, path)
    attached = run.events("attached", incarnation=found["incarnation"])
    assert [event["rank"] for event in sorted(attached, key=lambda event: event["rank"])] == [0, 1]
    epochs = {event["reason"] for event in attached}
    assert epochs == {f"epoch {run.events('decision')[-1]['epoch']}"} or path == "cold"
    assert len(epochs) == 1
    failed = run.events("failure")[-1]
    ends = [int(ns) for ns in re.findall(r"^\[[01]\] finished (\d+)$", run.out, re.MULTILINE)][-2:]
    assert found["takeover_secs"] + found["plain_step_secs"] == pytest.approx((max(ends) - failed["failed_ns"]) / 1e9)
    assert max(ends) - min(ends) > 0.1e9  # rank 1 is slow
    assert (found["compiles"], found["repaired_pages"], found["stages"]["attach"]) == (2, 1, 0.2)
    return found


@pytest.mark.timeout(300)
def test_what_happens_to_one_rank_happens_to_all(jobs):
    run = start(jobs, options=("--hang-floor-secs", 2))
    run.wait_for_shadow()
    status = run.status()
    assert [(rank["rank"], rank["role"]) for rank in status["ranks"]] == [(0, "trainer"), (1, "trainer"), (0, "shadow"), (1, "shadow")]
    assert [rank["phase"] for rank in status["ranks"]] == ["body", "body", "ready", "ready"]
    assert [rank["step"] for rank in status["ranks"]] == [1, 1, None, None]
    run.allow(6)
    run.wait_for_step(6)

    # Killed: the other one's broken collective ends it by itself, which is no failure of its own.
    old = pids(run, "trainer")
    os.kill(old[1], signal.SIGKILL)
    failed = run.wait_for("failure")
    assert (failed["rank"], failed["kind"], failed["reason"]) == (1, "signal", "SIGKILL")
    run.allow(8)
    taken_over(run, 1, rank=1, step=6)
    assert not set(old) & set(run.carriers())
    assert len(run.events("fence")) == len(run.events("failure")) == 1

    # Told to fail, in a step: the one that was told is to blame, whoever else is dead or late by then.
    run.wait_for_shadow()
    assert leto("inject", "--job", run.job, "--rank", 2).stderr == "leto: --rank 2: expected 0 to 1, the ranks of this job\n"
    for count, (rank, kind, reason) in enumerate(
        [
            (1, "exit", "exit code 17"),
            (0, "sigstop", "the process was stopped (SIGSTOP) for more than 1 s"),
            (1, "spin", "no commit within 2.0 s"),
        ],
        2,
    ):
        step = run.inject_on_the_way(kind, "compute", rank=rank)
        failed = run.wait_for("failure", count)
        assert (failed["rank"], failed["kind"], failed["phase"], failed["step"]) == (rank, kind, "compute", step - 1)
        assert failed["reason"].startswith(reason)
        run.allow(run.status()["step"] + 2)
        taken_over(run, count, rank=rank, step=step - 1)
        if kind == "sigstop":
            assert Deadlines.stopped <= failed["detect_secs"] < Deadlines.stopped + 1
        run.wait_for_shadow()

    # Of the shadows, the loss of one rank or of their coordinator is the loss of all; the next ones are as good.
    for victim in (lambda: pids(run, "shadow")[1], lambda: coordinator(run, "shadow")):
        shadows, restarts = pids(run, "shadow"), len(run.events("spawn", role="shadow"))
        os.kill(victim(), signal.SIGKILL)
        run.wait_for("spawn", restarts + 2, role="shadow")
        run.wait_for_shadow()
        assert not set(shadows) & set(run.carriers())
    first, second = (event["reason"] for event in run.events("refused"))
    assert first == "the shadow ended (rank 1: SIGKILL)"
    assert re.fullmatch(
        r"the shadow ended \((rank 0: its coordinator: SIGKILL|rank [01]: SIGABRT)\)", second
    )  # they may abort, and be seen first
    assert len(run.events("failure")) == 4

    # The end: both have to come to it, and all that they have said comes out.
    run.allow(41)
    assert run.finish() == 0, run.err
    assert [(event["rank"], event["commit"]) for event in sorted(run.events("done"), key=lambda event: event["rank"])] == [(0, 40), (1, 40)]
    assert sorted(re.findall(r"^\[(\d)\] the last line has no end$", run.out, re.MULTILINE)) == ["0", "1"]
    assert all(line.startswith(("[0] ", "[1] ")) for line in run.out.splitlines())
    assert "[0] Traceback" in run.err or "[1] Traceback" in run.err
    assert re.search(r"^leto: the trainers failed \(rank 1: SIGKILL in body after commit 6\)$", run.err, re.MULTILINE)
    assert run.carriers() == {}
    report = json.loads(leto("report", run.job, "--json").stdout)
    assert [item["rank"] for item in report["takeovers"]] == [1, 1, 0, 1]
    assert report["steps"] == 40
    assert sum(report["badput_secs"].values()) == pytest.approx(report["wall_secs"])


@pytest.mark.timeout(300)
def test_a_failure_of_both_and_one_in_the_takeover(jobs):
    run = start(jobs)
    run.wait_for_shadow()
    for pid in pids(run, "trainer"):
        os.kill(pid, signal.SIGKILL)
    run.wait_for("failure")
    run.allow(3)
    taken_over(run, 1, rank=run.events("failure")[0]["rank"], step=1)
    assert len(run.events("failure")) == 1  # of several at once the first one that was seen

    run.wait_for_shadow()
    run.inject_in_the_next_takeover("sigkill", rank=1)
    run.kill(rank=0)
    assert run.wait_for("failure", 2)["rank"] == 0
    failed = run.wait_for("failure", 3)
    assert (failed["rank"], failed["kind"], failed["phase"]) == (1, "sigkill", "takeover")
    run.allow(run.status()["step"] + 2)
    found = run.wait_for("takeover", 2)
    assert (found["rank"], found["path"], found["ranks"]) == (1, "cold", 2)
    run.allow(41)
    assert run.finish() == 0, run.err


def test_what_one_rank_says_is_said_for_all(jobs):
    """It refuses, it gives up, or it fails at the same step again and again."""
    refused = start(jobs, "--refuse", 1)
    assert refused.finish() == 2
    assert "leto: stopped: rank 1: params: another model" in refused.err
    assert [event["rank"] for event in refused.events("refused")] == [1]

    gave_up = start(jobs, "--give-up", 1, options=("--shadow-level", 0))
    gave_up.allow(10)
    assert gave_up.finish() == 3
    assert "leto: stopped: the trainer gave up on purpose" in gave_up.err
    assert (gave_up.events("stopped")[0]["rank"], gave_up.events("failure")[0]["rank"]) == (1, 1)

    # Its state is kept: of two ranks, for two ranks.
    assert json.loads(leto("status", "--job", gave_up.job, "--json").stdout)["state"] == "kept"
    done = leto("run", "--job", gave_up.job, TINY)
    assert done.returncode == 2
    assert (
        "--nproc-per-node 1: expected 2, since the job holds the state of 2 ranks; run it with --nproc-per-node 2, or free" in done.stderr
    )
    more = jobs.run("--steps", 5, job=gave_up.job, script=SCRIPT, options=(*TWO, "--shadow-level", 0))
    assert more.finish() == 0, more.err
    assert {event["rank"] for event in more.events("first_step", commit=4)} == {0, 1}


def test_cold_starts_that_lead_nowhere_wait(jobs):
    run = start(jobs, "--raise", 1, options=("--shadow-level", 0, "--max-restarts-without-progress", 2))
    run.allow(10)
    assert run.finish() == 3
    assert [(event["rank"], event["kind"], event["step"]) for event in run.events("failure")] == [(1, "exit", 3)] * 3
    assert [(event["step"], event["secs"]) for event in run.events("back_off")] == [(3, 1.0)]
    assert "leto: stopped: exit code 1 3 times after commit 3 without progress (--max-restarts-without-progress 2)" in run.err
    assert "[1] ValueError: raised in the body of step 3" in run.err
    assert leto("stop", "--job", run.job).returncode == 0


def test_all_ranks_die_with_their_agent(jobs):
    run = start(jobs, steps=3, options=("--shadow-level", 0))
    run.wait_for_step(1)
    first = pids(run, "trainer")
    run.kill_agent()
    wait_until(lambda: all(state_letter(pid) in ("", "Z") for pid in first), END_SECS, lambda: f"still there: {run.carriers()}")
    wait_until(lambda: not run.carriers(), END_SECS, lambda: f"still there: {run.carriers()}")
    assert leto("stop", "--job", run.job).returncode == 0
