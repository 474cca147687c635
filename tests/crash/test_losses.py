"""Pages lost or corrupted in every region at every interesting moment: the state is right to the bit, or an error says why not. Never wrong.

The two tables are the contract. A column is what the trainer left, between commit 1 and the drain of commit 2; a row is what the fault
took meanwhile. A cell is the outcome:

    =  rolled forward or computed again, bit-identical            V  the intent was revoked, then computed again, bit-identical
    M  bit-identical, but the metrics of the last step unknown    X  TooManyErasuresError        U  UnrecoverableError
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import re
from collections.abc import Callable

import harness
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    PAGE,
    STEPS,
    Incarnation,
    World,
    check,
    crash,
    crash_at,
    crossings,
    damage,
    life,
    lose,
    picture_at,
    promote,
    take_over,
    variant,
)

from leto_jax import layout as layouts
from leto_jax import records
from leto_jax.arena.metadata import LOST_SLOTS, LostRange
from leto_jax.errors import TooManyErasuresError, UnrecoverableError
from leto_jax.faults import Moment, Point
from leto_jax.layout import Piece
from leto_jax.records import Kind, Record
from leto_jax.rmu.recovery import Action

SEED = 77


def _rest(v: harness.Variant) -> tuple[bytes, ...]:
    with World(v.layout) as world:
        life(v, world, 1)
        return world.content()


# Step 2 is even: its order is descending, so the last chunk is written first.
MOMENTS: dict[str, Callable[[harness.Variant], tuple[bytes, ...]]] = {
    "rest": _rest,
    "compute": lambda v: picture_at(v, 2, Point.GRADIENTS),
    "intent": lambda v: picture_at(v, 2, Point.INTENT, number=1),
    "flight": lambda v: picture_at(v, 2, Point.STAGING, Moment.TORN, 3),
    "marks": lambda v: picture_at(v, 2, Point.MARK, number=2 * (len(v.layout.chunks) // 2) - 1),
    "last": lambda v: picture_at(v, 2, Point.COMMIT, Moment.BEFORE),
    "commit": lambda v: picture_at(v, 2, Point.COMMIT, number=1),
    "drain": lambda v: picture_at(v, 2, Point.DRAIN_PARITY, Moment.TORN, 5),
}


@functools.cache
def left(v: harness.Variant, moment: str) -> tuple[bytes, ...]:
    return MOMENTS[moment](v)


def committed(moment: str) -> int:
    return 2 if moment in ("commit", "drain") else 1


def marked(v: harness.Variant, moment: str) -> set[int]:
    order = list(v.layout.order(2))
    return set(order[: {"marks": len(order) // 2, "last": len(order)}.get(moment, 0)])


def place(v: harness.Variant, moment: str, piece: Piece) -> int:
    """Where the live copy of a piece lies."""
    return v.layout.address(piece, committed(moment) + (piece.chunk in marked(v, moment)))


# Faults: (variant, moment) -> ranges (arena, offset, nbytes) ----------------------------------------------------------------------------

Ranges = list[tuple[str, int, int]]
FIRST, LAST = -1, 0  # chunks as update 2 writes them


def data(chunk: int, lane: int, pages: int) -> Callable[[harness.Variant, str], Ranges]:
    """The first `pages` pages of one group of a piece; counted from H: 0 is H pages, 1 is one more than parity rebuilds."""

    def ranges(v, moment):
        piece = v.layout.pieces_of_chunk[chunk][lane]
        rows = 1 if pages < 0 else piece.parity_rows + pages
        column = (piece.pages_per_row - 1) * PAGE
        return [("device", place(v, moment, piece) + row * piece.row_bytes + column, PAGE) for row in range(rows)]

    return ranges


def gap(v, moment) -> Ranges:
    """A page of a lane in which no live piece lies."""
    lane = v.layout.signatures[-1].lanes[0]
    live = [(place(v, moment, piece), piece.nbytes) for piece in v.layout.pieces]
    for offset in range(lane.offset, lane.offset + lane.span_bytes, PAGE):
        if all(offset + PAGE <= begin or begin + nbytes <= offset for begin, nbytes in live):
            return [("device", offset, PAGE)]
    raise AssertionError("no page of the gap is free")


def gradients(chunk: int) -> Callable[[harness.Variant, str], Ranges]:
    def ranges(v, moment):
        number, where = v.layout.chunks[chunk]
        return [("device", v.layout.signatures[number].grad.at(where.start, 1), PAGE)]

    return ranges


def region(name: str, copy: int | None = None) -> Callable[[harness.Variant, str], Ranges]:
    """A whole region. copy: 0 for the one of the last commit, 1 for the one of the next step."""

    def ranges(v, moment):
        full = name if copy is None else f"{name}{(committed(moment) + copy) % 2}"
        found = v.layout.by_name[full]
        return [(found.arena, found.offset, found.nbytes)]

    return ranges


def guard(tier: str, chunk: int, begin: Callable[[Piece], int], nbytes: Callable[[Piece], int]) -> Callable[[harness.Variant, str], Ranges]:
    """A part of a parameter piece's guard block, in staging or in the host arena."""

    def ranges(v, moment):
        piece = v.layout.pieces_of_chunk[chunk][0]
        base = piece.staging if tier == "staging" else piece.host
        found = v.layout.by_name["staging" if tier == "staging" else "parity"]
        return [(found.arena, found.offset + base + begin(piece), nbytes(piece))]

    return ranges


