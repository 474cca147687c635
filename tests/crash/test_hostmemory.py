"""Whole copies in host memory: complete or absent wherever the process dies, and never restored with a byte that is not as it was stored."""

from __future__ import annotations

import itertools
import os

import jax.numpy as jnp
import numpy as np
import pytest

from leto_jax import errors, faults
from leto_jax.arena.memory import HostArena
from leto_jax.checkpoint import hostmemory, keeper
from leto_jax.checkpoint.frozen import GROUPS, Form, Frozen
from leto_jax.checkpoint.hostmemory import HostMemory
from leto_jax.faults import Point
from leto_jax.layout import LeafSpec

SPECS = {
    "params": [LeafSpec("['w']", (33, 7), "float32", "float32"), LeafSpec("['b']", (5,), "bfloat16", "bfloat16"), LeafSpec("['e']", (0,), "float32", "float32")],
    "opt_state": [LeafSpec("[0].count", (), "int32", "int32"), LeafSpec("[0].mu", (33, 7), "float32", "float32")],
    "companions": [],
    "extras": [LeafSpec("['seen']", (), "uint8", "uint8")],
}  # fmt: skip


class Killed(BaseException):
    pass


@pytest.fixture
def form() -> Form:
    import jax

    return Form(SPECS, {name: jax.tree_util.tree_structure(list(range(len(specs)))) for name, specs in SPECS.items()})


def memory(form: Form, names: list[str]) -> list[HostArena]:
    arenas = []
    for name in names:
        fd = os.memfd_create(name)
        os.ftruncate(fd, hostmemory.nbytes(form))
        arenas.append(HostArena(fd, hostmemory.nbytes(form), name))
        os.close(fd)
    return arenas


@pytest.fixture
def tier(form):
    arenas = memory(form, hostmemory.names(0))
    yield HostMemory(form, arenas)
    for arena in arenas:
        arena.close()


@pytest.fixture
def with_peer(form):
    arenas, theirs = memory(form, hostmemory.names(0)), memory(form, hostmemory.names(0, 1))
    yield HostMemory(form, arenas, {1: theirs})
    for arena in arenas + theirs:
        arena.close()


def state(step: int) -> Frozen:
    rng = np.random.default_rng(step)
    leaves = {
        name: [np.asarray(rng.integers(0, 200, spec.shape)).astype(jnp.dtype(spec.dtype)) for spec in specs]
        for name, specs in SPECS.items()
    }
    return Frozen(step, leaves, (b"position %d" % step,))


def save(tier: HostMemory, step: int) -> None:
    kept = state(step)
    tier.begin(step, kept.leaves.__getitem__, kept.positions[0])()


def is_state(found: Frozen, step: int) -> bool:
    wanted = state(step)
    same = all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for name in GROUPS
        for a, b in zip(found.leaves[name], wanted.leaves[name], strict=True)
    )
    return same and (found.step, found.positions) == (step, wanted.positions)


def test_two_generations_in_turn(tier):
    assert tier.versions() == []
    for step in range(1, 6):
        save(tier, step)
        assert tier.versions() == [step, step - 1][: min(step, 2)]
        assert all(is_state(tier.restore(version), version) for version in tier.versions())


@pytest.mark.parametrize("fixture", ["tier", "with_peer"])
def test_a_crash_at_every_store_leaves_the_last_copy_or_the_new_one(fixture, request):
    """Before, inside and after each store of a copy, and of the one that goes to a peer."""
    tier = request.getfixturevalue(fixture)
    save(tier, 1)
    save(tier, 2)
    fired: set[Point] = set()
    for number in itertools.count():
        crossings = itertools.count()

        def hook(point, moment, nbytes, crossings=crossings, number=number):
            fired.add(point)
            if next(crossings) == number:
                raise Killed
            return True

        try:
            with faults.armed(hook):
                save(tier, 3)
        except Killed:
            found = tier.versions()
            assert found in ([2, 1], [2], [3, 2], [3, 2, 1])  # the last: the peer still has the old one
            assert all(is_state(load(), version) for version, _, load in tier.copies())
            continue
        break
    assert number > 3 * 5
    assert fired == {point for point in Point if point.startswith("copy_")}
    assert tier.versions() == [3, 2]


