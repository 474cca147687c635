"""Guard blocks: staged, drained, versioned; pages found by their checksums and rebuilt, also when a parity row or the checksums are damaged."""

from __future__ import annotations

import itertools
import os
import re

import numpy as np
import pytest

from leto_jax import faults
from leto_jax import layout as layouts
from leto_jax.arena.memory import HostArena
from leto_jax.config import Protection
from leto_jax.errors import TooManyErasuresError, UnrecoverableError
from leto_jax.faults import Moment, Point
from leto_jax.layout import JobSpec, LeafSpec, Piece, SignatureSpec
from leto_jax.rmp import checksum, reference
from leto_jax.rmp.groups import Block, Guard

SEED, PAGE, ROWS = 9, 512, 4


class Stop(BaseException):
    pass


class Bench:
    """Two arenas with random data, three chunks of one lane, two groups a piece; every piece encoded and staged as of version 0."""

    def __init__(self, parity: int = 2):
        size = 3 * ROWS * 2 * PAGE // 4
        spec = JobSpec(
            params=(LeafSpec("['w']", (size,), "float32"), LeafSpec("['frozen']", (300,), "float32")),
            read_only=(1,),
            signatures=(SignatureSpec("s", "f", (("param", "float32"),), None, True, (0,), (((size,),),)),),
            constants=(), shared=(), values=(), extras=(), metrics=(), batch=(),
            protection=Protection(ROWS, parity, 0, PAGE, ROWS * 2 * PAGE),
        )  # fmt: skip
        self.layout = layouts.plan(spec)
        assert len(self.layout.chunks) == 3
        self.device, self.host = (self._arena(nbytes) for nbytes in (self.layout.device_bytes, self.layout.host_bytes))
        rng = np.random.default_rng(SEED)
        for name in ("lanes", "read_only"):
            region = self.layout.by_name[name]
            self.device.damage(region.offset, rng.integers(0, 256, region.nbytes, np.uint8))
        self.guard = Guard(self.device, self.host, self.layout)
        for piece in self.layout.pieces:
            self.stage(piece)

    def _arena(self, nbytes: int) -> HostArena:
        fd = os.memfd_create("bench")
        os.ftruncate(fd, nbytes)
        made = HostArena(fd, nbytes, "bench")
        os.close(fd)
        return made

    def address(self, piece: Piece) -> int:
        return self.layout.address(piece, 0)

    def data(self, piece: Piece) -> np.ndarray:
        return self.device.view(self.address(piece), piece.nbytes).copy()

    def encoded(self, piece: Piece) -> tuple[np.ndarray, np.ndarray]:
        data = self.data(piece)
        return reference.encode(data.reshape(ROWS, -1), piece.parity_rows), checksum.page_checksums_np(
            data.view(np.uint32).reshape(piece.pages, -1)
        )

    def stage(self, piece: Piece, version: int = 0) -> None:
        self.guard.stage(piece, *self.encoded(piece), version)

    def hurt(self, piece: Piece, pages: list[int], seed: int = 1) -> None:
        for page in pages:
            noise = np.random.default_rng([seed, page]).integers(0, 256, PAGE, np.uint8)
            self.device.damage(self.address(piece) + page * PAGE, noise)

    def close(self) -> None:
        self.device.close()
        self.host.close()


def made(parity: np.ndarray, checksums: np.ndarray) -> Block:
    return Block(checksums, lambda: parity)


def both(block: Block | None) -> tuple[np.ndarray, np.ndarray]:
    """(parity, checksums) of a block that must be there."""
    assert block is not None
    return block.parity(), block.checksums


@pytest.fixture
def bench():
    made = Bench()
    yield made
    made.close()


def pages(piece: Piece, column: int, rows: tuple[int, ...]) -> list[int]:
    return [row * piece.pages_per_row + column for row in rows]


# Tiers and versions ---------------------------------------------------------------------------------------------------------------------


def test_a_block_counts_in_the_tier_that_has_its_version(bench):
    piece = bench.layout.pieces[1]
    parity, sums = bench.encoded(piece)
    assert bench.guard.version(piece) is None
    for drained in (False, True):
        if drained:
            bench.guard.drain([piece], 0)
            bench.guard.invalidate(piece, staged=True, host=False)
        found = both(bench.guard.block(piece, 0))
        assert np.array_equal(found[0], parity)
        assert np.array_equal(found[1], sums)
        assert not found[0].flags.writeable
        assert not found[1].flags.writeable
        assert bench.guard.block(piece, 1) is None
    assert bench.guard.version(piece) == 0
    # Staging may hold a later block already; the two do not get in each other's way.
    bench.hurt(piece, [0])
    bench.stage(piece, 1)
    for version, want in ((0, sums), (1, bench.encoded(piece)[1])):
        assert np.array_equal(both(bench.guard.block(piece, version))[1], want)
    bench.guard.invalidate(piece, staged=False, host=True)
    assert bench.guard.version(piece) is None
    assert bench.guard.block(piece, 0) is None
    assert bench.guard.block(piece, 1) is not None


