"""Retained memory of a GPU: segments of device memory that the state manager owns, mapped one after the other.

What the host stores and reads goes through the driver, and waits for the programs that were queued before. What programs write goes through
donated views (`views.target`), and counts once a record says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from leto_jax import faults, records
from leto_jax.arena import cuda
from leto_jax.arena.memory import Arena
from leto_jax.faults import Moment, Point

SEGMENT_BYTES = 1 << 30
SCRATCH_BYTES = 64 << 20


class DeviceArena(Arena):
    """`nbytes` of device memory behind descriptors, mapped read-write for one device. Owns the mapping, not the descriptors.

    settle: waits until every program that was queued is done; `rmu.device` sets it, since only the queue knows.
    """

    def __init__(self, ordinal: int, segments: Sequence[tuple[int, int]], nbytes: int, name: str):
        self.name, self.nbytes, self.ordinal = name, nbytes, ordinal
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


def segment_sizes(nbytes: int, unit: int, segment_bytes: int = SEGMENT_BYTES) -> list[int]:
    """Sizes of the segments that hold `nbytes`: whole segments, and a last one in multiples of `unit`."""
    whole, rest = divmod(nbytes, segment_bytes)
    return [segment_bytes] * whole + ([-(-rest // unit) * unit] if rest else [])
