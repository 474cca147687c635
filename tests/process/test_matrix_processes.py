"""Everything that `leto inject` can do, at every place, and a hundred kills at random times. Slow: run with `-m slow`.

With LETO_WRITE_RESULTS=1 the result goes to experiments/results/crash_matrix.json.
"""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import matrices
import pytest
from jobs import Run

CHUNKS = 4  # of the tiny model
PLACES = (
    ("compute", -1),
    ("decide", -1),
    *(("update", chunk) for chunk in range(CHUNKS)),
    ("commit", -1),
    ("drain", -1),
    ("body", -1),
    ("takeover", -1),
)
KINDS = ("sigkill", "exception", "exit", "oom", "sigstop", "spin", "page_loss", "page_corruption")
RANDOM_KILLS = 100
MATRIX_STEPS, RANDOM_STEPS = 600, 4000
STEPS_PER_KILL = 30


@dataclasses.dataclass
class Failures:
    """Counts what the journal must show."""

    run: Run
    failed: int = 0
    taken: int = 0

    def next(self, **expected: object) -> dict[str, Any]:
        self.failed += 1
        found = self.run.wait_for("failure", self.failed)
        assert {key: found[key] for key in expected} == expected, found
        return found

    def taken_over(self, **more: object) -> dict[str, Any]:
        self.taken += 1
        found = self.run.wait_for("takeover", self.taken, secs=300)
        return matrices.shown(found, **more)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_every_kind_at_every_place(jobs, seed):
    order = [(kind, phase, chunk) for kind in KINDS for phase, chunk in PLACES]
    random.Random(seed).shuffle(order)
    run = jobs.start("--wait-in-section", steps=MATRIX_STEPS, options=("--body-timeout-secs", 5))
    run.allow(5)
    run.wait_for_step(5)
    failures, rows = Failures(run), []
    for kind, phase, chunk in order:
        if phase == "takeover":  # of whoever takes over from a trainer that is killed
            run.wait_for_shadow()
            run.inject_in_the_next_takeover(kind)
            run.allow(run.status()["step"] + 5)
            run.kill()
            failures.next(kind="signal")
        else:
            run.inject_on_the_way(kind, phase, chunk=chunk)
        failures.next(kind=kind, phase=phase)
        rows.append(failures.taken_over(chunk=chunk))
        run.allow(run.status()["step"] + 3)  # so that step times are learnt
    run.finish_as_if_nothing_had_happened(MATRIX_STEPS)
    assert {(row["kind"], row["phase"], row["chunk"]) for row in rows} == set(order)
    matrices.write("crash_matrix", "matrix", seed, rows)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_hundred_kills_at_random_times(jobs, seed):
    chance = random.Random(seed)
    run = jobs.start(steps=RANDOM_STEPS)
    failures, rows = Failures(run), []
    run.wait_for("first_step")
    for number in range(RANDOM_KILLS):
        if number % 5 < 3:  # of five, three find a ready shadow, one is late, and one is followed by a kill of the one that takes over
            run.wait_for_shadow()
        run.allow(run.status()["step"] + STEPS_PER_KILL)
        time.sleep(chance.uniform(0, 0.5))
        run.kill()
        failures.next(reason="SIGKILL")
        if number % 5 == 4:
            time.sleep(chance.uniform(0, 1.0))
            run.kill()
            failures.next(reason="SIGKILL")
            if len(run.events("takeover")) > failures.taken:  # it had taken over already
                failures.taken = len(run.events("takeover"))
        rows.append(failures.taken_over(chunk=-1))
    run.finish_as_if_nothing_had_happened(RANDOM_STEPS)
    matrices.write("crash_matrix", "random", seed, rows)