def versions(v, moment) -> Ranges:
    found = v.layout.by_name["parity"]
    return [("host", found.offset + piece.host + piece.hosted.record_offset, records.BYTES) for piece in v.layout.pieces]


def read_only(v, moment) -> Ranges:
    return [("device", v.layout.read_only_pieces[0].offset, PAGE)]


def batches(v, moment) -> Ranges:
    """The end of each entry's payload: bytes of a batch. The records stay."""
    found, size = v.layout.by_name["ring"], layouts.Packed(v.layout.spec.batch).nbytes
    entry = found.nbytes // layouts.RING_ENTRIES
    return [
        ("host", found.offset + number * entry + records.BYTES + len(b"position 1") + size - 64, 64)
        for number in range(layouts.RING_ENTRIES)
    ]


def both(*several: Callable[[harness.Variant, str], Ranges]) -> Callable[[harness.Variant, str], Ranges]:
    return lambda v, moment: [item for ranges in several for item in ranges(v, moment)]


ROW = lambda piece: PAGE
START = lambda piece: 0
SUMS = lambda piece: piece.hosted.sums_offset
SUM_BYTES = lambda piece: 8 * piece.pages

FAULTS = {
    "parameter page, first chunk": data(FIRST, 0, -1),
    "parameter page, last chunk": data(LAST, 0, -1),
    "moment page, first chunk": data(FIRST, 1, -1),
    "moment page, last chunk": data(LAST, 2, -1),
    "H pages of a group, first": data(FIRST, 0, 0),
    "H pages of a group, last": data(LAST, 1, 0),
    "H + 1 pages of a group, first": data(FIRST, 0, 1),
    "H + 1 pages of a group, last": data(LAST, 0, 1),
    "gap page": gap,
    "read-only page": read_only,
    "gradients of the first chunk": gradients(FIRST),
    "gradients of the last chunk": gradients(LAST),
    "gradient header": region("gradient_header"),
    "one log": region("log0"),
    "the other log": region("log1"),
    "both logs": both(region("log0"), region("log1")),
    "active scalars": region("scalars", 0),
    "active extras": region("extras", 0),
    "active metrics": region("metrics", 0),
    "next scalars": region("scalars", 1),
    "next extras": region("extras", 1),
    "next metrics": region("metrics", 1),
    "staged parity, first chunk": guard("staging", FIRST, START, ROW),
    "staged parity, last chunk": guard("staging", LAST, START, ROW),
    "staged checksums, first": guard("staging", FIRST, SUMS, SUM_BYTES),
    "staged checksums, last": guard("staging", LAST, SUMS, SUM_BYTES),
    "all of staging": region("staging"),
    "host parity, first chunk": guard("host", FIRST, START, ROW),
    "host checksums, last chunk": guard("host", LAST, SUMS, SUM_BYTES),
    "all host parity": region("parity"),
    "all parity versions": versions,
    "ring": region("ring"),
    "batches in the ring": batches,
    "host parity and gradients": both(region("parity"), gradients(LAST)),
    "host parity and staging": both(region("parity"), region("staging")),
}

