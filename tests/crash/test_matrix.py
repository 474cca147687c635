"""A crash at every store: in the fill, in steps of both parities, in the takeover itself, and again in the takeover after that.

The normal suite takes every store of one variant at all three moments, every store of every takeover scene at one moment each, and random
triples. `-m slow` takes the cross product over all variants.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Callable

import harness
import pytest
from harness import (
    STEPS,
    VARIANTS,
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

from leto_jax import faults
from leto_jax.faults import Moment, Point
from leto_jax.records import Kind, Record
from leto_jax.rmu.log import Contents
from leto_jax.rmu.recovery import Action, Life, Picture
from leto_jax.rmu.retained import Retained

SEED = 20240
EVERY = 15  # in the normal suite, one crash of so many is followed by training to the end
Bytes = tuple[bytes, ...]


def go_on(v: harness.Variant, world: World, to_the_end: bool = True) -> None:
    """Whoever attaches next finds or makes a commit that is right to the bit, and so do the steps after it."""
    recovered = take_over(v, world)
    check(v, world, recovered.commit or 0)
    if to_the_end:
        life(v, world)
        check(v, world, STEPS)


# A life ---------------------------------------------------------------------------------------------------------------------------------


@functools.cache
def survive_every_store(name: str, every: int, only: str = "") -> frozenset[Point]:
    """Crash pictures of one life, taken at each crossing; each is recovered, every `every`-th trained to its end. The points that fired.

    only: at points whose names begin so."""
    v = variant(name)
    fired: set[Point] = set()
    number = 0

    def hook(point: Point, moment: Moment, nbytes: int) -> bool:
        nonlocal number
        fired.add(point)
        if not point.startswith(only):
            return True
        with faults.armed(), World(v.layout, world.content()) as left:
            try:
                go_on(v, left, number % every == 0)
            except Exception as exception:
                raise AssertionError(f"{name}: crash at crossing {number}, {point} {moment}") from exception
        number += 1
        return True

    with World(v.layout) as world:
        with faults.armed(hook):
            life(v, world)
        check(v, world, STEPS)
    print(f"{name}: {number} crash pictures, {len(fired)} points")
    return frozenset(fired)


def test_a_crash_at_every_store_of_a_life_is_survived():
    assert survive_every_store("adamw", EVERY) >= {
        Point.LIFE_FILLING,
        Point.RING_RECORD,
        Point.PIECE,
        Point.MARK,
        Point.COMMIT,
        Point.DRAIN_VERSION,
        Point.EPOCH,
    }


def test_a_crash_at_every_store_to_the_peer_is_survived():
    assert {Point.PEER_FLUX, Point.PEER_PARITY, Point.PEER_VERSION} <= survive_every_store("peer", EVERY, "peer_")


def test_an_exception_leaves_the_same_bytes_as_a_look_at_the_memory():
    """So the pictures above are those of processes that died there."""
    v = variant("adamw")
    pictures: list[Bytes] = []
    with World(v.layout) as world, faults.armed(lambda *_: pictures.append(world.content()) or True):
        life(v, world, 2)
    print(f"seed {SEED}")
    for number in random.Random(SEED).sample(range(len(pictures)), 25):
        with World(v.layout) as world:
            assert crash(lambda world=world: life(v, world, 2), number)
            assert world.content() == pictures[number]


# Takeovers ------------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scene:
    """A takeover: what the dead left, what a fault does to it meanwhile, what is to be done, and with which stores (others may be there too).

    padding: whether what lies between leaves comes back too; what was lost of it in the gradient buffer is lost. brings: what the peer gives.
    """

    left: Callable[[harness.Variant], Bytes]
    action: Action
    points: set[Point]
    fault: Callable[[harness.Variant, World], None] = lambda v, world: None
    peers: Callable[[harness.Variant, Retained], list[Picture]] = lambda v, retained: []
    padding: bool = True
    brings: Callable[[harness.Variant], bytes] = lambda v: b"{}"


def at(step: int, point: Point, moment: Moment = Moment.AFTER, number: int = 0) -> Callable[[harness.Variant], Bytes]:
    return functools.cache(lambda v: picture_at(v, step, point, moment, number))


def pages_of_a_group(number: int) -> Callable[[harness.Variant, World], None]:
    """Loses the first `number` rows, or as many as parity rebuilds, of a parameter piece that lies where commit 1 leaves it."""

    def fault(v: harness.Variant, world: World) -> None:
        piece = v.layout.pieces_of_chunk[-1][0]
        for row in range(min(number, piece.parity_rows)):
            lose(world, "device", v.layout.address(piece, 1) + row * piece.row_bytes, harness.PAGE, row)

    return fault


def whole_region(arena: str, name: str) -> Callable[[harness.Variant, World], None]:
    return lambda v, world: lose(world, arena, v.layout.by_name[name].offset, v.layout.by_name[name].nbytes)


def corrupt_log(v: harness.Variant, world: World) -> None:
    damage(world, "device", v.layout.by_name["log1"].offset, v.layout.by_name["log1"].nbytes)


def peer_with_the_intent(v: harness.Variant, retained: Retained) -> list[Picture]:
    """Another rank that came one store further in step 2 and then died with this one."""
    header = retained.header()
    epoch = header.epoch if header else 1
    intent = Record(Kind.INTENT, 1, 2, body=(*retained.digest(2), len(v.layout.chunks)))
    log = Contents(frozenset({Record(Kind.COMMIT, 1, 1)}), frozenset({intent}), frozenset(), frozenset())
    return [Picture(Life.LIVE, log, (2, epoch), {1: (), 2: retained.digest(2)})]


@functools.cache
def decided(v: harness.Variant) -> tuple[tuple[int, ...], bytes]:
    """Digests and scalars of step 2 on a rank that has decided it."""
    with World(v.layout, at(2, Point.SCALARS)(v)) as world:
        process = promote(v, world)
        try:
            return process.retained.digest(2), process.retained.copied("scalars", 2)
        finally:
            process.close()


def before_deciding(v: harness.Variant) -> Bytes:
    decided(v)  # now, where none of its stores is counted
    return picture_at(v, 2, Point.GRADIENTS_STORED, Moment.AFTER, 0)


def peer_with_the_scalars(v: harness.Variant, retained: Retained) -> list[Picture]:
    """Another rank that has decided step 2, while this one had only just stored its gradients."""
    digest, _ = decided(v)
    (peer,) = peer_with_the_intent(v, retained)
    (intent,) = peer.log.intents
    log = dataclasses.replace(peer.log, intents=frozenset({dataclasses.replace(intent, body=(*digest, len(v.layout.chunks)))}))
    return [dataclasses.replace(peer, log=log, digests={1: (), 2: digest})]


def bring_the_scalars(v: harness.Variant) -> bytes:
    return json.dumps({"scalars 2": decided(v)[1].hex()}).encode()


def several(*faults: Callable[[harness.Variant, World], None]) -> Callable[[harness.Variant, World], None]:
    def fault(v: harness.Variant, world: World) -> None:
        for strike in faults:
            strike(v, world)

    return fault


@functools.cache
def revoked(v: harness.Variant) -> Bytes:
    """A trainer that died in the compute which follows a revocation, with the gradients of another epoch just stored."""
    with World(v.layout, at(2, Point.STAGING)(v)) as world:
        whole_region("device", "gradients")(v, world)
        assert take_over(v, world).plan.action is Action.REVOKE
        crash_at(lambda: life(v, world), Point.GRADIENTS_STORED)
        return world.content()


# fmt: off
LOG, GRADS, PARITY, STAGED = (whole_region(*where) for where in (("device", "log0"), ("device", "gradients"), ("host", "parity"), ("device", "staging")))
METRICS = whole_region("device", "metrics0")
REDO, REVOKE, FORWARD = Action.REDO, Action.REVOKE, Action.ROLL_FORWARD
UPDATED, HEALED = {Point.PIECE, Point.STAGING, Point.MARK, Point.COMMIT}, {Point.LOST, Point.LOST_CLEAR}
SCENES = {
    "fill, first store":        Scene(at(0, Point.LIFE_FILLING),                      Action.FILL, {Point.FILL_LANES, Point.FILL_SCALARS, Point.FILL_EXTRAS}),
    "fill, not yet live":       Scene(at(0, Point.COMMIT, Moment.TORN, 1),            Action.FILL, {Point.LIFE_FILLING, Point.LIFE_LIVE}),
    "compute":                  Scene(at(2, Point.GRADIENTS),                         REDO,        {Point.EPOCH, Point.PROMOTION}),
    "drain cut short":          Scene(at(2, Point.DRAIN_PARITY, Moment.TORN, 3),      REDO,        {Point.DRAIN_FLUX, Point.DRAIN_PARITY, Point.DRAIN_VERSION}),
    "intent in one copy":       Scene(at(2, Point.INTENT),                            FORWARD,     {Point.LOG_REPAIR, *UPDATED}),
    "chunk in flight":          Scene(at(2, Point.PIECE, Moment.TORN, 4),             FORWARD,     UPDATED),
    "between marks, odd":       Scene(at(3, Point.MARK, Moment.AFTER, 3),             FORWARD,     UPDATED),
    "after the last mark":      Scene(at(2, Point.COMMIT, Moment.BEFORE),             FORWARD,     {Point.COMMIT, Point.DRAIN_VERSION}),
    "commit in one copy":       Scene(at(2, Point.COMMIT, Moment.TORN, 1),            REDO,        {Point.LOG_REPAIR}),
    "revoked, computed again":  Scene(revoked,                                        REDO,        {Point.EPOCH}, padding=False),
    "log copy corrupted":       Scene(at(2, Point.MARK, Moment.AFTER, 3),             FORWARD,     {Point.LOG_REPAIR}, corrupt_log),
    "log copy lost":            Scene(at(2, Point.GRADIENTS),                         REDO,        {Point.LOG_REPAIR, *HEALED}, LOG),
    "data pages lost":          Scene(at(2, Point.GRADIENTS),                         REDO,        {Point.REPAIR_PAGE, *HEALED}, pages_of_a_group(2)),
    "data lost in the update":  Scene(at(2, Point.INTENT),                            FORWARD,     {Point.REPAIR_PAGE, *HEALED}, pages_of_a_group(1)),
    "gradients lost":           Scene(at(2, Point.STAGING),                           REVOKE,      {Point.REVOKE, *HEALED}, GRADS, padding=False),
    "gradients, parity lost":   Scene(at(2, Point.STAGING, Moment.AFTER, 5),          REVOKE,      {Point.REVOKE, *HEALED}, several(GRADS, PARITY), padding=False),
    "host parity lost":         Scene(at(2, Point.GRADIENTS),                         REDO,        {Point.DRAIN_VERSION, *HEALED}, PARITY),
    "staging lost":             Scene(at(2, Point.MARK, Moment.AFTER, 3),             FORWARD,     {Point.STAGING, *HEALED}, STAGED),
    "parity, staging lost":     Scene(at(2, Point.COMMIT, Moment.AFTER, 1),           REDO,        {Point.STAGING, *HEALED}, several(PARITY, STAGED)),
    "data, staging lost":       Scene(at(2, Point.INTENT, Moment.AFTER, 1),           FORWARD,     {Point.REPAIR_PAGE, *HEALED}, several(pages_of_a_group(1), STAGED)),
    "metrics lost":             Scene(at(2, Point.MARK, Moment.AFTER, 3),             FORWARD,     {Point.METRICS, *HEALED}, METRICS),
    "intent at a peer":         Scene(at(2, Point.SCALARS),                           FORWARD,     {Point.INTENT_COPY, *UPDATED}, peers=peer_with_the_intent),
    "scalars at a peer":        Scene(before_deciding,                                FORWARD,     {Point.REGION_COPY, Point.INTENT_COPY}, peers=peer_with_the_scalars, brings=bring_the_scalars),
}
# fmt: on


class Attempts:
    """Takeovers of one scene over one world, as many as it takes. The fault strikes once, completely; a crash of its injector repeats it."""

    def __init__(self, v: harness.Variant, scene: Scene):
        self.v, self.scene, self.struck = v, scene, False
        self.world = World(v.layout, scene.left(v))

    def once(self) -> harness.rollforward.Recovered:
        if not self.struck:
            self.scene.fault(self.v, self.world)
            self.struck = True
        process = promote(self.v, self.world)
        recovered = process.attach(
            lambda mine: [mine, *self.scene.peers(self.v, process.retained)], lambda mine: [mine, self.scene.brings(self.v)]
        )
        process.close()
        return recovered

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, *_) -> None:
        self.world.close()


def verify(v: harness.Variant, world: World, scene: Scene, commit: int) -> None:
    # Lost metrics stay unknown until the next step.
    check(v, world, commit, padding=scene.padding, metrics=scene.fault is not METRICS or commit == STEPS)


@functools.cache
def survive_takeovers(name: str, title: str, whole: bool) -> frozenset[Point]:
    """Kills the takeover of a scene at each store, then the next one at a random store, then looks at what the third one does."""
    v, scene, rng = variant(name), SCENES[title], random.Random(f"{SEED} {name} {title}")
    with Attempts(v, scene) as attempts:
        recovered: list[harness.rollforward.Recovered] = []
        seen = crossings(lambda: recovered.append(attempts.once()))
        assert recovered[0].plan.action is scene.action, recovered[0].plan
        verify(v, attempts.world, scene, recovered[0].commit or 0)
        life(v, attempts.world)
        verify(v, attempts.world, scene, STEPS)
    fired = frozenset(crossing.point for crossing in seen)
    assert fired >= scene.points, f"{title}: {scene.points - fired} did not fire"
    for crossing in seen:
        # One moment for each store, and it is another one for the store after it.
        if not whole and crossing.number % 3 != crossing.number // 3 % 3:
            continue
        again = [None, *(rng.randrange(len(seen)) for _ in range(2))] if whole else [rng.choice([None, rng.randrange(len(seen))])]
        for second in again:
            schedule = f"{name}, {title}: {crossing}, then {second}"
            with Attempts(v, scene) as attempts:
                try:
                    found = crash(attempts.once, crossing.number)
                    assert found == crossing
                    if second is not None:
                        crash(attempts.once, second)
                    verify(v, attempts.world, scene, attempts.once().commit or 0)
                    if whole:
                        life(v, attempts.world)
                        verify(v, attempts.world, scene, STEPS)
                except Exception as exception:
                    raise AssertionError(schedule) from exception
    print(f"{name}, {title}: {len(seen)} crossings")
    return fired


@pytest.mark.parametrize("title", SCENES)
def test_a_crash_at_every_store_of_a_takeover_is_survived(title):
    survive_takeovers("adamw", title, False)


def test_every_registered_point_fires():
    fired = {*survive_every_store("adamw", EVERY), *survive_every_store("peer", EVERY, "peer_")}
    for title in SCENES:
        fired |= survive_takeovers("adamw", title, False)
    assert fired == {point for point in Point if not point.startswith("copy_")}  # those are of tests/crash/test_hostmemory.py


# At random ------------------------------------------------------------------------------------------------------------------------------


def triples(name: str, runs: int, seed: int) -> None:
    """Three crashes at random stores of one job, each anywhere between promotion and the last step."""
    v, total = variant(name), 0
    with World(v.layout) as world:
        total = len(crossings(lambda: life(v, world)))
    for run in range(runs):
        rng = random.Random(seed + run)
        places: list[object] = []
        with World(v.layout) as world:
            try:
                # Not beyond the end: a life that starts later has fewer stores, so the place is drawn near the front.
                places += [crash(lambda world=world: life(v, world), int(total * rng.random() ** 2)) for _ in range(3)]
                take_over(v, world)
                life(v, world)
                check(v, world, STEPS)
            except Exception as exception:
                raise AssertionError(f"{name}: seed {seed + run}: {[str(place) for place in places]}") from exception
        assert any(places), "no crash fired"


@pytest.mark.parametrize("name", VARIANTS)
def test_three_crashes_at_random_stores_are_survived(name):
    print(f"seed {SEED}")
    triples(name, 12, SEED)


# The whole of it ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", VARIANTS)
def test_whole_matrix(name):
    v = variant(name)
    with World(v.layout) as world:
        seen = crossings(lambda: life(v, world))
    for crossing in seen:
        with World(v.layout) as world:
            assert crash(lambda world=world: life(v, world), crossing.number) == crossing
            try:
                go_on(v, world)
            except Exception as exception:
                raise AssertionError(f"{name}: {crossing}") from exception


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("title", SCENES)
@pytest.mark.parametrize("name", VARIANTS)
def test_whole_matrix_of_takeovers(name, title):
    survive_takeovers(name, title, True)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", VARIANTS)
def test_many_random_triples(name):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    triples(name, 300, seed)
