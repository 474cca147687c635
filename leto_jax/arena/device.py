"""Retained memory of a GPU: segments of device memory that the state manager owns, mapped one after the other.

What the host stores and reads goes through the driver, and waits for the programs that were queued before. What programs write goes through
donated views (`views.view`), and counts once a record says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from leto_jax import faults, records
from leto_jax.arena import cuda
from leto_jax.arena.memory import Arena
from leto_jax.faults import Moment, Point
from leto_jax.layout import round_up

SEGMENT_BYTES = 1 << 30
SCRATCH_BYTES = 64 << 20


class Renewal(Protocol):
    """Makes memory in the place of segment `number` of `nbytes`: a context that gives its descriptor, and what makes it the segment for good."""

    def __call__(self, number: int, nbytes: int) -> AbstractContextManager[tuple[int, Callable[[], None]]]: ...


class DeviceArena(Arena):
    """`nbytes` of device memory behind descriptors, mapped read-write for one device. Owns the mapping, not the descriptors.

    renewal: gives new memory for a segment, see `Renewal`; None where lost memory cannot be replaced. settle: waits until every program that
    was queued is done; `rmu.device` sets it, since only the queue knows.
    """

    def __init__(self, ordinal: int, segments: Sequence[tuple[int, int]], nbytes: int, name: str, renewal: Renewal | None = None):
        self.name, self.nbytes, self.ordinal, self._renewal = name, nbytes, ordinal, renewal
        self.mapping = cuda.Mapping(ordinal, segments)
        self.settle: Callable[[], None] = lambda: None

    @property
    def address(self) -> int:
        return self.mapping.address

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        self.settle()
        found = np.empty(nbytes, np.uint8)
        if nbytes:
            self.mapping.read(offset, found)
        found.flags.writeable = False
        return found

    def store_record(self, point: Point, offset: int, record: records.Record) -> None:
        data = np.frombuffer(record.pack(), np.uint8)
        hook = faults.store_hook()
        if hook is None:
            self._write(offset, data)
            return
        hook(point, Moment.BEFORE, records.BYTES)
        self._write(offset, data[:56])
        hook(point, Moment.TORN, records.BYTES)
        self._write(offset + 56, data[56:])
        hook(point, Moment.AFTER, records.BYTES)

    def renew(self, lost: Sequence[tuple[int, int]]) -> None:
        """New segments at the same addresses for those with lost bytes: the good granules are copied, then the name goes to the new memory, then
        the addresses.

        Crash: a segment is the old one or the new one, as a whole, and what is lost is still on the LOST list.
        Cost: copies each segment once at memory bandwidth, half a millisecond per GiB.
        """
        if self._renewal is None:
            return
        self.settle()
        unit, begin = cuda.granularity(self.ordinal), 0
        for number, nbytes in enumerate(self.mapping.sizes):
            holes = [
                (max(at, begin) - begin, min(at + size, begin + nbytes) - begin)
                for at, size in lost
                if at < begin + nbytes and begin < at + size
            ]
            if holes:
                with self._renewal(number, nbytes) as (fd, confirm):
                    self.mapping.renew(number, fd, good_ranges(nbytes, unit, holes), confirm)
            begin += nbytes

    def wipe(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Sets all of it to zero: fresh device memory holds whatever was there. Cost: at memory bandwidth."""
        self.settle()
        self.mapping.clear(0, self.nbytes)

    def damage(self, offset: int, data: np.ndarray) -> None:
        self._write(offset, np.ascontiguousarray(data).reshape(-1).view(np.uint8))

    def close(self) -> None:
        """Unmaps. No view may live any more, no program may run: for scratch memory; what trains keeps its mapping until it dies."""
        self.settle()
        self.mapping.close()

    def _write(self, offset: int, data: np.ndarray) -> None:
        self.settle()
        if data.size:
            self.mapping.write(offset, np.ascontiguousarray(data))


def good_ranges(nbytes: int, unit: int, holes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(offset, bytes) of what is left of a segment without the granules of `unit` bytes that the holes (begin, end) touch."""
    good, at = [], 0
    for begin, end in sorted((begin // unit * unit, round_up(end, unit)) for begin, end in holes):
        if begin > at:
            good.append((at, begin - at))
        at = max(at, end)
    if at < nbytes:
        good.append((at, nbytes - at))
    return good


def segment_sizes(nbytes: int, unit: int, segment_bytes: int = SEGMENT_BYTES) -> list[int]:
    """Sizes of the segments that hold `nbytes`: whole segments, and a last one in multiples of `unit`."""
    whole, rest = divmod(nbytes, segment_bytes)
    return [segment_bytes] * whole + ([round_up(rest, unit)] if rest else [])
