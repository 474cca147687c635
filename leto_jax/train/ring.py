"""The ring of batches: what the data position was before each of the last steps, and the batch itself when it is small.

An entry is complete (record stored last, with the payload's checksum) before the step's compute is dispatched; so a step that is
redone by another process gets the very same batch.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np

from leto_jax import errors, records
from leto_jax.arena.memory import Arena
from leto_jax.faults import Point
from leto_jax.layout import RING_ENTRIES, Layout, Packed
from leto_jax.records import Kind, Record


@dataclasses.dataclass(frozen=True)
class Entry:
    """position: of the iterator before the batch. digest: CRC-32 of the batch. leaves: the batch, None if it was too large to keep."""

    position: bytes
    digest: int
    leaves: list[np.ndarray] | None


class Ring:
    """Entries in the host arena, keyed by step."""

    def __init__(self, host: Arena, layout: Layout):
        self._host, self._layout = host, layout
        self._batch = Packed(layout.spec.batch)
        region = layout.by_name["ring"]
        self._base, self._entry_bytes = region.offset, region.nbytes // RING_ENTRIES
        self._keeps = self._batch.nbytes <= layout.spec.ring_batch_limit

    def put(self, step: int, position: bytes, leaves: Sequence[np.ndarray]) -> None:
        """Stores the entry of `step` over that of `step - 4`. leaves: in storage form, as planned.

        Raises UsageError if the iterator's position is larger than the plan's room for it.
        Crash: the entry of `step - 4`, or none; never a half one.
        Cost: one pass of CRC-32 over the batch and one copy, blocking, outside the time in which compute runs.
        """
        limit = self._layout.spec.ring_iterator_bytes
        if len(position) > limit:
            raise errors.UsageError(f"dataset: expected an iterator state of at most {limit} bytes, found {len(position)}")
        batch = np.zeros(self._batch.nbytes, np.uint8)
        for offset, spec, leaf in zip(self._batch.offsets, self._batch.leaves, leaves, strict=True):
            batch[offset : offset + spec.nbytes] = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        digest = zlib.crc32(batch)
        payload = np.concatenate([np.frombuffer(position, np.uint8), batch if self._keeps else batch[:0]])
        offset = self._offset(step)
        self._host.store(Point.RING_PAYLOAD, offset + records.BYTES, payload)
        body = (len(position), digest, int(self._keeps), zlib.crc32(payload))
        self._host.store_record(Point.RING_RECORD, offset, Record(Kind.RING, step=step, body=body))

    def mark(self, step: int, position: bytes) -> None:
        """Notes where the data stands after `step`, without a batch: for a state that was filled from a checkpoint of that step.

        Crash: as `put`; the fill that follows is not complete yet.
        """
        payload = np.frombuffer(position, np.uint8)
        self._host.store(Point.RING_PAYLOAD, self._offset(step) + records.BYTES, payload)
        body = (len(position), 0, 0, zlib.crc32(payload))
        self._host.store_record(Point.RING_RECORD, self._offset(step), Record(Kind.RING, step=step, body=body))

    def get(self, step: int) -> Entry | None:
        """The entry of `step`, or None if it is not (or no longer) there, or damaged."""
        offset = self._offset(step)
        record = self._host.record(offset, Kind.RING)
        if record is None or record.step != step:
            return None
        length, digest, kept, crc = record.body[:4]
        payload = self._host.view(offset + records.BYTES, length + (self._batch.nbytes if kept else 0))
        if zlib.crc32(payload) != crc:
            return None
        leaves = None
        if kept:
            import jax.numpy as jnp  # dtypes such as bfloat16 by name

            leaves = [
                payload[length + o : length + o + s.nbytes].copy().view(jnp.dtype(s.dtype)).reshape(s.shape)
                for o, s in zip(self._batch.offsets, self._batch.leaves, strict=True)
            ]
        return Entry(payload[:length].tobytes(), digest, leaves)

    def digest(self, leaves: Sequence[np.ndarray]) -> int:
        """The digest that `put` would store for a batch."""
        batch = np.zeros(self._batch.nbytes, np.uint8)
        for offset, spec, leaf in zip(self._batch.offsets, self._batch.leaves, leaves, strict=True):
            batch[offset : offset + spec.nbytes] = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
        return zlib.crc32(batch)

    def _offset(self, step: int) -> int:
        return self._base + step % RING_ENTRIES * self._entry_bytes
