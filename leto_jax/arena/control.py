"""Control words of one rank: hints that a trainer leaves for the agent, and requests that the agent leaves for the trainer.

Aligned 8-byte words, each written by one side only. They are hints: nothing that must be true after a crash is kept here.
"""

from __future__ import annotations

import enum
import mmap
import time

import numpy as np

from leto_jax import errors
from leto_jax.faults import Phase

MAGIC = 0x4C45544F43540001
BYTES = 4096
PHASES = tuple(Phase)
SLACK_NS = 1_000_000_000  # a word may be written after the clock was read


class Word(enum.IntEnum):
    """Index of each word. Times are CLOCK_MONOTONIC nanoseconds, comparable between processes of one machine."""

    MAGIC = 0
    # written by the trainer
    PID = enum.auto()
    INCARNATION = enum.auto()
    PHASE = enum.auto()
    PHASE_SINCE_NS = enum.auto()
    COMMIT = enum.auto()
    STEPS = enum.auto()
    ARMED_SINCE_NS = enum.auto()  # compute was dispatched and its commit not yet observed; 0 = watchdog off
    SECTION_DEADLINE_NS = enum.auto()
    LAST_STEP_NS = enum.auto()
    STEPS_DONE = enum.auto()  # commits by this incarnation
    INJECT_TAKEN = enum.auto()
    INJECT_FIRED_NS = enum.auto()
    INJECT_FIRED_STEP = enum.auto()
    STEP_NS_TOTAL = enum.auto()  # time inside successful steps of this incarnation
    CHECKPOINT_TAKEN = enum.auto()
    STALE_NS_TOTAL = enum.auto()  # time in which the host parity was behind
    PEER_STALE_NS_TOTAL = enum.auto()  # and the parity with the peer; -1: there is none
    COPIES_EVEN = enum.auto()  # of rank 0: which copies are taken of an even step (`checkpoint.announced`)
    COPIES_ODD = enum.auto()
    # written by the agent; the sequence last
    INJECT_KIND = enum.auto()
    INJECT_PHASE = enum.auto()
    INJECT_STEP = enum.auto()
    INJECT_CHUNK = enum.auto()
    INJECT_TIMES = enum.auto()  # how often it fires, if it is one that a trainer gets over: out of memory
    INJECT_SEQUENCE = enum.auto()
    CHECKPOINT_ASKED = enum.auto()  # number of the request whose file is in the runtime directory


class Control:
    """The words behind a descriptor. Owns its mapping."""

    def __init__(self, fd: int):
        self._map = mmap.mmap(fd, BYTES, mmap.MAP_SHARED)
        self._words = np.frombuffer(self._map, np.int64)

    def __getitem__(self, word: Word) -> int:
        return int(self._words[word])

    def __setitem__(self, word: Word, value: int) -> None:
        self._words[word] = value

    def claim(self, pid: int, incarnation: int, steps: int) -> None:
        """A trainer begins to write: clears what its predecessor left, but for the commit (the state is still of that step) and for a
        request that has not fired yet (it is now for this trainer)."""
        for word in Word:
            if Word.PID <= word <= Word.COPIES_ODD and word not in (Word.COMMIT, Word.INJECT_TAKEN, Word.CHECKPOINT_TAKEN):
                self[word] = 0
        self[Word.PEER_STALE_NS_TOTAL] = -1
        self[Word.STEPS] = steps
        self[Word.INCARNATION] = incarnation
        self[Word.PHASE] = PHASES.index(Phase.INIT)
        self[Word.PHASE_SINCE_NS] = time.monotonic_ns()
        self[Word.MAGIC] = MAGIC
        self[Word.PID] = pid

    def enter(self, phase: Phase) -> None:
        self[Word.PHASE] = PHASES.index(phase)
        self[Word.PHASE_SINCE_NS] = time.monotonic_ns()

    def check(self, pid: int, incarnation: int) -> None:
        """Whether these can be the words of the trainer `pid`. Raises RecordError naming the first that cannot: the block is damaged."""
        most, now = 1 << 62, time.monotonic_ns() + SLACK_NS
        bounds = {
            Word.MAGIC: (MAGIC, MAGIC),
            Word.PID: (pid, pid),
            Word.INCARNATION: (incarnation, incarnation),
            Word.PHASE: (0, len(PHASES) - 1),
            Word.PHASE_SINCE_NS: (0, now),
            Word.COMMIT: (0, most),
            Word.STEPS: (1, most),
            Word.ARMED_SINCE_NS: (0, now),
            Word.SECTION_DEADLINE_NS: (0, most),
            Word.LAST_STEP_NS: (0, now),
            Word.STEPS_DONE: (0, most),
            Word.STEP_NS_TOTAL: (0, now),
            Word.STALE_NS_TOTAL: (0, now),
            Word.PEER_STALE_NS_TOTAL: (-1, now),
        }
        for word, (low, high) in bounds.items():
            if not low <= self[word] <= high:
                raise _damaged(word, low, high, self[word])

    @property
    def phase(self) -> Phase:
        """Raises RecordError when the word holds no phase: the block is damaged."""
        number = self[Word.PHASE]
        if not 0 <= number < len(PHASES):
            raise _damaged(Word.PHASE, 0, len(PHASES) - 1, number)
        return PHASES[number]

    def close(self) -> None:
        self._words = np.zeros(len(Word), np.int64)
        try:
            self._map.close()
        except BufferError:
            pass  # somebody still looks at it: the mapping goes with them


def _damaged(word: Word, low: int, high: int, found: int) -> errors.RecordError:
    expected = str(low) if low == high else f"{low}..{high}"
    return errors.RecordError(f"control word {word.name}: expected {expected}, found {found}; the control block is damaged")
