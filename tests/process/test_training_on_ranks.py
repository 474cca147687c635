"""Training on several ranks, with real collectives and real deaths: every rank ends as if nothing had happened, to the bit.

The whole matrix is slow; with LETO_WRITE_RESULTS=1 it goes to experiments/results/crash_matrix_ranks.json.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import time

import matrices
import pytest
from jobs import END_SECS, Jobs, Result, Run, result

pytestmark = pytest.mark.timeout(600)
STEPS = 16
RANDOM_KILLS = 12


def of_rank(text: str, rank: int) -> Result:
    """What one rank has printed: its losses and its final line."""
    return result("\n".join(re.findall(rf"^\[{rank}\] ((?:step|final) .*)$", text, re.MULTILINE)))


@functools.cache
def undisturbed(jobs: Jobs, ranks: int, steps: int, *arguments: str) -> list[Result]:
    """The same job without a failure and without shadows."""
    run = jobs.run("--steps", steps, *arguments, options=("--nproc-per-node", ranks, "--shadow-level", 0))
    assert run.finish() == 0, run.err
    found = [of_rank(run.out, rank) for rank in range(ranks)]
    assert all(item.final for item in found), run.out
    assert len({tuple(item.losses.items()) for item in found}) == 1  # the loss is that of all
    return found


def start(jobs: Jobs, ranks: int, steps: int, *arguments: object, options: tuple[object, ...] = ()) -> Run:
    return jobs.start(*arguments, steps=steps, options=("--nproc-per-node", ranks, *options))


def finish(run: Run, jobs: Jobs, ranks: int, steps: int, *arguments: str) -> None:
    """Lets the job go to its end; every rank must have what it has in a run in which nothing failed."""
    run.allow(steps + 1)
    assert run.finish() == 0, run.err
    wanted = undisturbed(jobs, ranks, steps, *arguments)
    assert [of_rank(run.out, rank) for rank in range(ranks)] == wanted
    assert [row["step"] for row in run.metrics()] == list(range(1, steps + 1))
    assert [item for item in run.events("fence") if item["remaining"]] == []
    assert [item for item in run.events("takeover", path="shadow") if item["compiles"]] == []
    done = run.events("done")
    assert sorted((item["rank"], item["commit"]) for item in done[-ranks:]) == [(rank, steps) for rank in range(ranks)]


def test_any_rank_in_any_phase_and_both_at_once(jobs):
    run = start(jobs, 2, STEPS, "--cut", "rows")
    for number, (rank, phase) in enumerate([(1, "update"), (0, "compute")], 1):
        run.inject_on_the_way("sigkill", phase, rank=rank)
        found = run.wait_for("takeover", number)
        assert (found["rank"], found["phase"], found["path"], found["ranks"]) == (rank, phase, "shadow", 2)
    run.wait_for_shadow()
    for rank in (0, 1):
        run.kill(rank=rank)
    run.allow(run.status()["step"] + 1)
    assert run.wait_for("takeover", 3)["path"] == "shadow"
    assert len(run.events("failure")) == 3
    finish(run, jobs, 2, STEPS, "--cut", "rows")


def test_a_death_in_the_takeover_and_a_lost_page(jobs):
    run = start(jobs, 2, STEPS, "--cut", "tensor")
    run.wait_for_shadow()
    run.inject_in_the_next_takeover("sigkill", rank=1)
    run.kill(rank=0)
    run.wait_for("failure", 2)
    run.allow(run.status()["step"] + 2)
    assert run.wait_for("takeover")["rank"] == 1
    run.inject_on_the_way("page_loss", "update", rank=1)
    found = run.wait_for("takeover", 2)
    assert (found["rank"], found["repaired_pages"], found["path"]) == (1, 1, "shadow")
    finish(run, jobs, 2, STEPS, "--cut", "tensor")


def test_a_rank_that_is_stopped_or_stuck_is_noticed(jobs):
    """SIGSTOP; a body that does not come back, for which its peer waits in a collective. Both within the time that `leto status` tells."""
    run = start(
        jobs,
        2,
        STEPS,
        "--sleep-at",
        9,
        "--sleep-secs",
        600,
        "--on-rank",
        1,
        "--wait-in-section",
        options=("--hang-floor-secs", 2, "--body-timeout-secs", 4),
    )
    run.allow(5)
    run.wait_for_step(5)
    run.wait_for_shadow()
    begin = time.monotonic()
    run.kill(number=signal.SIGSTOP, rank=1)
    run.allow(7)
    failed = run.wait_for("failure")
    assert (failed["rank"], failed["kind"]) == (1, "stopped")
    assert time.monotonic() - begin < 1.0 + END_SECS
    run.wait_for("takeover")
    run.wait_for_shadow()
    limit = run.status()["hang_deadline_secs"]
    run.allow(STEPS + 1)
    failed = run.wait_for("failure", 2)
    assert (failed["rank"], failed["kind"], failed["phase"]) == (1, "hang", "body")
    assert failed["detect_secs"] < max(limit, 4.0) + 2.0
    finish(run, jobs, 2, STEPS)


def test_parity_at_the_peer_rebuilds_and_is_reported(jobs):
    """By a shadow of level 1, whose ranks have met and not begun."""
    run = start(jobs, 2, STEPS, "--peer-parity", 1, options=("--wait-for-parity", "--shadow-level", 1))
    run.inject_on_the_way("page_corruption", "update", rank=0)
    found = run.wait_for("takeover")
    assert (found["repaired_pages"], found["path"], found["level"]) == (1, "shadow", 1)
    finish(run, jobs, 2, STEPS, "--peer-parity", "1")
    assert run.events("ended")[-1]["peer_stale_secs"] is not None


MATRIX = [(2, "same"), (2, "rows"), (2, "tensor"), (2, "mixed"), (4, "rows")]
PLACES = [("compute", -1), ("decide", -1), ("update", 0), ("update", 1), ("commit", -1), ("drain", -1), ("body", -1)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("ranks", "cut"), MATRIX)
def test_each_rank_at_each_place_and_any_at_random(jobs, seed, ranks, cut):
    """Each rank at each place, then in a takeover; then at random moments any number of ranks at once, all of them too."""
    chance = random.Random(f"{seed} {ranks} {cut}")
    order = [(rank, *place) for rank in range(ranks) for place in PLACES]
    if ranks > 2:
        order = chance.sample(order, 16)
    steps = 8 * (len(order) + ranks + RANDOM_KILLS)
    run = start(jobs, ranks, steps, "--cut", cut)
    rows = []

    def taken_over(**more: object) -> None:
        rows.append(matrices.shown(run.wait_for("takeover", len(rows) + 1), ranks=ranks, cut=cut, **more))
        run.allow(run.status()["step"] + 2)

    for rank, phase, chunk in order:
        run.inject_on_the_way("sigkill", phase, chunk=chunk, rank=rank)
        taken_over(killed=[rank], chunk=chunk)
    for rank in range(ranks):
        failures = len(run.events("failure"))
        run.wait_for_shadow()
        run.inject_in_the_next_takeover("sigkill", rank=rank)
        run.kill(rank=(rank + 1) % ranks)
        run.wait_for("failure", failures + 2)
        run.allow(run.status()["step"] + 2)
        taken_over(killed=[(rank + 1) % ranks, rank], chunk=-1)
    for _ in range(RANDOM_KILLS):
        run.wait_for_shadow()
        trainers = {item["rank"]: item["pid"] for item in run.status()["ranks"] if item["role"] == "trainer"}
        run.allow(run.status()["step"] + 4)
        victims = sorted(chance.sample(range(ranks), chance.randint(1, ranks)))
        time.sleep(chance.uniform(0, 0.3))
        for rank in victims:
            with contextlib.suppress(ProcessLookupError):  # it may have ended of the death of another one
                os.kill(trainers[rank], signal.SIGKILL)
        run.allow(run.status()["step"] + 4)
        taken_over(killed=victims, chunk=-1)
    finish(run, jobs, ranks, steps, "--cut", cut)
    matrices.write("crash_matrix_ranks", f"{ranks} ranks, {cut}", seed, rows)