def test_every_damaged_region_is_noticed(tier, form, seed):
    """One byte of each 16 of a generation, changed: what is restored is a copy as it was stored, the older one or nothing."""
    rng, older = np.random.default_rng(seed), 0
    for offset in range(0, hostmemory.nbytes(form), 16):
        place = offset + int(rng.integers(16))
        for step in (1, 2):
            save(tier, step)
        arena = next(arena for arena in tier._arenas if hostmemory._record(arena).step == 2)
        arena.damage(place, arena.view(place, 1) ^ np.uint8(1 << rng.integers(8)))
        found = keeper.newest(form, tier, [])
        assert found is not None
        assert is_state(found[0], found[0].step)
        older += found[0].step == 1
        if offset > 4096 and offset < hostmemory.nbytes(form) - 4096:  # between header and data nothing is kept
            continue
        for arena in tier._arenas:  # both void again
            arena.damage(0, np.zeros(64, np.uint8))
    assert older >= 64


def test_what_is_lost_is_taken_from_the_peer(with_peer, form, capsys):
    """Both own copies damaged; then all of the own memory gone."""
    for step in (1, 2):
        save(with_peer, step)
    assert [(step, where) for step, where, _ in with_peer.copies()] == [
        (2, "host memory"), (2, "host memory of rank 1"), (1, "host memory"), (1, "host memory of rank 1")
    ]  # fmt: skip
    for arena in with_peer._arenas:
        arena.damage(hostmemory.nbytes(form) - 64 * 4, np.full(200, 255, np.uint8))
    found, where = keeper.newest(form, with_peer, [])
    assert (is_state(found, 2), where) == (True, "host memory of rank 1")
    assert "leto: checkpoint 2 in host memory is passed over: CheckpointError: " in capsys.readouterr().err
    for arena in with_peer._arenas:
        arena.damage(0, np.zeros(hostmemory.nbytes(form), np.uint8))
    found, where = keeper.newest(form, with_peer, [])
    assert (is_state(found, 2), where) == (True, "host memory of rank 1")


def test_a_peer_that_does_not_take_a_copy_leaves_the_own_one(with_peer, form, monkeypatch):
    save(with_peer, 1)
    monkeypatch.setattr(with_peer._peers[1][1], "store", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save(with_peer, 2)
    assert [(step, where) for step, where, _ in with_peer.copies()] == [
        (2, "host memory"),
        (1, "host memory"),
        (1, "host memory of rank 1"),
    ]
    assert is_state(with_peer.restore(2), 2)


@pytest.mark.parametrize(
    ("ranks", "copies", "kept_by"), [(1, 1, [[]]), (2, 2, [[1], [0]]), (4, 1, [[]] * 4), (4, 3, [[1, 2], [2, 3], [3, 0], [0, 1]])]
)
def test_who_keeps_whose_copies(ranks, copies, kept_by):
    assert [hostmemory.peers(rank, ranks, copies) for rank in range(ranks)] == kept_by


def test_both_damaged_is_no_copy(tier, form, capsys):
    save(tier, 1)
    save(tier, 2)
    for arena in tier._arenas:
        arena.damage(hostmemory.nbytes(form) - 64 * 4, np.full(200, 255, np.uint8))
    assert keeper.newest(form, tier, []) is None
    err = capsys.readouterr().err
    assert (
        "checkpoint 2 in host memory is passed over: CheckpointError: params['" in err
        or "checkpoint 2 in host memory is passed over" in err
    )
    assert "checkpoint 1 in host memory is passed over" in err


def test_a_copy_of_another_model_is_refused_by_name(tier, form):
    save(tier, 1)
    other = dict(SPECS, extras=[LeafSpec("['seen']", (), "int8", "int8")])
    with pytest.raises(
        errors.LayoutError,
        match=r"the copy of step 1 in host memory holds extras\['seen'\]: uint8\[\], this script has extras\['seen'\]: int8\[\]",
    ):
        HostMemory(Form(other, form.trees), tier._arenas).restore(1)