def test_only_the_version_that_is_asked_for_is_drained(bench):
    first, second = bench.layout.pieces[:2]
    bench.stage(second, 1)
    bench.guard.drain([first, second], 0)
    assert (bench.guard.version(first), bench.guard.version(second)) == (0, None)


def test_a_block_of_another_piece_does_not_count(bench):
    first, second = bench.layout.pieces[:2]
    bench.guard.drain([first, second], 0)
    (_, (here, nbytes)), (_, (there, _)) = bench.guard.ranges(first), bench.guard.ranges(second)
    bench.host.damage(here, bench.host.view(there, nbytes).copy())
    assert (bench.guard.version(first), bench.guard.version(second)) == (None, 0)


@pytest.mark.parametrize("moment", list(Moment))
def test_a_block_that_is_staged_only_in_part_does_not_count(bench, moment):
    piece = bench.layout.pieces[0]
    old = bench.encoded(piece)
    bench.hurt(piece, [3])
    new = bench.encoded(piece)
    for stop in itertools.count():
        bench.guard.stage(piece, *old, 0)
        seen = itertools.count()

        def hook(point, when, nbytes, seen=seen, stop=stop):
            if when is moment and next(seen) == stop:
                raise Stop
            return True

        try:
            with faults.armed(hook):
                bench.guard.stage(piece, *new, 7)
            break
        except Stop:
            pass
        for version, want in ((0, old), (7, new)):
            block = bench.guard.block(piece, version)
            assert block is None or all(np.array_equal(a, b) for a, b in zip(both(block), want, strict=True)), (stop, version)
    assert stop == 5, "void, two parity rows, checksums, record"


@pytest.mark.parametrize("moment", list(Moment))
def test_a_drain_that_is_cut_short_never_shows_a_version_that_is_not_there(bench, moment):
    pieces = bench.layout.pieces[:2]
    bench.guard.drain(pieces, 0)
    old = {piece.index: bench.encoded(piece) for piece in pieces}
    for piece in pieces:
        bench.hurt(piece, [3])
        bench.stage(piece, 7)
    new = {piece.index: bench.encoded(piece) for piece in pieces}
    before = bench.host.view(0, bench.host.nbytes).copy()
    met = set()
    for stop in itertools.count():
        seen = itertools.count()

        def hook(point, when, nbytes, seen=seen, stop=stop):
            if when is moment and next(seen) == stop:
                raise Stop
            return True

        bench.host.damage(0, before)
        try:
            with faults.armed(hook):
                bench.guard.drain(pieces, 7)
            ended = True
        except Stop:
            ended = False
        after = Guard(bench.device, bench.host, bench.layout)
        for piece in pieces:
            version = after.version(piece)
            met.add(version)
            if version is not None:
                block = after.block(piece, version)
                assert block is not None
                want = {0: old, 7: new}[version][piece.index]
                assert all(np.array_equal(a, b) for a, b in zip(both(block), want, strict=True)), (stop, version)
        # And whoever drains again makes it good.
        after.drain(pieces, 7)
        assert all(after.version(piece) == 7 for piece in pieces)
        if ended:
            break
    assert stop == 6, "three stores a piece"
    assert met == {None, 0, 7}


