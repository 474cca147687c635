"""The watchdog over several ranks, on control words as trainers leave them: who is overdue, and who had a good reason."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from leto_jax.agent.policy import Kind
from leto_jax.agent.watch import Watch
from leto_jax.arena.control import BYTES, Control, Word
from leto_jax.config import Deadlines
from leto_jax.faults import Phase

S = 1_000_000_000
DEADLINES = Deadlines(hang_floor=3.0, hang_factor=5.0, body=300.0, takeover=60.0, init=600.0)
MEDIAN = 0.1


class Ranks:
    """Two ranks whose processes are this one: it runs, and is never stopped."""

    def __init__(self) -> None:
        self.controls = []
        for _ in range(2):
            fd = os.memfd_create("control")
            os.ftruncate(fd, BYTES)
            self.controls.append(Control(fd))
            os.close(fd)
        self.children = [SimpleNamespace(rank=rank, pid=os.getpid(), greeted=True) for rank in range(2)]
        self.generation = SimpleNamespace(running=self.children, incarnation=1, began=time.monotonic(), first_exit=None)
        self.watch = Watch(self.controls, DEADLINES)

    def claim(self) -> None:
        for control in self.controls:
            control.claim(os.getpid(), 1, 100)
            control[Word.COMMIT] = control[Word.STEPS_DONE] = 7

    def step(self, rank: int, secs: float, phase: Phase = Phase.COMPUTE) -> None:
        """A step of this rank began so long ago."""
        self.controls[rank].enter(phase)
        self.controls[rank][Word.ARMED_SINCE_NS] = time.monotonic_ns() - int(secs * S)

    def body(self, rank: int, secs: float, section: bool = False) -> None:
        """Its loop body, or a section with a minute left, began so long ago."""
        control = self.controls[rank]
        control.enter(Phase.SECTION if section else Phase.BODY)
        control[Word.PHASE_SINCE_NS] = time.monotonic_ns() - int(secs * S)
        control[Word.ARMED_SINCE_NS] = 0
        control[Word.SECTION_DEADLINE_NS] = time.monotonic_ns() + 60 * S if section else 0

    def look(self, promoted: bool = False):
        return self.watch.look(self.generation, promoted, MEDIAN, None)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for control in made.controls:
        control.close()


def test_a_rank_that_never_comes(ranks):
    assert ranks.look() is None
    ranks.generation.began -= 601
    ranks.children[1].greeted = False
    assert ranks.look() == (0, Kind.HANG, "no first step within 600 s", 600.0, False)
    ranks.controls[0].claim(os.getpid(), 1, 100)
    assert ranks.look() == (1, Kind.HANG, "no first step within 600 s", 600.0, True)


def test_a_spinning_rank_is_found_by_the_first_to_be_overdue(ranks):
    ranks.claim()
    ranks.step(0, 2)
    ranks.step(1, 2)
    assert ranks.look() is None
    ranks.step(1, 4)
    found = ranks.look()
    assert (found.rank, found.kind) == (1, Kind.HANG)
    assert found.detect_secs == pytest.approx(4, abs=0.5)


def test_a_body_that_keeps_the_others_waiting(ranks):
    ranks.claim()
    ranks.step(0, 2)
    ranks.body(1, 10)
    assert ranks.look() is None
    ranks.step(0, 4)
    assert ranks.look() is None  # rank 0 writes a log, for example
    ranks.body(1, DEADLINES.peer_body + 1)
    found = ranks.look()
    assert (found.rank, found.kind) == (1, Kind.HANG)
    assert found.detail.startswith("the loop body kept the other ranks waiting (rank 0: no commit within 3.0 s ")
    assert found.detect_secs == pytest.approx(DEADLINES.peer_body + 1, abs=0.5)


def test_the_first_step_after_a_promotion_has_the_limit_of_the_takeover(ranks):
    ranks.claim()
    for rank in (0, 1):
        ranks.step(rank, 61)
        ranks.controls[rank][Word.STEPS_DONE] = 0
    assert ranks.look() is None  # it may compile
    assert ranks.look(promoted=True).kind is Kind.HANG


def test_a_section_within_its_limit_excuses_the_others_for_as_long_as_it_lasts(ranks):
    ranks.claim()
    ranks.step(0, 50)
    ranks.body(1, 50, section=True)
    assert ranks.look() is None
    ranks.body(1, 0)  # it has left the section; the step of rank 0 is as old as before
    assert ranks.look() is None
    ranks.watch._excused_ns -= 4 * S
    assert ranks.look() is None
    ranks.body(1, DEADLINES.peer_body + 1)
    assert ranks.look().rank == 1
    ranks.body(1, 50, section=True)
    ranks.controls[1][Word.SECTION_DEADLINE_NS] = time.monotonic_ns() - 1
    found = ranks.look()
    assert (found.rank, found.detail) == (1, "a section outlasted its timeout_secs")


def test_damaged_words_of_one_rank(ranks):
    ranks.claim()
    ranks.controls[1][Word.PHASE] = -1
    found = ranks.look()
    assert (found.rank, found.kind, found.detect_secs) == (1, Kind.DAMAGED, None)
    assert found.detail.startswith("control word PHASE: expected ")


def test_a_rank_that_goes_on_after_the_end_of_another(ranks):
    ranks.claim()
    ranks.generation.running = ranks.children[1:]
    ranks.generation.first_exit = time.monotonic() - 59
    assert ranks.look() is None
    ranks.generation.first_exit -= 2
    found = ranks.look()
    assert (found.rank, found.kind, found.detail) == (1, Kind.HANG, "it did not end within 60 s of the first rank that did")
