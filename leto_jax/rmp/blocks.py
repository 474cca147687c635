"""A guard block: parity rows, page checksums, and the record without which it does not count.

The record says the version of the data that the block guards, and a checksum of the checksums in the same form, so that a device can make it
by itself. It is voided first and stored last: what was cut short, lost or damaged is not there.
"""

from __future__ import annotations

import numpy as np

from leto_jax.arena.memory import Arena
from leto_jax.layout import BlockForm, Piece
from leto_jax.records import Kind, Record
from leto_jax.rmp import checksum

CURRENT = 1  # the first word of a block's record; 0: void


def void_record(piece: Piece) -> Record:
    """The record of a block that does not count."""
    return Record(Kind.VERSION, index=piece.index)


def unsealed_record(piece: Piece, version: int) -> Record:
    """`seal_record` of a block whose page checksums are all zero, which a device completes (`rmu.placed.seal`)."""
    return Record(Kind.VERSION, step=version, index=piece.index, body=(CURRENT, 0, 0))


def seal_record(piece: Piece, version: int, checksums: np.ndarray) -> Record:
    """The record of a complete block: version of the data, and the checksum of the page checksums (uint32[pages, 2]) as if they were a page."""
    first, second = checksum.page_checksums_np(np.ascontiguousarray(checksums).reshape(1, -1))[0]
    return Record(Kind.VERSION, step=version, index=piece.index, body=(CURRENT, int(first), int(second)))


def checksums(arena: Arena, offset: int, form: BlockForm) -> np.ndarray:
    """Page checksums of the block at `offset`: uint32[pages, 2]."""
    return arena.array(offset + form.sums_offset, (form.pages, 2), np.dtype(np.uint32))


def parity(arena: Arena, offset: int, form: BlockForm) -> np.ndarray:
    """Parity rows of the block at `offset`: uint8[rows, row_bytes]."""
    return arena.view(offset, form.sums_offset).reshape(form.rows, form.row_bytes)


def valid(arena: Arena, offset: int, form: BlockForm, piece: Piece) -> Record | None:
    """The record of the block at `offset` if the block counts: complete, of this piece, checksums undamaged."""
    record = arena.record(offset + form.record_offset, Kind.VERSION)
    if record is None or record.body[0] != CURRENT or record.index != piece.index:
        return None
    return record if record.body == seal_record(piece, record.step, checksums(arena, offset, form)).body else None
