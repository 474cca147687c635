"""Protection groups of one rank: parity and page checksums of every piece, in staging, in the host arena, with the peer, and used for repair.

Fresh guard blocks (`blocks`) are staged on the device beside the data with all parity rows; after the commit the first H1 rows are drained to
the host arena, and the others go to the peer, if there is one.
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
from leto_jax.layout import BlockForm, Layout, Piece
from leto_jax.records import Record
from leto_jax.rmp import blocks, checksum, reference
from leto_jax.rmp.peer import Parcel, PeerTier


class Block(NamedTuple):
    """What is there to repair a piece with, read-only. checksums: uint32[pages, 2]. parity(): uint8[H, row_bytes], read when it is asked for;
    the rows in `absent` are zero, no tier has them."""

    checksums: np.ndarray
    parity: Callable[[], np.ndarray]
    absent: frozenset[int] = frozenset()


class Guard:
    """Stages, drains, verifies and repairs the pieces of one rank."""

    def __init__(self, device: Arena, host: Arena, layout: Layout, peer: PeerTier | None = None):
        self._device, self._host, self._layout, self.peer = device, host, layout, peer
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
        self._device.store_record(Point.STAGING, self.record_place(piece), blocks.void_record(piece))

    def seal(self, piece: Piece, version: int, checksums: np.ndarray) -> None:
        """Says that a staged block is complete, and of which version."""
        self._device.store_record(Point.STAGING, self.record_place(piece), blocks.seal_record(piece, version, np.asarray(checksums)))

    def record_place(self, piece: Piece) -> int:
        """Byte address of a staged block's record in the device arena."""
        return self._staging + piece.staging + piece.staged.record_offset

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
            for begin, at, nbytes in piece.drained:
                self._host.store(Point.DRAIN_PARITY, target + at, self._device.view(source + begin, nbytes))
            self.end_drain(piece, staged)

    def staged(self, piece: Piece) -> Record | None:
        """The record of a piece's staged block if the block counts."""
        return blocks.valid(self._device, self._staging + piece.staging, piece.staged, piece)

    def parcels(self, pieces: Iterable[Piece], version: int) -> list[Parcel]:
        """What the peer shall have of the pieces that are staged in `version`. Cost: copies H2/D of them."""
        found = []
        for piece in pieces:
            record, offset = self.staged(piece), self._staging + piece.staging
            if record is not None and record.step == version:
                begin = offset + piece.local_rows * piece.row_bytes
                rows = self._device.view(begin, piece.peered.sums_offset).reshape(piece.peered.rows, -1).copy()
                found.append(Parcel(piece, version, rows, blocks.checksums(self._device, offset, piece.staged).copy()))
        return found

    def begin_drain(self, piece: Piece) -> int:
        """Voids the host copy of a piece's block; returns where it lies in the host arena."""
        target = self._parity + piece.host
        self._host.store_record(Point.DRAIN_FLUX, target + piece.hosted.record_offset, blocks.void_record(piece))
        return target

    def end_drain(self, piece: Piece, staged: Record) -> None:
        """The block has arrived: from here the host copy counts."""
        self._host.store_record(Point.DRAIN_VERSION, self._parity + piece.host + piece.hosted.record_offset, staged)

    def version(self, piece: Piece) -> int | None:
        """Version of a piece's block in the host arena; None if there is no valid one."""
        record = blocks.valid(self._host, self._parity + piece.host, piece.hosted, piece)
        return record.step if record is not None else None

    def invalidate(self, piece: Piece, staged: bool, host: bool) -> None:
        """Voids a piece's blocks, where a page of them is lost: nothing of them may count once the loss is forgotten."""
        if staged:
            self.void(piece)
        if host:
            self.begin_drain(piece)

    def ranges(self, piece: Piece) -> tuple[tuple[int, int], tuple[int, int]]:
        """((offset, nbytes) of a piece's block in the device arena, the same in the host arena)."""
        return (self._staging + piece.staging, piece.staged.nbytes), (self._parity + piece.host, piece.hosted.nbytes)

    def block(self, piece: Piece, version: int) -> Block | None:
        """What the tiers have that belongs to `version`; None if none of them has anything."""
        hosted = self._host, self._parity + piece.host, piece.hosted
        staged = self._device, self._staging + piece.staging, piece.staged
        local, peer = self._current(*hosted, piece, version), self.peer
        if peer is not None and not peer.has(piece, version):
            peer = None
        if local and not piece.peered.rows:
            return Block(blocks.checksums(*hosted), functools.partial(blocks.parity, *hosted))
        if not (local and peer) and self._current(*staged, piece, version):
            return Block(blocks.checksums(*staged), functools.partial(blocks.parity, *staged))
        first, second = range(piece.local_rows), range(piece.local_rows, piece.parity_rows)
        if not local and peer is None:
            return None
        zeros = lambda rows: np.zeros((len(rows), piece.row_bytes), np.uint8)

        def parity() -> np.ndarray:
            mine, theirs = blocks.parity(*hosted) if local else zeros(first), peer.parity(piece, version) if peer else zeros(second)
            return np.concatenate([mine, theirs])

        checksums = blocks.checksums(*hosted) if local or peer is None else peer.checksums(piece, version)
        return Block(checksums, parity, frozenset((*(() if local else first), *(() if peer else second))))

    def _current(self, arena: Arena, offset: int, form: BlockForm, piece: Piece, version: int) -> bool:
        record = blocks.valid(arena, offset, form, piece)
        return record is not None and record.step == version

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
        parity, checksums, most = block.parity(), block.checksums, piece.parity_rows - len(block.absent)
        columns: dict[int, list[int]] = {}
        for page in lost:
            columns.setdefault(page % piece.pages_per_row, []).append(page // piece.pages_per_row)
        rewritten = 0
        for column, rows in sorted(columns.items()):
            if len(rows) > most:
                raise errors.TooManyErasuresError(
                    f"piece {piece.index}, group {column}: {len(rows)} of {self._layout.spec.protection.data_rows} pages are lost, parity rebuilds at most {most}; "
                    "restore from a checkpoint"
                )
            data = self._group(piece, address, column)
            rebuilt = self._rebuild(piece, data, rows, parity[:, self._columns(piece, column)], checksums, column, block.absent)
            for row, content in zip(rows, rebuilt, strict=True):
                self._device.store(Point.REPAIR_PAGE, address + row * piece.row_bytes + column * piece.page_bytes, content)
                rewritten += 1
        return rewritten

    def _columns(self, piece: Piece, column: int) -> slice:
        return slice(column * piece.page_bytes, (column + 1) * piece.page_bytes)

    def _group(self, piece: Piece, address: int, column: int) -> np.ndarray:
        """A copy of the data pages of one group: uint8[D, page_bytes]."""
        return self._device.view(address, piece.nbytes).reshape(-1, piece.row_bytes)[:, self._columns(piece, column)].copy()

    def _rebuild(self, piece, data, rows, parity, checksums, column, absent) -> list[np.ndarray]:
        """Rebuilt rows, ascending. Tries every choice of parity rows: parity carries no checksum, a damaged row shows in the rebuilt page's."""
        there = [row for row in range(piece.parity_rows) if row not in absent]
        for spare in itertools.combinations(there, len(there) - len(rows)):
            without = sorted({*spare, *absent})
            pages, _ = reference.reconstruct(data, parity, rows, without)
            sums = checksum.page_checksums_np(np.ascontiguousarray(pages).view(np.uint32))
            expected = checksums[[row * piece.pages_per_row + column for row in rows]]
            if np.array_equal(sums, expected):
                return list(pages)
        raise errors.UnrecoverableError(
            f"piece {piece.index}, group {column}: rebuilt pages of rows {rows} do not have their checksums; data and parity are damaged together, restore from a checkpoint"
        )