# fmt: off
LOST = """
                               rest compute intent flight marks last commit drain
parameter page, first chunk      =     =      =      =      =     =     =     =
parameter page, last chunk       =     =      =      =      =     =     =     =
moment page, first chunk         =     =      =      =      =     =     =     =
moment page, last chunk          =     =      =      =      =     =     =     =
H pages of a group, first        =     =      =      =      =     =     =     =
H pages of a group, last         =     =      =      =      =     =     =     =
H + 1 pages of a group, first    X     X      X      X      X     X     X     X
H + 1 pages of a group, last     X     X      X      X      X     X     X     X
gap page                         =     =      =      =      =     =     =     =
read-only page                   =     =      =      =      =     =     =     =
gradients of the first chunk     =     =      V      V      =     =     =     =
gradients of the last chunk      =     =      V      V      U     =     =     =
gradient header                  =     =      V      V      U     =     =     =
one log                          =     =      =      =      =     =     =     =
the other log                    =     =      =      =      =     =     =     =
both logs                        U     U      U      U      U     U     U     U
active scalars                   U     U      =      =      =     =     U     U
active extras                    U     U      =      =      =     =     U     U
active metrics                   M     M      =      =      =     =     M     M
next scalars                     =     =      V      V      U     U     =     =
next extras                      =     =      V      V      U     U     =     =
next metrics                     =     =      V      V      M     M     =     =
staged parity, first chunk       =     =      =      =      =     =     =     =
staged parity, last chunk        =     =      =      =      =     =     =     =
staged checksums, first          =     =      =      =      =     =     =     =
staged checksums, last           =     =      =      =      =     =     =     =
all of staging                   =     =      =      =      =     =     =     =
host parity, first chunk         =     =      =      =      =     =     =     =
host checksums, last chunk       =     =      =      =      =     =     =     =
all host parity                  =     =      =      =      =     =     =     =
all parity versions              =     =      =      =      =     =     =     =
ring                             =     =      =      =      =     =     =     =
batches in the ring              =     =      =      =      =     =     =     =
host parity and gradients        =     =      V      V      U     =     =     =
host parity and staging          =     =      =      =      =     =     =     =
"""

# Nobody says what is damaged: checksums must. A guard block whose own checksums are damaged does not count.
CORRUPTED = """
                               rest compute intent flight marks last commit drain
parameter page, first chunk      =     =      =      =      =     =     =     =
parameter page, last chunk       =     =      =      =      =     =     =     =
moment page, first chunk         =     =      =      =      =     =     =     =
moment page, last chunk          =     =      =      =      =     =     =     =
H pages of a group, first        =     =      =      =      =     =     =     =
H pages of a group, last         =     =      =      =      =     =     =     =
H + 1 pages of a group, first    X     X      X      X      X     X     X     X
H + 1 pages of a group, last     X     X      X      X      X     X     X     X
gap page                         =     =      =      =      =     =     =     =
read-only page                   =     =      =      =      =     =     =     =
gradients of the first chunk     =     =      V      V      =     =     =     =
gradients of the last chunk      =     =      V      V      U     =     =     =
gradient header                  =     =      V      V      U     =     =     =
one log                          =     =      =      =      =     =     =     =
the other log                    =     =      =      =      =     =     =     =
both logs                        U     U      U      U      U     U     U     U
active scalars                   U     U      =      =      =     =     U     U
active extras                    U     U      =      =      =     =     U     U
active metrics                   M     M      =      =      =     =     M     M
next scalars                     =     =      V      V      U     U     =     =
next extras                      =     =      V      V      U     U     =     =
next metrics                     =     =      V      V      M     M     =     =
staged parity, first chunk       =     =      =      =      =     =     =     =
staged parity, last chunk        =     =      =      =      =     =     =     =
staged checksums, first          =     =      =      =      =     =     =     =
staged checksums, last           =     =      =      =      =     =     =     =
all of staging                   =     =      =      =      =     =     =     =
host parity, first chunk         =     =      =      =      =     =     =     =
host checksums, last chunk       =     =      =      =      =     =     =     =
all host parity                  =     =      =      =      =     =     =     =
all parity versions              =     =      =      =      =     =     =     =
ring                             =     =      =      =      =     =     =     =
batches in the ring              =     =      =      =      =     =     =     =
host parity and gradients        =     =      V      V      U     =     =     =
host parity and staging          =     =      =      =      =     =     =     =
"""
# fmt: on