def test_a_damaged_record_or_checksum_shows_no_block(bench):
    """Every bit of the record, and of the checksums that it vouches for."""
    piece = bench.layout.pieces[0]
    bench.guard.drain([piece], 0)
    bench.guard.invalidate(piece, staged=True, host=False)
    (_, _), (base, _) = bench.guard.ranges(piece)
    for begin, nbytes, stride in ((base + piece.hosted.record_offset, 64, 1), (base + piece.hosted.sums_offset, 8 * piece.pages, 7)):
        before = bench.host.view(begin, nbytes).copy()
        for bit in range(0, 8 * nbytes, stride):
            damaged = before.copy()
            damaged[bit // 8] ^= 1 << bit % 8
            bench.host.damage(begin, damaged)
            assert bench.guard.version(piece) is None
            assert bench.guard.block(piece, 0) is None
        bench.host.damage(begin, before)
    assert bench.guard.version(piece) == 0


# Finding and repairing ------------------------------------------------------------------------------------------------------------------


def test_verify_names_the_damaged_pages_of_the_range_that_it_reads(bench):
    piece = bench.layout.pieces[2]
    _, sums = bench.encoded(piece)
    assert bench.guard.verify(piece, bench.address(piece), sums, 0, piece.pages) == []
    bench.hurt(piece, [1, 4, 7])
    assert bench.guard.verify(piece, bench.address(piece), sums, 0, piece.pages) == [1, 4, 7]
    assert bench.guard.verify(piece, bench.address(piece), sums, 2, 4) == [4]
    assert bench.guard.verify(piece, bench.address(piece), sums, 5, 2) == []


@pytest.mark.parametrize("parity", [1, 2, 3])
def test_every_set_of_lost_pages_that_parity_can_rebuild(parity):
    bench = Bench(parity)
    piece = bench.layout.pieces[1]
    before, block = bench.data(piece), bench.encoded(piece)
    for count in range(1, parity + 1):
        for rows in itertools.combinations(range(ROWS), count):
            for columns in ((0,), (1,), (0, 1)):
                lost = sorted(page for column in columns for page in pages(piece, column, rows))
                bench.hurt(piece, lost)
                assert bench.guard.verify(piece, bench.address(piece), block[1], 0, piece.pages) == lost
                assert bench.guard.repair(piece, bench.address(piece), lost, made(*block)) == len(lost)
                assert np.array_equal(bench.data(piece), before)
    bench.close()


@pytest.mark.parametrize("parity", [1, 2, 3])
def test_one_page_too_many_is_an_error_that_says_so(parity):
    bench = Bench(parity)
    piece = bench.layout.pieces[1]
    block = bench.encoded(piece)
    for rows in itertools.combinations(range(ROWS), parity + 1):
        text = f"piece 1, group 1: {parity + 1} of 4 pages are lost, parity rebuilds at most {parity}; restore from a checkpoint"
        with pytest.raises(TooManyErasuresError, match=re.escape(text)):
            bench.guard.repair(piece, bench.address(piece), pages(piece, 1, rows), made(*block))
    bench.close()


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("row", range(ROWS))
def test_with_two_parity_rows_a_damaged_one_is_found_out(bench, row, damaged):
    """Parity carries no checksum of its own; the rebuilt page does."""
    piece = bench.layout.pieces[0]
    before, (parity, sums) = bench.data(piece), bench.encoded(piece)
    parity[damaged] = np.random.default_rng(SEED).integers(0, 256, parity.shape[1], np.uint8)
    lost = pages(piece, 0, (row,))
    bench.hurt(piece, lost)
    assert bench.guard.repair(piece, bench.address(piece), lost, made(parity, sums)) == 1
    assert np.array_equal(bench.data(piece), before)


def test_with_no_parity_to_spare_a_damaged_row_is_an_error_that_says_so():
    for parity_rows, rows in ((1, (2,)), (2, (0, 3))):
        bench = Bench(parity_rows)
        piece = bench.layout.pieces[0]
        parity, sums = bench.encoded(piece)
        parity[-1] ^= 1
        lost = pages(piece, 0, rows)
        bench.hurt(piece, lost)
        before = bench.data(piece)
        text = f"piece 0, group 0: rebuilt pages of rows {list(rows)} do not have their checksums; data and parity are damaged together, restore from a checkpoint"
        with pytest.raises(UnrecoverableError, match=re.escape(text)):
            bench.guard.repair(piece, bench.address(piece), lost, made(parity, sums))
        assert np.array_equal(bench.data(piece), before), "nothing is stored that is not right"
        bench.close()


def test_two_pages_of_a_group_damaged_alike_are_damaged(bench):
    """XOR parity agrees with them; their checksums do not, and those are vouched for."""
    piece = bench.layout.pieces[0]
    before, block = bench.data(piece), bench.encoded(piece)
    for page in pages(piece, 1, (0, 2)):
        offset = bench.address(piece) + page * PAGE
        bench.device.damage(offset, bench.device.view(offset, PAGE) ^ np.uint8(77))
    assert reference.verify(bench.data(piece).reshape(ROWS, -1), block[0])[0]
    lost = bench.guard.verify(piece, bench.address(piece), block[1], 0, piece.pages)
    assert lost == pages(piece, 1, (0, 2))
    bench.guard.repair(piece, bench.address(piece), lost, made(*block))
    assert np.array_equal(bench.data(piece), before)


def test_a_repair_that_dies_is_repeated(bench):
    piece = bench.layout.pieces[0]
    before, block = bench.data(piece), bench.encoded(piece)
    lost = sorted(pages(piece, 0, (0, 1)) + pages(piece, 1, (2,)))
    for stop in range(9):
        bench.hurt(piece, lost, seed=stop)
        seen = itertools.count()

        def hook(point, moment, nbytes, seen=seen, stop=stop):
            assert point is Point.REPAIR_PAGE
            if next(seen) == stop:
                raise Stop
            return True

        with pytest.raises(Stop), faults.armed(hook):
            bench.guard.repair(piece, bench.address(piece), lost, made(*block))
        suspects = bench.guard.verify(piece, bench.address(piece), block[1], 0, piece.pages)
        assert set(suspects) <= set(lost)
        bench.guard.repair(piece, bench.address(piece), suspects, made(*block))
        assert np.array_equal(bench.data(piece), before)


def test_read_only_pieces_are_guarded_like_any_other(bench):
    piece = bench.layout.read_only_pieces[0]
    bench.guard.drain([piece], 0)
    before = bench.data(piece)
    block = both(bench.guard.block(piece, 0))
    bench.hurt(piece, [0, piece.pages - 1])
    lost = bench.guard.verify(piece, bench.address(piece), block[1], 0, piece.pages)
    bench.guard.repair(piece, bench.address(piece), lost, made(*block))
    assert np.array_equal(bench.data(piece), before)
