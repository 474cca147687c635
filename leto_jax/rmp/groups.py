"""Protection groups of one rank: parity and page checksums of every piece, in staging, in the host arena, and used for repair.

A piece's guard block is H parity rows followed by two uint32 checksums a page. Fresh blocks are staged on the device beside the data, and
drained to the host arena behind the next compute. A block counts only while its version equals the data's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from leto_jax import errors, records
from leto_jax.arena.memory import Arena
from leto_jax.faults import Point
from leto_jax.layout import Layout, Piece
from leto_jax.records import Kind, Record
from leto_jax.rmp import checksum, reference

IN_FLUX, CURRENT = 1, 0


class Guard:
    """Stages, drains, verifies and repairs the pieces of one rank."""

    def __init__(self, device: Arena, host: Arena, layout: Layout):
        self._device, self._host, self._layout = device, host, layout
        self._staging = layout.by_name["staging"].offset
        self._parity = layout.by_name["parity"].offset
        self._versions = layout.by_name["versions"].offset

    def stage(self, piece: Piece, parity: Sequence[np.ndarray], checksums: np.ndarray) -> None:
        """Stores a fresh guard block beside the data. parity: H rows; checksums: uint32[pages, 2].

        Crash: the block is void until the chunk's mark is stored.
        Cost: H/D of the piece, blocking.
        """
        offset = self._staging + piece.staging
        for row in parity:
            self._device.store(Point.STAGING, offset, np.asarray(row))
            offset += piece.row_bytes
        self._device.store(Point.STAGING, offset, np.asarray(checksums))

    def drain(self, pieces: Iterable[Piece], version: int) -> None:
        """Copies staged blocks to the host arena.

        Crash: pieces whose copy was under way are IN_FLUX; their staged block still counts.
        Cost: H/D of the pieces, blocking; called while compute runs.
        """
        for piece in pieces:
            self._note(Point.DRAIN_FLUX, piece, version, IN_FLUX)
            self._host.store(Point.DRAIN_PARITY, self._parity + piece.host, self._device.view(self._staging + piece.staging, piece.guard_bytes))
            self._note(Point.DRAIN_VERSION, piece, version, CURRENT)

    def version(self, piece: Piece) -> int | None:
        """Version of a piece's block in the host arena; None while a copy is under way or was cut short."""
        record = self._record(piece)
        return record.step if record is not None and record.body[0] == CURRENT else None

    def invalidate(self, piece: Piece) -> None:
        """Notes that a piece's host copy holds nothing: a lost page of the host arena."""
        self._note(Point.DRAIN_FLUX, piece, 0, IN_FLUX)

    def host_range(self, piece: Piece) -> tuple[int, int]:
        """(offset, nbytes) of a piece's block in the host arena."""
        return self._parity + piece.host, piece.guard_bytes

    def block(self, piece: Piece, version: int, staged: bool) -> tuple[np.ndarray, np.ndarray] | None:
        """(parity uint8[H, row_bytes], checksums uint32[pages, 2]) that belong to `version`, read-only; None if neither tier has it.

        The host copy goes first: once the next intent exists, staging may hold a later block. staged: the log says staging is of `version`.
        """
        if self.version(piece) == version:
            arena, offset = self._host, self._parity + piece.host
        elif staged:
            arena, offset = self._device, self._staging + piece.staging
        else:
            return None
        parity = arena.view(offset, piece.parity_bytes).reshape(piece.parity_rows, piece.row_bytes)
        return parity, arena.array(offset + piece.parity_bytes, (piece.pages, 2), np.dtype(np.uint32))

    def verify(self, piece: Piece, address: int, expected: np.ndarray, first: int, count: int) -> list[int]:
        """Those of `count` pages from `first` on whose checksum is not the expected one. Cost: reads the pages once, on one core."""
        words = self._device.array(address + first * piece.page_bytes, (count, piece.page_bytes // 4), np.dtype(np.uint32))
        return [first + int(page) for page in checksum.locate(expected[first : first + count], checksum.page_checksums_np(words))]

    def confirm(self, piece: Piece, address: int, suspects: Sequence[int], parity: np.ndarray) -> list[int]:
        """Those of the suspect pages of a piece that parity denies as well.

        A group that agrees with one of its parity rows is as it was encoded: then it is the checksums that are damaged, not the data.
        """
        denied = set()
        for column in {page % piece.pages_per_row for page in suspects}:
            data, rows = self._group(piece, address, column), parity[:, self._columns(piece, column)]
            if not reference.verify(data, rows).any():
                denied.add(column)
        return [page for page in suspects if page % piece.pages_per_row in denied]

    def repair(self, piece: Piece, address: int, lost: Sequence[int], parity: np.ndarray, checksums: np.ndarray) -> int:
        """Rebuilds the pages `lost` of a piece in place and checks them. Returns how many pages were rewritten.

        lost: page numbers within the piece, row by row. Raises TooManyErasuresError if a group has lost more than its parity rows,
        UnrecoverableError if the rebuilt page does not have its checksum.
        Crash: lost pages hold anything; they are still on the LOST list or fail their checksum, so the next attach rebuilds them.
        """
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

    def _record(self, piece: Piece) -> Record | None:
        found = [self._host.record(self._slot(piece, slot), Kind.VERSION) for slot in (0, 1)]
        return max((record for record in found if record is not None), key=lambda record: record.sequence, default=None)

    def _note(self, point: Point, piece: Piece, version: int, state: int) -> None:
        before = self._record(piece)
        sequence = before.sequence + 1 if before else 1
        self._host.store_record(point, self._slot(piece, sequence % 2), Record(Kind.VERSION, step=version, index=piece.index, body=(state,), sequence=sequence))

    def _slot(self, piece: Piece, slot: int) -> int:
        return self._versions + records.BYTES * (2 * piece.index + slot)