TEXTS = {
    "X": r"piece \d+, group \d+: [1-4] of 4 pages are lost, parity rebuilds at most [12]; restore from a checkpoint",
    "U": r".*; the retained state is kept, restore from a checkpoint or stop the job with `leto stop`|"
    r"piece \d+: \d+ pages are lost and no parity of step \d exists; not repairable here, restore from a checkpoint|"
    r"piece \d+, group \d+: rebuilt pages of rows .* do not have their checksums; data and parity are damaged together, restore from a checkpoint",
}


def cells(table: str) -> dict[tuple[str, str], str]:
    head, *rows = table.strip("\n").splitlines()
    found = {}
    for row in rows:
        title, *outcomes = re.split(r"\s{2,}", row.strip())
        found |= {(title, moment): outcome for moment, outcome in zip(head.split(), outcomes, strict=True)}
    return found


def outcome_of(v: harness.Variant, world: World, moment: str, parity: bool = True) -> str:
    """Takes over and, where that works, trains on to the end; asserts that the state is right. The letter of the tables."""
    before, refusal = world.content(), ""
    try:
        recovered = take_over(v, world)
    except (TooManyErasuresError, UnrecoverableError) as error:
        refusal, letter = str(error), "X" if isinstance(error, TooManyErasuresError) else "U"
    if refusal:
        assert re.fullmatch(TEXTS[letter], refusal), refusal
        if "the retained state is kept" in refusal:  # refused by the plan: nothing was touched
            assert world.content()[:2] == before[:2]
        return letter
    action, unknown = recovered.plan.action, bool(recovered.plan.unknown_metrics)
    assert committed(moment) <= recovered.commit <= committed(moment) + (action is Action.ROLL_FORWARD)
    check(v, world, recovered.commit, padding=False, metrics=not unknown, parity=parity)
    if unknown:
        process = Incarnation(v, world)
        assert all(jnp.isnan(x) if jnp.issubdtype(x.dtype, jnp.floating) else x == 0 for x in process.retained.metrics(recovered.commit))
        process.close()
    life(v, world)
    check(v, world, STEPS, padding=False, parity=parity)
    return "M" if unknown else "V" if action is Action.REVOKE else "="


