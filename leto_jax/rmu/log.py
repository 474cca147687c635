"""The log of one rank: what has been decided, what has been written, what is committed.

Two equal copies. Each has two places for commits, intents and revocations and two for every chunk's mark, used by the parity of the step,
so a record of step t never overwrites one of t-1:

    commit[2] | intent[2] | revoke[2] | mark[chunk][2]

| record | body                                                        | says |
| INTENT | digest of the scalars, of extras, of metrics; number of chunks | everything that update `step` needs is stored |
| MARK   | crc of its intent                                           | chunk `index` of update `step` lies at its new place |
| COMMIT | crc of its intent (0 for a fill), and the same digest       | the state is that of `step`; everything else is derived from it |
| REVOKE | -                                                           | intents of `step` with an epoch below the record's are void |
"""

from __future__ import annotations

import dataclasses

import numpy as np

from leto_jax import records
from leto_jax.arena.memory import Arena
from leto_jax.faults import Point
from leto_jax.layout import Layout
from leto_jax.records import Kind, Record

_FIRST = {Kind.COMMIT: 0, Kind.INTENT: 2, Kind.REVOKE: 4}
COPIES = (0, 1)


@dataclasses.dataclass(frozen=True)
class Contents:
    """Every valid record of the log, copies merged: a fact counts when either copy shows it.

    torn: copies whose valid records are fewer than the merged ones, and which a takeover writes again.
    """

    commits: frozenset[Record]
    intents: frozenset[Record]
    revokes: frozenset[Record]
    marks: frozenset[Record]
    torn: tuple[int, ...] = ()

    @property
    def commit(self) -> int | None:
        """Number of the newest committed step."""
        return max((record.step for record in self.commits), default=None)


class Log:
    """Reads and writes the two copies of one rank's log."""

    def __init__(self, arena: Arena, layout: Layout):
        self._arena, self.chunks = arena, len(layout.chunks)
        self._regions = [layout.by_name[f"log{copy}"] for copy in COPIES]
        self._stride = layout.spec.protection.align_bytes

    def offset(self, copy: int, kind: Kind, step: int, index: int = 0) -> int:
        """Where a record of `kind` about `step` lies (bytes in the arena)."""
        return self._regions[copy].offset + self._place(kind, step, index)

    def holds(self, record: Record) -> bool:
        """Whether either copy shows `record`. Reads no more than its places."""
        places = (self.offset(copy, record.kind, record.step, record.index) for copy in COPIES)
        return any(self._arena.record(place, record.kind) == record for place in places)

    def write(self, point: Point, record: Record) -> None:
        """Stores a record in both copies.

        Crash: in neither, in the first, or in both; readers take it from either.
        Cost: two 64-byte stores.
        """
        for copy in COPIES:
            self._arena.store_record(point, self.offset(copy, record.kind, record.step, record.index), record)

    def read(self) -> Contents:
        """All valid records of both copies. Cost: one read of each."""
        found: list[dict[tuple[Kind, int, int], Record]] = [{}, {}]
        for copy, memory in enumerate(self._memory()):
            for kind, index, parity in self._slots():
                record = self._record(memory, kind, parity, index)
                if record is not None:
                    found[copy][kind, index, parity] = record
        merged: dict[Kind, set[Record]] = {kind: set() for kind in (Kind.COMMIT, Kind.INTENT, Kind.REVOKE, Kind.MARK)}
        for copy in COPIES:
            for (kind, _, _), record in found[copy].items():
                merged[kind].add(record)
        torn = tuple(copy for copy in COPIES if found[copy] != {**found[1 - copy], **found[copy]} or _older(found[copy], found[1 - copy]))
        commits, intents, revokes, marks = (frozenset(records) for records in merged.values())
        return Contents(commits, intents, revokes, marks, torn)

    def repair(self) -> None:
        """Makes the copies equal: in each place the newer valid record of the two. Done before anything is added to a log that a crash left.

        Crash: the copies differ in fewer places than before.
        """
        memory = self._memory()
        for kind, index, parity in self._slots():
            found = [self._record(copy, kind, parity, index) for copy in memory]
            valid = [record for record in found if record is not None]
            if not valid or found[0] == found[1]:
                continue
            newest = max(valid, key=lambda record: (record.step, record.epoch))
            for copy in COPIES:
                if found[copy] != newest:
                    self._arena.store_record(Point.LOG_REPAIR, self.offset(copy, kind, parity, index), newest)

    def _place(self, kind: Kind, step: int, index: int) -> int:
        """Bytes from the beginning of a copy."""
        slot = 6 + 2 * index if kind is Kind.MARK else _FIRST[kind]
        return self._stride * (slot + step % 2)

    def _memory(self) -> list[np.ndarray]:
        """The bytes of the copies."""
        return [self._arena.view(region.offset, region.nbytes) for region in self._regions]

    def _record(self, memory: np.ndarray, kind: Kind, parity: int, index: int) -> Record | None:
        """The valid record in a place of a copy, if it is one that belongs there."""
        place = self._place(kind, parity, index)
        record = records.unpack(memory[place : place + records.BYTES].tobytes(), kind)
        return record if record is not None and record.step % 2 == parity and record.index == index else None

    def _slots(self):
        for kind in _FIRST:
            for parity in (0, 1):
                yield kind, 0, parity
        for index in range(self.chunks):
            for parity in (0, 1):
                yield Kind.MARK, index, parity


def _older(mine: dict, other: dict) -> bool:
    return any(key in mine and (mine[key].step, mine[key].epoch) < (record.step, record.epoch) for key, record in other.items())
