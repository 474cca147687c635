"""Protection groups of one rank: parity and page checksums of every piece, in staging, in the host arena, and used for repair.

A piece's guard block is H parity rows, two uint32 checksums a page, and a record: the version of the data that it guards, and a checksum of
the checksums, in the same form (`seal_record`; a device makes it by itself). Fresh blocks are staged on the device beside the data, and drained to the host arena after the commit. A block counts
only with a valid record of the data's version: what was cut short, lost or damaged is not there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from leto_jax import errors
from leto_jax.arena.memory import Arena
from leto_jax.faults import Point
from leto_jax.layout import Layout, Piece
from leto_jax.records import Kind, Record
from leto_jax.rmp import checksum, reference

CURRENT = 1  # the first word of a block's record; 0: void


class Block(NamedTuple):
    """A guard block, read-only. checksums: uint32[pages, 2]. parity(): uint8[H, row_bytes], read when it is asked for."""

    checksums: np.ndarray
    parity: Callable[[], np.ndarray]


class Guard:
    """Stages, drains, verifies and repairs the pieces of one rank."""

    def __init__(self, device: Arena, host: Arena, layout: Layout):
        self._device, self._host, self._layout = device, host, layout
        self._staging = layout.by_name["staging"].offset
        self._parity = layout.by_name["parity"].offset

    def stage(self, piece: Piece, parity: Sequence[np.ndarray], checksums: np.ndarray, version: int) -> None:
        """Stores a fresh guard block beside the data. parity: H rows; checksums: uint32[pages, 2]; version: of the data.

        Crash: the block is void until its record is stored.
        Cost: H/D of the piece, blocking.
        """
        self.void(piece)
        offset = self._staging + piece.staging
        for part in (*parity, checksums):
            part = np.asarray(part)
            self._device.store(Point.STAGING, offset, part)
            offset += part.nbytes
        self.seal(piece, version, checksums)

    def void(self, piece: Piece) -> None:
        """Says that a staged block does not count: it is about to be written, or a page of it is lost."""
        self._device.store_record(Point.STAGING, self.record_place(piece), void_record(piece))

    def seal(self, piece: Piece, version: int, checksums: np.ndarray) -> None:
        """Says that a staged block is complete, and of which version."""
        self._device.store_record(Point.STAGING, self.record_place(piece), seal_record(piece, version, np.asarray(checksums)))

    def record_place(self, piece: Piece) -> int:
        """Byte address of a staged block's record in the device arena."""
        return self._staging + piece.staging + piece.record_offset

    def drain(self, pieces: Iterable[Piece], version: int) -> None:
        """Copies staged blocks of `version` to the host arena; leaves out those that are not of this version.

        Crash: the host copy of the piece under way is void; its staged block still counts.
        Cost: H/D of the pieces, blocking.
        """
        for piece in pieces:
            staged = self.staged(piece)
            if staged is None or staged.step != version:
                continue
            source, target = self._staging + piece.staging, self.begin_drain(piece)
            self._host.store(Point.DRAIN_PARITY, target, self._device.view(source, piece.record_offset))
            self.end_drain(piece, staged)

    def staged(self, piece: Piece) -> Record | None:
        """The record of a piece's staged block if the block counts."""
        return self._valid(self._device, self._staging + piece.staging, piece)

    def begin_drain(self, piece: Piece) -> int:
        """Voids the host copy of a piece's block; returns where it lies in the host arena."""
        target = self._parity + piece.host
        self._host.store_record(Point.DRAIN_FLUX, target + piece.record_offset, void_record(piece))
        return target

    def end_drain(self, piece: Piece, staged: Record) -> None:
        """The block has arrived: from here the host copy counts."""
        self._host.store_record(Point.DRAIN_VERSION, self._parity + piece.host + piece.record_offset, staged)

    def version(self, piece: Piece) -> int | None:
        """Version of a piece's block in the host arena; None if there is no valid one."""
        record = self._valid(self._host, self._parity + piece.host, piece)
        return record.step if record is not None else None

    def invalidate(self, piece: Piece, staged: bool, host: bool) -> None:
        """Voids a piece's blocks, where a page of them is lost: nothing of them may count once the loss is forgotten."""
        if staged:
            self.void(piece)
        if host:
            self.begin_drain(piece)

    def ranges(self, piece: Piece) -> tuple[tuple[int, int], tuple[int, int]]:
        """((offset, nbytes) of a piece's block in the device arena, the same in the host arena)."""
        return (self._staging + piece.staging, piece.guard_bytes), (self._parity + piece.host, piece.guard_bytes)

    def block(self, piece: Piece, version: int) -> Block | None:
        """The block that belongs to `version`, from the tier that has it; None if neither has."""
        for arena, offset in ((self._host, self._parity + piece.host), (self._device, self._staging + piece.staging)):
            record = self._valid(arena, offset, piece)
            if record is not None and record.step == version:
                return Block(self._checksums(arena, offset, piece), functools.partial(_parity, arena, offset, piece))
        return None

    def verify(self, piece: Piece, address: int, expected: np.ndarray, first: int, count: int) -> list[int]:
        """Those of `count` pages from `first` on whose checksum is not the expected one. Cost: reads the pages once, on one core."""
        words = self._device.array(address + first * piece.page_bytes, (count, piece.page_bytes // 4), np.dtype(np.uint32))
        return [first + int(page) for page in checksum.locate(expected[first : first + count], checksum.page_checksums_np(words))]

    def repair(self, piece: Piece, address: int, lost: Sequence[int], block: Block) -> int:
        """Rebuilds the pages `lost` of a piece in place and checks them. Returns how many pages were rewritten.

        lost: page numbers within the piece, row by row. Raises TooManyErasuresError if a group has lost more than its parity rows,
        UnrecoverableError if the rebuilt page does not have its checksum.
        Crash: lost pages hold anything; they are still on the LOST list or fail their checksum, so the next attach rebuilds them.
        """
        parity, checksums = block.parity(), block.checksums
        columns: dict[int, list[int]] = {}
        for page in lost:
            columns.setdefault(page % piece.pages_per_row, []).append(page // piece.pages_per_row)
        rewritten = 0
        for column, rows in sorted(columns.items()):
            if len(rows) > piece.parity_rows:
                raise errors.TooManyErasuresError(
                    f"piece {piece.index}, group {column}: {len(rows)} of {self._layout.spec.protection.data_rows} pages are lost, parity rebuilds at most {piece.parity_rows}; "
                    "restore from a checkpoint"
                )
            data = self._group(piece, address, column)
            rebuilt = self._rebuild(piece, data, rows, parity[:, self._columns(piece, column)], checksums, column)
            for row, content in zip(rows, rebuilt, strict=True):
                self._device.store(Point.REPAIR_PAGE, address + row * piece.row_bytes + column * piece.page_bytes, content)
                rewritten += 1
        return rewritten

    def _columns(self, piece: Piece, column: int) -> slice:
        return slice(column * piece.page_bytes, (column + 1) * piece.page_bytes)

    def _group(self, piece: Piece, address: int, column: int) -> np.ndarray:
        """A copy of the data pages of one group: uint8[D, page_bytes]."""
        return self._device.view(address, piece.nbytes).reshape(-1, piece.row_bytes)[:, self._columns(piece, column)].copy()

    def _rebuild(self, piece, data, rows, parity, checksums, column) -> list[np.ndarray]:
        """Rebuilt rows, ascending. Tries every choice of parity rows: parity carries no checksum, a damaged row shows in the rebuilt page's."""
        spare = piece.parity_rows - len(rows)
        for without in itertools.combinations(range(piece.parity_rows), spare):
            pages, _ = reference.reconstruct(data, parity, rows, without)
            sums = checksum.page_checksums_np(np.ascontiguousarray(pages).view(np.uint32))
            expected = checksums[[row * piece.pages_per_row + column for row in rows]]
            if np.array_equal(sums, expected):
                return list(pages)
        raise errors.UnrecoverableError(
            f"piece {piece.index}, group {column}: rebuilt pages of rows {rows} do not have their checksums; data and parity are damaged together, restore from a checkpoint"
        )

    def _valid(self, arena: Arena, offset: int, piece: Piece) -> Record | None:
        """The record of a block if the block counts: complete, of this piece, checksums undamaged."""
        record = arena.record(offset + piece.record_offset, Kind.VERSION)
        if record is None or record.body[0] != CURRENT or record.index != piece.index:
            return None
        return record if record.body == seal_record(piece, record.step, self._checksums(arena, offset, piece)).body else None

    def _checksums(self, arena: Arena, offset: int, piece: Piece) -> np.ndarray:
        return arena.array(offset + piece.parity_bytes, (piece.pages, 2), np.dtype(np.uint32))


def _parity(arena: Arena, offset: int, piece: Piece) -> np.ndarray:
    return arena.view(offset, piece.parity_bytes).reshape(piece.parity_rows, piece.row_bytes)


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
