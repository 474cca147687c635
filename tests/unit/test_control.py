"""Control words: hints that are checked before anybody acts on them."""

from __future__ import annotations

import time

import pytest

from leto_jax.arena.control import Word
from leto_jax.errors import RecordError
from leto_jax.faults import Phase

PID, INCARNATION, STEPS = 4321, 3, 100


def test_what_a_trainer_writes_is_no_damage(control):
    control.claim(PID, INCARNATION, STEPS)
    for phase in Phase:
        control.enter(phase)
        control.check(PID, INCARNATION)
        assert control.phase is phase
    now = time.monotonic_ns()
    for word, value in (
        (Word.COMMIT, STEPS),
        (Word.ARMED_SINCE_NS, now),
        (Word.SECTION_DEADLINE_NS, now + 10**15),
        (Word.STEPS_DONE, STEPS),
    ):
        control[word] = value
        control.check(PID, INCARNATION)


@pytest.mark.parametrize("garbage", [-1, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize(
    "word", [word for word in Word if word <= Word.STALE_NS_TOTAL and not word.name.startswith(("INJECT", "CHECKPOINT"))]
)
def test_each_damaged_word_is_named(control, word, garbage):
    control.claim(PID, INCARNATION, STEPS)
    control[word] = garbage
    with pytest.raises(
        RecordError, match=rf"control word {word.name}: expected \d+(\.\.\d+)?, found {garbage}; the control block is damaged"
    ):
        control.check(PID, INCARNATION)


def test_a_block_of_another_trainer_is_damaged_too(control):
    control.claim(PID, INCARNATION, STEPS)
    with pytest.raises(RecordError, match="control word PID: expected 4322, found 4321"):
        control.check(PID + 1, INCARNATION)
    with pytest.raises(RecordError, match="control word INCARNATION: expected 4, found 3"):
        control.check(PID, INCARNATION + 1)


def test_a_claim_keeps_the_commit_and_a_request_that_has_not_fired(control):
    control.claim(PID, INCARNATION, STEPS)
    for word in Word:
        control[word] = 7
    control[Word.INJECT_SEQUENCE] = 8
    control.claim(PID + 1, INCARNATION + 1, STEPS)
    control.check(PID + 1, INCARNATION + 1)
    kept = {word: control[word] for word in (Word.COMMIT, Word.INJECT_TAKEN, Word.INJECT_SEQUENCE, Word.INJECT_KIND)}
    assert kept == {Word.COMMIT: 7, Word.INJECT_TAKEN: 7, Word.INJECT_SEQUENCE: 8, Word.INJECT_KIND: 7}
    assert control[Word.STEPS_DONE] == control[Word.ARMED_SINCE_NS] == control[Word.INJECT_FIRED_NS] == 0
