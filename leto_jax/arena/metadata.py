"""Host metadata of one rank: the few facts that are about the job rather than about a step.

    epoch[2] | promotion[2] | life[2] | lost[LOST_SLOTS]

The first three have two places each; the valid record with the highest sequence number counts. The agent writes epochs, promotions and
ranges that it knows to be lost, the trainer that holds the lease the rest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from leto_jax import records
from leto_jax.arena.memory import Arena
from leto_jax.errors import UnrecoverableError
from leto_jax.faults import Point
from leto_jax.records import Kind, Record

LOST_SLOTS = 256
BYTES = records.BYTES * (6 + LOST_SLOTS)
_FIRST = {Kind.EPOCH: 0, Kind.PROMOTION: 2, Kind.LIFE: 4}


@dataclasses.dataclass(frozen=True)
class LostRange:
    """Bytes of the device or host arena that a fault took away. arena: 'device' or 'host'; offset, nbytes: bytes."""

    arena: str
    offset: int
    nbytes: int

    def overlaps(self, offset: int, nbytes: int) -> bool:
        return self.offset < offset + nbytes and offset < self.offset + self.nbytes


def touches(lost: Sequence[LostRange], arena: str, offset: int, nbytes: int) -> bool:
    """Whether any lost range overlaps the given bytes of `arena`."""
    return any(item.arena == arena and item.overlaps(offset, nbytes) for item in lost)


class HostMetadata:
    """Reads and writes the records of one metadata arena."""

    def __init__(self, arena: Arena):
        self._arena = arena

    def latest(self, kind: Kind) -> Record | None:
        """The valid record of `kind` (EPOCH, PROMOTION or LIFE) with the highest sequence number."""
        found = [self._arena.record(records.BYTES * (_FIRST[kind] + slot), kind) for slot in (0, 1)]
        return max((record for record in found if record is not None), key=lambda record: record.sequence, default=None)

    def write(self, point: Point, record: Record) -> None:
        """Replaces the record of a kind, in both places: so a damaged one never brings back what was true before.

        Crash: the previous record still counts, or the new one does.
        """
        before = self.latest(record.kind)
        record = dataclasses.replace(record, sequence=before.sequence + 1 if before else 1)
        offsets = [records.BYTES * (_FIRST[record.kind] + slot) for slot in (0, 1)]
        # The place of the record that counts goes last.
        for offset in sorted(offsets, key=lambda offset: self._arena.record(offset, record.kind) == before):
            self._arena.store_record(point, offset, record)

    @property
    def epoch(self) -> int:
        record = self.latest(Kind.EPOCH)
        return record.epoch if record else 0

    def raise_epoch(self, *peers: HostMetadata) -> int:
        """The next epoch of this rank and its peers, stored before a promoted process may map anything: higher than any of them has.

        Crash: some ranks have it and some do not; the next one is higher than both.
        """
        ranks = (self, *peers)
        epoch = max(rank.epoch for rank in ranks) + 1
        for rank in ranks:
            rank.write(Point.EPOCH, Record(Kind.EPOCH, epoch=epoch))
        return epoch

    def add_lost(self, lost: LostRange) -> None:
        """Notes a lost range, before anything is done about it. Raises UnrecoverableError when the list is full."""
        for slot in range(LOST_SLOTS):
            record = self._lost(slot)
            if record is None or not record.body[4]:
                body = (int(lost.arena == "host"), lost.offset, lost.offset >> 32, lost.nbytes, 1, lost.nbytes >> 32)
                self._arena.store_record(Point.LOST, self._slot(slot), Record(Kind.LOST, index=slot, body=body))
                return
        raise UnrecoverableError(f"lost ranges: expected at most {LOST_SLOTS}, found more; too much memory is gone to repair in place")

    def lost(self) -> list[LostRange]:
        """Ranges that were noted and not yet cleared."""
        found = [self._lost(slot) for slot in range(LOST_SLOTS)]
        return [
            LostRange("host" if r.body[0] else "device", r.body[1] | r.body[2] << 32, r.body[3] | r.body[5] << 32)
            for r in found
            if r is not None and r.body[4]
        ]

    def clear_lost(self) -> None:
        """Forgets all lost ranges, once they are repaired or rewritten."""
        for slot in range(LOST_SLOTS):
            record = self._lost(slot)
            if record is not None and record.body[4]:
                self._arena.store_record(Point.LOST_CLEAR, self._slot(slot), Record(Kind.LOST, index=slot))

    def _slot(self, slot: int) -> int:
        return records.BYTES * (6 + slot)

    def _lost(self, slot: int) -> Record | None:
        return self._arena.record(self._slot(slot), Kind.LOST)
