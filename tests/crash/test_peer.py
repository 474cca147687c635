"""What the second tier is for: more pages lost than the rank's own parity rebuilds, or its own parity lost. And when it does not count."""

from __future__ import annotations

import functools
import threading
import time

import harness
import numpy as np
import pytest
from harness import PAGE, World, check, crash_at, life, lose, promote, take_over, variant

from leto_jax.errors import DeadlineError, TooManyErasuresError, UnrecoverableError
from leto_jax.faults import Point
from leto_jax.layout import Piece
from leto_jax.rmp.peer import Parcel, PeerTier, Sender

COMMIT = 2


@functools.cache
def trained() -> tuple[bytes, ...]:
    v = variant("peer")
    with World(v.layout) as world:
        life(v, world, COMMIT)
        return world.content()


@functools.cache
def behind() -> tuple[bytes, ...]:
    """The trainer died when the first parity row of step 3 was about to go: what the peer has is of step 2."""
    v = variant("peer")
    with World(v.layout, trained()) as world:
        crash_at(lambda: life(v, world, COMMIT + 1), Point.PEER_FLUX)
        return world.content()


def region(v: harness.Variant, world: World, arena: str, name: str) -> None:
    found = v.layout.by_name[name]
    lose(world, arena, found.offset, found.nbytes)


def pages(v: harness.Variant, world: World, piece: Piece, count: int, commit: int) -> None:
    """Loses the same page of the first `count` rows of a piece."""
    for row in range(count):
        lose(world, "device", v.layout.address(piece, commit) + row * piece.row_bytes, PAGE, row)


def pieces(v: harness.Variant) -> list[Piece]:
    return [*(v.layout.pieces_of_chunk[index][0] for index in (0, -1)), v.layout.read_only_pieces[0]]


@pytest.mark.parametrize("staged", [True, False])
def test_both_tiers_together_rebuild_what_neither_could(staged):
    v = variant("peer")
    for piece in pieces(v):
        with World(v.layout, trained()) as world:
            if not staged:
                region(v, world, "device", "staging")
            pages(v, world, piece, 2, COMMIT)
            assert take_over(v, world).repaired_pages == 2
            check(v, world, COMMIT)


def test_lost_local_parity_is_replaced_by_that_of_the_peer():
    v = variant("peer")
    for piece in pieces(v):
        with World(v.layout, trained()) as world:
            region(v, world, "device", "staging")
            region(v, world, "host", "parity")
            pages(v, world, piece, 1, COMMIT)
            assert take_over(v, world).repaired_pages == 1
            check(v, world, COMMIT)


def test_what_the_peer_has_of_an_older_step_does_not_count():
    v = variant("peer")
    for piece in pieces(v)[:2]:
        with World(v.layout, behind()) as world:
            region(v, world, "device", "staging")
            pages(v, world, piece, 1, COMMIT + 1)
            assert take_over(v, world).repaired_pages == 1  # by its own parity
            check(v, world, COMMIT + 1)
        with World(v.layout, behind()) as world:
            region(v, world, "device", "staging")
            pages(v, world, piece, 2, COMMIT + 1)
            with pytest.raises(TooManyErasuresError, match="2 of 4 pages are lost, parity rebuilds at most 1"):
                take_over(v, world)
        with World(v.layout, behind()) as world:
            region(v, world, "device", "staging")
            region(v, world, "host", "parity")
            pages(v, world, piece, 1, COMMIT + 1)
            with pytest.raises(UnrecoverableError, match="no parity of step 3 exists"):
                take_over(v, world)


def test_a_peer_that_has_started_anew_is_filled_again():
    v = variant("peer")
    with World(v.layout, trained()) as world:
        arenas = world.map()
        assert arenas.peer is not None
        arenas.peer.damage(0, np.zeros(v.layout.peer_bytes, np.uint8))
        arenas.close()
        process = promote(v, world)
        process.attach()
        tier, transaction = process.retained.guard.peer, process.transaction
        assert tier is not None
        has = lambda commit: {piece.chunk is None for piece in v.layout.pieces if tier.has(piece, transaction.version(piece, commit))}
        assert has(COMMIT) == {True}  # what no step will send
        process.train(COMMIT + 1)
        assert all(tier.has(piece, transaction.version(piece, COMMIT + 1)) for piece in v.layout.pieces)
        process.close()
        check(v, world, COMMIT + 1)


class SlowTier(PeerTier):
    """A peer that takes a parcel when it is told to."""

    def __init__(self):
        self.stored: list[int] = []
        self.gate = threading.Semaphore(0)

    def store(self, parcel: Parcel) -> None:
        assert self.gate.acquire(timeout=10)
        if parcel.version < 0:
            raise OSError("the peer has hung up")
        self.stored.append(parcel.version)


def parcels(version: int) -> list[Parcel]:
    return [Parcel(variant("peer").layout.pieces[0], version, np.zeros(0, np.uint8), np.zeros(0, np.uint32))]


def test_newer_parity_takes_the_place_of_what_has_not_begun_to_go():
    tier = SlowTier()
    sender = Sender(tier)
    begin = time.monotonic_ns()
    for version in (1, 2, 3, 4):
        sender.offer(parcels(version), begin)
        while version == 1 and sender._next:
            time.sleep(0.001)
    with pytest.raises(DeadlineError, match=r"the peer did not take it within 0 s"):
        sender.wait(0.05)
    assert sender.stale_ns > 0
    tier.gate.release(2)
    sender.wait(10)
    assert tier.stored == [1, 4]
    stale = sender.stale_ns
    time.sleep(0.01)
    assert sender.stale_ns == stale  # the peer is current


def test_a_peer_that_does_not_take_parity_is_behind_and_nobody_else_is_hurt(capfd):
    tier = SlowTier()
    sender = Sender(tier)
    sender.offer(parcels(-1), time.monotonic_ns())
    tier.gate.release()
    sender.wait(10)
    assert "hung up" in sender.problem
    behind = sender.stale_ns
    time.sleep(0.01)
    assert sender.stale_ns > behind
    tier.gate.release()
    sender.offer(parcels(7), time.monotonic_ns())  # it is back
    sender.close()
    assert (tier.stored, sender.problem) == ([7], "")
    assert capfd.readouterr().err.count("training goes on without it") == 1


def test_parcels_of_other_pieces_stay_on_their_way():
    tier = SlowTier()
    sender = Sender(tier)
    first, second = (parcels(version)[0] for version in (1, 2))
    other = second._replace(piece=variant("peer").layout.pieces[1])
    sender.offer([first], 1)
    while sender._next:
        time.sleep(0.001)
    sender.offer([other], 1)
    sender.offer([first._replace(version=3)], 1)
    tier.gate.release(3)
    sender.close()
    assert sorted(tier.stored) == [1, 2, 3]