@pytest.mark.parametrize("name", ["adamw", "bf16"])
@pytest.mark.parametrize(("act", "table"), [(lose, LOST), (damage, CORRUPTED)], ids=["lost", "corrupted"])
def test_table(name, act, table):
    v, wrong = variant(name), []
    expected = cells(table)
    assert {title for title, _ in expected} == set(FAULTS)
    for (title, moment), letter in expected.items():
        with World(v.layout, left(v, moment)) as world:
            for seed, (arena, offset, nbytes) in enumerate(FAULTS[title](v, moment)):
                act(world, arena, offset, nbytes, SEED + seed)
            try:
                # A corrupted parity row that nothing is rebuilt from is not noticed: parity carries no checksum of its own.
                found = outcome_of(v, world, moment, parity=act is lose or "parity" not in title)
            except Exception as exception:
                raise AssertionError(f"{name}: {title}, {moment}") from exception
            if found != letter:
                wrong.append(f"{title}, {moment}: expected {letter}, found {found}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("name", ["adamw", "bf16"])
def test_a_page_that_is_lost_with_all_of_its_guard_is_refused(name, moment):
    """Nothing is left to find out what it held: neither used as it is, nor encoded as if it were right."""
    v = variant(name)
    whole = lambda piece: piece.staged.nbytes
    for chunk in (FIRST, LAST):
        lost = both(data(chunk, 0, -1), guard("host", chunk, START, whole), guard("staging", chunk, START, whole))
        with World(v.layout, left(v, moment)) as world:
            for seed, (arena, offset, nbytes) in enumerate(lost(v, moment)):
                lose(world, arena, offset, nbytes, SEED + seed)
            text = r"piece \d+: 1 pages are lost and no parity of step \d exists; not repairable here, restore from a checkpoint"
            for _ in range(2):  # the next one must not see less than the first
                with pytest.raises(UnrecoverableError, match=text):
                    take_over(v, world)


def test_refusals_say_why():
    """Each reason of the tables, word for word."""
    v = variant("adamw")
    for title, moment, text in [
        ("both logs", "rest", "rank 0: both log copies have lost pages; the"),
        (
            "active extras",
            "compute",
            "commit 1 on all ranks, no intent for step 2; rank 0: extras of commit 1 are lost and kept nowhere else; the",
        ),
        ("gradients of the last chunk", "marks", "rank 0: gradients of chunk 0 are lost, and a part of update 2 is already in place; the"),
        (
            "gradient header",
            "marks",
            "rank 0: gradients are of None, the intent of (2, 1), and a part of update 2 is already in place; the",
        ),
        (
            "next scalars",
            "last",
            "rank 0: scalars of step 2 do not match the intent's digest, and a part of update 2 is already in place; the",
        ),
    ]:
        with World(v.layout, left(v, moment)) as world:
            for arena, offset, nbytes in FAULTS[title](v, moment):
                lose(world, arena, offset, nbytes)
            with pytest.raises(UnrecoverableError, match="^" + re.escape(text)):
                take_over(v, world)


# Anywhere -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "bf16"])
@pytest.mark.parametrize("act", [lose, damage], ids=["lost", "corrupted"])
def test_a_few_pages_anywhere(name, act):
    """One to three neighbouring pages, wherever they lie: as large granules would be lost, across leaves, pieces and regions."""
    v, found, rng = variant(name), collections.Counter(), random.Random(f"{SEED} {name} {act.__name__}")
    print(f"seed {SEED}")
    for run in range(60):
        moment, pages = rng.choice(list(MOMENTS)), rng.randint(1, 3)
        arena, size = rng.choice(
            [("device", v.layout.device_bytes), ("device", v.layout.device_bytes), ("host", v.layout.by_name["ring"].offset)]
        )
        offset = rng.randrange(0, size - pages * PAGE, PAGE if act is lose else 4)
        with World(v.layout, left(v, moment)) as world:
            act(world, arena, offset, pages * PAGE, run)
            try:
                found[outcome_of(v, world, moment, parity=act is lose)] += 1
            except Exception as exception:
                raise AssertionError(f"{name}, run {run}: {moment}, {pages} pages at {arena} {offset}") from exception
    print(found)
    assert found["="] > 30


def storms(name: str, runs: int, seed: int) -> collections.Counter:
    """A crash anywhere, pages lost anywhere, crashes in the takeovers, more pages lost. Counts outcomes: refused, or right at the end."""
    v, met = variant(name), collections.Counter()
    with World(v.layout) as world:
        total = len(crossings(lambda: life(v, world)))
    for run in range(runs):
        rng, schedule = random.Random(seed + run), []
        with World(v.layout) as world:
            try:
                schedule.append(crash(lambda world=world: life(v, world), int(total * rng.random())))
                for _ in range(rng.randint(1, 3)):
                    arena, size = rng.choice([("device", v.layout.device_bytes), ("host", v.layout.host_bytes)])
                    offset, pages = rng.randrange(0, size - 2 * PAGE, PAGE), rng.randint(1, 2)
                    schedule.append((arena, offset, pages))
                    lose(world, arena, offset, pages * PAGE, run)
                    if rng.random() < 0.6:
                        schedule.append(crash(lambda world=world: take_over(v, world), int(150 * rng.random() ** 2)))
                commit = take_over(v, world).commit
                if commit is not None:
                    check(v, world, commit, padding=False, metrics=False)
                life(v, world)
                check(v, world, STEPS, padding=False, metrics=commit != STEPS)
                met["right"] += 1
            except (TooManyErasuresError, UnrecoverableError) as error:
                met[type(error).__name__] += 1
            except Exception as exception:
                raise AssertionError(f"{name}, seed {seed + run}: {schedule}") from exception
    print(name, dict(met))
    return met


@pytest.mark.parametrize("name", ["adamw", "bf16"])
def test_storms_end_right_or_refused(name):
    print(f"seed {SEED}")
    assert storms(name, 40, SEED)["right"] > 25


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", harness.VARIANTS)
def test_many_storms_end_right_or_refused(name):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    assert storms(name, 600, seed)["right"] > 300


def records_of(v: harness.Variant, world: World) -> list[tuple[str, int, Record]]:
    """(arena, offset, record) of every valid record in a world."""
    arenas, found = world.map(), []
    for name in ("device", "host", "metadata_arena"):
        arena = getattr(arenas, name)
        limit = v.layout.by_name["lanes"].offset if name == "device" else arena.nbytes
        for offset in range(0, limit, records.BYTES):
            word = int.from_bytes(arena.view(offset + 4, 2).tobytes(), "little")
            if arena.view(offset, 4).tobytes() == b"LETO" and word in set(Kind):
                record = arena.record(offset, Kind(word))
                if record is not None:
                    found.append((name, offset, record))
    arenas.close()
    return found


def revoked(v: harness.Variant) -> tuple[bytes, ...]:
    """After a takeover that revoked the intent of step 2."""
    with World(v.layout, left(v, "flight")) as world:
        lose(world, *gradients(LAST)(v, "flight")[0])
        assert take_over(v, world).plan.action is Action.REVOKE
        return world.content()


def test_a_damaged_record_is_survived_and_a_damaged_fact_is_never_misread():
    """A bit of each record that a crash left, in one place; then of the same fact in all its places."""
    v, rng, met = variant("adamw"), random.Random(SEED), collections.Counter()
    print(f"seed {SEED}")
    alone: dict[Kind, set[str]] = {}
    together: dict[Kind, set[str]] = {}
    for moment in ("rest", "flight", "marks", "last", "drain", "revoked"):
        content = revoked(v) if moment == "revoked" else left(v, moment)
        with World(v.layout, content) as world:
            everything = records_of(v, world)
        for arena, offset, record in everything:
            if record.kind is Kind.VERSION and record.index % 5:
                continue
            twins = [
                (a, o)
                for a, o, other in everything
                if dataclasses.replace(other, sequence=0) == dataclasses.replace(record, sequence=0) and a == arena
            ]
            for places, outcomes in (([(arena, offset)], alone), (twins, together)):
                if places is twins and twins[0][1] != offset:
                    continue
                with World(v.layout, content) as world:
                    for a, o in places:
                        bit = rng.randrange(512)
                        arenas = world.map()
                        byte = getattr(arenas, a).view(o + bit // 8, 1) ^ np.uint8(1 << bit % 8)
                        getattr(arenas, a).damage(o + bit // 8, byte)
                        arenas.close()
                    try:
                        outcomes.setdefault(record.kind, set()).add(outcome_of(v, world, moment))
                    except Exception as exception:
                        raise AssertionError(f"{moment}: {record} at {places}") from exception
                    met[record.kind] += 1
    print({kind.name: number for kind, number in met.items()})
    assert set(met) >= {Kind.COMMIT, Kind.INTENT, Kind.MARK, Kind.GRADIENTS, Kind.VERSION, Kind.RING, Kind.EPOCH, Kind.PROMOTION, Kind.LIFE}
    assert all(outcomes == {"="} for kind, outcomes in alone.items() if kind is not Kind.GRADIENTS), alone
    assert alone[Kind.GRADIENTS] == {"=", "V", "U"}
    assert together[Kind.REVOKE] == {"V"}
    # Both places of a commit: the intent and the marks say what it was, unless the next update has begun.
    assert together[Kind.COMMIT] == {"=", "U"}
    assert together[Kind.INTENT] == {"=", "U"}
    assert together[Kind.LIFE] == {"U"}
    assert together[Kind.EPOCH] == together[Kind.PROMOTION] == together[Kind.RING] == together[Kind.VERSION] == {"="}


def test_marks_that_are_gone_do_not_make_a_chunk_be_applied_twice():
    """Both marks of chunk 2 damaged while chunk 1 is written over its old place: what is left of it is found out, not used."""
    v = variant("adamw")
    step, order = 2, list(v.layout.order(2))
    with World(v.layout, picture_at(v, step, Point.STAGING, number=2 * 15)) as world:
        process = Incarnation(v, world)
        marks = sorted(record.index for record in process.retained.log.read().marks if record.step == step)
        assert marks == sorted(order[:2])
        offsets = [process.retained.log.offset(copy, Kind.MARK, step, order[1]) for copy in (0, 1)]
        process.close()
        for offset in offsets:
            damage(world, "device", offset, records.BYTES)
        assert outcome_of(v, world, "marks") == "X"


@pytest.mark.parametrize("moment", list(Moment))
def test_an_entry_of_the_ring_is_whole_or_not_there(moment):
    """Also where the entry of four steps before is written over."""
    v, kept = variant("adamw"), layouts.RING_ENTRIES
    for last in range(1, 2 * kept + 2):
        for point in (Point.RING_PAYLOAD, Point.RING_RECORD):
            with World(v.layout) as world:
                process = Incarnation(v, world)
                put = lambda step, ring=process.ring: ring.put(step, b"position %d" % step, v.batch(step))
                for step in range(1, last):
                    put(step)
                crash_at(lambda put=put, last=last: put(last), point, moment)
                process.close()
                process = Incarnation(v, world)
                for step in range(last + 1):
                    entry = process.ring.get(step)
                    if max(0, last - kept) < step < last:
                        assert entry is not None
                    assert (
                        entry is None
                        or step > last - kept
                        or (step == last - kept and point is Point.RING_PAYLOAD and moment is Moment.BEFORE)
                    )
                    if entry is not None:
                        assert entry.position == b"position %d" % step
                        assert entry.leaves is not None
                        assert all(np.array_equal(a, b) for a, b in zip(entry.leaves, v.batch(step), strict=True))
                assert (process.ring.get(last) is not None) == ((point, moment) == (Point.RING_RECORD, Moment.AFTER))
                process.close()


def test_a_full_list_of_lost_ranges_says_so():
    v = variant("adamw")
    with World(v.layout) as world:
        metadata = world.map().metadata
        for number in range(LOST_SLOTS):
            metadata.add_lost(LostRange("host" if number % 2 else "device", number << 33, (1 << 33) + number))
        assert metadata.lost() == [LostRange("host" if n % 2 else "device", n << 33, (1 << 33) + n) for n in range(LOST_SLOTS)]
        with pytest.raises(UnrecoverableError, match=f"lost ranges: expected at most {LOST_SLOTS}, found more; too much memory is gone"):
            metadata.add_lost(LostRange("device", 0, PAGE))
        metadata.clear_lost()
        assert metadata.lost() == []


def test_pages_lost_before_the_fill_do_not_show():
    v = variant("adamw")
    with World(v.layout) as world:
        for name in ("lanes", "log0", "staging", "read_only", "scalars0"):
            lose(world, "device", v.layout.by_name[name].offset, v.layout.by_name[name].nbytes)
        seen = crossings(lambda: life(v, world))
        assert Point.LOST_CLEAR in harness.count(seen)
        check(v, world, STEPS)


# Scrub: corruption in normal running ----------------------------------------------------------------------------------------------------


def scrubbed(
    v: harness.Variant, fault: Callable[[World, Incarnation, int], None], steps: int = STEPS, at: int = 2
) -> tuple[World, list[int], collections.Counter]:
    """Trains; before step `at` the fault strikes. The world, the steps whose compute ran (a step that ran twice stands twice), the stores."""
    computed: list[int] = []

    def compute(*arguments):
        computed.append(int(arguments[-1]))
        return v.run["compute"](*arguments)

    watched = dataclasses.replace(v, run={**v.run, "compute": compute})
    world = World(v.layout)
    process = promote(watched, world)
    process.attach()

    def act() -> None:
        process.train(steps, lambda step: fault(world, process, step) if step == at else None)
        process.finish()

    seen = harness.count(crossings(act))
    process.close()
    return world, computed, seen


@pytest.mark.parametrize("name", ["adamw", "bf16"])
def test_scrub_repairs_a_corrupted_page_and_computes_again(name):
    v = variant(name)
    for title in ("parameter page, first chunk", "moment page, last chunk", "H pages of a group, last", "read-only page"):

        def fault(world: World, process: Incarnation, step: int, title=title) -> None:
            process.finish()  # compute drains first: only then is the host copy of this commit
            for arena, offset, nbytes in FAULTS[title](v, "rest"):
                damage(world, arena, offset, nbytes)

        world, computed, seen = scrubbed(v, fault)
        with world:
            assert computed == [1, 2, 2, 3], title
            assert seen[Point.REPAIR_PAGE] == 3 * len(FAULTS[title](v, "rest"))
            check(v, world, STEPS)


def test_scrub_encodes_a_damaged_guard_block_again():
    v = variant("adamw")

    def fault(world: World, process: Incarnation, step: int) -> None:
        process.finish()
        for arena, offset, nbytes in FAULTS["host checksums, last chunk"](v, "rest"):
            damage(world, arena, offset, nbytes)

    world, computed, seen = scrubbed(v, fault)
    with world:
        assert computed == [1, 2, 3]
        assert not seen[Point.REPAIR_PAGE]
        check(v, world, STEPS)


def test_scrub_refuses_what_parity_cannot_rebuild():
    v = variant("adamw")

    def fault(world: World, process: Incarnation, step: int) -> None:
        process.finish()
        for arena, offset, nbytes in FAULTS["H + 1 pages of a group, first"](v, "rest"):
            damage(world, arena, offset, nbytes)

    with pytest.raises(TooManyErasuresError, match="3 of 4 pages are lost, parity rebuilds at most 2"):
        scrubbed(v, fault)


def test_scrub_goes_round_in_slices_and_repairs_groups_that_reach_beyond_one():
    """A slice of one page a step: two damaged pages of one group are repaired when the first of them is seen."""
    v = variant("adamw")
    layout = v.layout
    spec = dataclasses.replace(layout.spec, protection=dataclasses.replace(layout.spec.protection, scrub_bytes_per_step=PAGE))
    sliced = dataclasses.replace(v, job=dataclasses.replace(v.job, layout=dataclasses.replace(layout, spec=spec)))

    def fault(world: World, process: Incarnation, step: int) -> None:
        process.finish()
        piece = layout.read_only_pieces[-1]
        for row in (1, 3):
            damage(world, "device", piece.offset + row * piece.row_bytes, PAGE, row)

    pages = sum(piece.pages for piece in layout.pieces)
    world, computed, seen = scrubbed(sliced, fault, steps=pages + 1)
    with world:
        # Read-only pieces come last: pages -3 and -1 of the round.
        assert [step for step, times in collections.Counter(computed).items() if times == 2] == [pages - 2]
        assert seen[Point.REPAIR_PAGE] == 3 * 2
        arenas, piece = world.map(), layout.read_only_pieces[-1]
        assert arenas.device.view(piece.offset, piece.nbytes).tobytes() == harness.truth(v, 0).pieces[-1]
        arenas.close()


@pytest.mark.parametrize("moment", list(Moment))
@pytest.mark.parametrize("title", ["parameter page, first chunk", "H pages of a group, last"])
def test_a_crash_while_scrub_repairs_is_survived(title, moment):
    v = variant("adamw")
    for number in range(len(FAULTS[title](v, "rest"))):
        with World(v.layout) as world:
            process = promote(v, world)
            process.attach()

            def strike(step: int, world=world, process=process) -> None:
                if step == 2:
                    process.finish()
                    for arena, offset, nbytes in FAULTS[title](v, "rest"):
                        damage(world, arena, offset, nbytes)

            crash_at(lambda process=process, strike=strike: process.train(STEPS, strike), Point.REPAIR_PAGE, moment, number)
            process.close()
            assert outcome_of(v, world, "compute") == "="
