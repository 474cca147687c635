"""Tiny jobs whose processes die at chosen stores, in one process of ours.

What outlives a process is a `World`: memory files, one for each arena. What dies is an `Incarnation`: mappings, views, a transaction, an epoch. A crash
is an exception out of a store; whoever comes next makes a new incarnation over the same files, so nothing in Python carries over.

    life(variant, world, steps)                       raises the epoch, recovers or fills, trains to `steps`
    crash(lambda: life(...), at=17)                   the same, ended at the 17th crossing of a crash point: before, inside or after a store
    check(variant, world, commit)                     every byte of the state, and its parity, against a run without a crash
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from leto_jax import faults
from leto_jax.arena.metadata import HostMetadata, LostRange
from leto_jax.arena.rank import Arenas, map_arenas
from leto_jax.config import Protection
from leto_jax.faults import Moment, Point
from leto_jax.layout import Layout, Piece
from leto_jax.records import Kind, Record
from leto_jax.rmp import checksum, reference
from leto_jax.rmu import programs, rollforward
from leto_jax.rmu.device import DRAIN_THREAD, transaction_type
from leto_jax.rmu.recovery import Action, Picture
from leto_jax.rmu.retained import Retained
from leto_jax.shadow import executables
from leto_jax.train.ring import Ring
from leto_jax.train.step import TrainStep

STEPS = 3  # both parities, and one step over retained memory that two others have used
PAGE = 512
KEY = jax.random.key(11)


class Killed(BaseException):
    """The process is gone. Not an Exception, so that nothing under test can catch it by the way."""


# Variants ---------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A traced and compiled job. start: what `init` gives, as the fill takes it. Made once and shared by all tests."""

    name: str
    job: programs.Job
    run: dict[str, Callable]
    start: tuple
    batch: Callable[[int], list[np.ndarray]]

    @property
    def layout(self) -> Layout:
        return self.job.layout


def _init(key):
    k = jax.random.split(key, 4)
    params = {
        "inner": {"b": jnp.zeros((30,)), "w": jax.random.normal(k[0], (40, 30)) * 0.3},
        "out": {"b": jnp.full((6,), 0.1), "w": jax.random.normal(k[1], (30, 6)) * 0.3},
        "scale": jnp.ones(()),
        "table": jax.random.normal(k[2], (16, 40)),  # never trained
    }
    return params, {"drop": k[3], "mean": jnp.zeros((30,)), "seen": jnp.int32(0)}


def _loss(params, extras, batch, key):
    x = jnp.take(params["table"], batch["token"], axis=0).astype(params["inner"]["w"].dtype)
    hidden = jnp.tanh(x @ params["inner"]["w"] + params["inner"]["b"])
    drop, use = jax.random.split(extras["drop"])
    hidden = hidden * jax.random.bernoulli(use, 0.9, hidden.shape)
    out = (hidden @ params["out"]["w"] + params["out"]["b"]) * params["scale"] + 0.01 * jax.random.normal(key, (6,), hidden.dtype)
    loss = jnp.mean(jnp.square(out.astype(jnp.float32) - batch["y"]))
    mean = 0.9 * extras["mean"] + 0.1 * hidden.astype(jnp.float32).mean(0)
    return loss, ({"drop": drop, "mean": mean, "seen": extras["seen"] + len(x)}, {"largest": jnp.abs(out).max(), "step": extras["seen"]})


def _matrices(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def _frozen(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "frozen" if path[0].key == "table" else "moving", params)


def _adamw():
    schedule = optax.warmup_cosine_decay_schedule(0.01, 0.05, 2, 20)
    moving = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(schedule, mask=_matrices))
    return optax.multi_transform({"moving": moving, "frozen": optax.set_to_zero()}, _frozen)


def _lamb():
    return optax.multi_transform({"moving": optax.lamb(0.05), "frozen": optax.set_to_zero()}, _frozen)


def _average(new, old, step):
    return 0.9 * old + 0.1 * new


_STEPS: dict[str, tuple[Callable[[], TrainStep], Protection]] = {
    # Elementwise chunks that cut leaves; shared count and schedule; clip; a frozen leaf.
    "adamw": (lambda: TrainStep(_loss, _adamw()), Protection(data_rows=4, local_parity=2, page_bytes=PAGE, chunk_bytes=2048)),
    # Whole-leaf chunks, an average of the parameters.
    "lamb": (lambda: TrainStep(_loss, _lamb(), after_update={"ema": (jnp.array, _average)}), Protection(4, 2, 0, PAGE, 2048)),
    # Lanes of two widths, hence two groups a row; one parity row only; a step that is skipped because its loss is not finite.
    "bf16": (
        lambda: TrainStep(_loss, _adamw(), compute_dtype=jnp.bfloat16, after_update={"ema": (jnp.array, _average)}, non_finite="skip"),
        Protection(4, 1, 0, PAGE, 4096),
    ),
}
_STEPS["placed"] = _STEPS["adamw"]
_STEPS["peer"] = (_STEPS["adamw"][0], Protection(4, 1, 1, PAGE, 2048))  # as adamw, the second parity row with a peer
VARIANTS = tuple(_STEPS)
IN_PLACE = {"placed"}  # the order of stores that programs on a GPU make; here their outputs are copied to their places
SKIPPED = {"bf16": 2}  # step whose batch holds a NaN


@functools.cache
def variant(name: str) -> Variant:
    """Traces and compiles a variant, once."""
    make, protection = _STEPS[name]

    def batch(step: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(step)
        y = rng.normal(size=(5, 6)).astype(np.float32)
        if SKIPPED.get(name) == step:
            y[0, 0] = np.nan
        return {"token": rng.integers(0, 16, 5, np.int32), "y": y}

    job = programs.trace(_init, make().spec, batch(1), KEY, protection, jax.devices()[0] if name in IN_PLACE else None)
    run = executables.compile_all(executables.lower(job))
    assert len(job.layout.signatures) >= 2
    assert len(job.layout.chunks) >= 3
    whole = programs.trace(_init, make().spec, batch(1), KEY, protection).programs["init"]
    start = tuple([np.asarray(leaf) for leaf in leaves] for leaves in jax.jit(whole.function)(jax.random.key_data(KEY)))
    return Variant(name, job, run, start, lambda step: jax.tree.leaves(batch(step)))


# Worlds and incarnations ------------------------------------------------------------------------------------------------------------


class World:
    """Retained memory without anybody who looks at it. content: bytes of the arenas, zeros if left out."""

    def __init__(self, layout: Layout, content: tuple[bytes, ...] | None = None):
        self.layout, self._fds = layout, []
        arenas = map_arenas(layout, 0, lambda name, nbytes, _: self._make(name, nbytes))
        mapped = [arena for arena in (arenas.device, arenas.host, arenas.metadata_arena, arenas.peer) if arena is not None]
        for fd, arena, data in zip(self._fds, mapped, content or (b"",) * len(mapped), strict=True):
            os.ftruncate(fd, arena.nbytes)
            os.pwrite(fd, data, 0)
        arenas.close()

    def _make(self, name: str, nbytes: int) -> int:
        self._fds.append(os.memfd_create(name))
        os.ftruncate(self._fds[-1], nbytes)
        return self._fds[-1]

    def map(self) -> Arenas:
        fds = iter(self._fds)
        return map_arenas(self.layout, 0, lambda *_: next(fds))

    def content(self) -> tuple[bytes, ...]:
        return tuple(os.pread(fd, os.fstat(fd).st_size, 0) for fd in self._fds)

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_) -> None:
        self.close()


class Incarnation:
    """One process: maps a world, with the epoch that the world shows."""

    def __init__(self, variant: Variant, world: World):
        self.variant, self.arenas = variant, world.map()
        self.metadata = HostMetadata(self.arenas.metadata_arena)
        self.retained = Retained(variant.job, self.arenas.device, self.arenas.host, self.metadata, jax.devices()[0], self.arenas.peer)
        self.transaction = transaction_type(variant.job)(self.retained, variant.run, self.metadata.epoch, wait_for_peer=True)
        self.ring = Ring(self.arenas.host, variant.layout)
        self.commit = -1

    def attach(
        self,
        gather: Callable[[Picture], list[Picture]] = lambda mine: [mine],
        exchange: Callable[[bytes], list[bytes]] = lambda mine: [mine],
    ) -> rollforward.Recovered:
        """What a session does before its first step. gather, exchange: as for `recover`."""
        recovered = rollforward.recover(self.retained, self.transaction, gather=gather, exchange=exchange)
        if recovered.plan.action is Action.FILL:
            self.transaction.fill(0, *self.variant.start)
        self.commit = recovered.commit or 0
        return recovered

    def train(self, steps: int, before: Callable[[int], None] = lambda step: None) -> None:
        """Steps up to commit `steps`, each with the ring's batch where a predecessor has drawn it already. before(step): called first."""
        while self.commit < steps:
            step = self.commit + 1
            before(step)
            entry = self.ring.get(step)
            if entry is None:
                self.ring.put(step, b"position %d" % step, self.variant.batch(step))
                entry = self.ring.get(step)
            assert entry is not None
            assert entry.position == b"position %d" % step
            self.transaction.step(step, entry.leaves, jax.random.key_data(KEY))
            self.commit = step

    def finish(self) -> None:
        self.transaction.drain(self.commit)

    def close(self) -> None:
        self.transaction.close()
        self.arenas.close()


def promote(variant: Variant, world: World) -> Incarnation:
    """What the agent does before a process may map: raises the epoch, notes the promotion. Then the process."""
    arenas = world.map()
    arenas.metadata.raise_epoch()
    arenas.metadata.write(Point.PROMOTION, Record(Kind.PROMOTION, arenas.metadata.epoch))
    arenas.close()
    return Incarnation(variant, world)


def life(variant: Variant, world: World, steps: int = STEPS, before: Callable[[int], None] = lambda step: None) -> rollforward.Recovered:
    """A whole life of a process that is not disturbed: promotion, recovery or fill, training to `steps`, drain."""
    process = promote(variant, world)
    recovered = process.attach()
    process.train(steps, before)
    process.finish()
    process.close()
    return recovered


def take_over(variant: Variant, world: World) -> rollforward.Recovered:
    """Only the takeover: promotion and recovery. Leaves the world at a commit with current parity."""
    process = promote(variant, world)
    recovered = process.attach()
    process.close()
    return recovered


# Crashes ----------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Crossing:
    """The n-th time that a store came to one of its three moments."""

    number: int
    point: Point
    moment: Moment

    def __str__(self) -> str:
        return f"crossing {self.number} ({self.point} {self.moment})"


def join_drains() -> None:
    """Threads die with their process; here they come to their own next store, and end there."""
    for thread in threading.enumerate():
        if thread.name == DRAIN_THREAD:
            thread.join()


def crossings(act: Callable[[], object]) -> list[Crossing]:
    """Every crossing of `act`, which is run to its end."""
    seen: list[Crossing] = []

    def hook(point: Point, moment: Moment, nbytes: int) -> bool:
        seen.append(Crossing(len(seen), point, moment))
        return True

    with faults.armed(hook):
        act()
    return seen


def crash(act: Callable[[], object], at: int) -> Crossing | None:
    """Runs `act` and kills it at crossing number `at`. The crossing, or None if `act` ended before it came so far."""
    count = 0
    fired: Crossing | None = None

    def hook(point: Point, moment: Moment, nbytes: int) -> bool:
        nonlocal count, fired
        if count == at:
            fired = Crossing(at, point, moment)
            raise Killed(fired)
        count += 1
        return True

    with faults.armed(hook):
        try:
            act()
        except Killed:
            assert fired is not None
        finally:
            join_drains()
    return fired


def crash_at(
    act: Callable[[], object], point: Point, moment: Moment = Moment.AFTER, number: int = 0, step: Callable[[], bool] = lambda: True
) -> None:
    """Kills `act` at the `number`-th time that it comes to (point, moment) while `step()` is true. Asserts that it came there."""
    count, fired = 0, False

    def hook(found: Point, when: Moment, nbytes: int) -> bool:
        nonlocal count, fired
        if (found, when) == (point, moment) and step():
            if count == number:
                fired = True
                raise Killed
            count += 1
        return True

    with faults.armed(hook):
        try:
            act()
        except Killed:
            pass
        finally:
            join_drains()
    assert fired, f"never came to {point} {moment} number {number}"


def picture_at(variant: Variant, step: int, point: Point, moment: Moment = Moment.AFTER, number: int = 0) -> tuple[bytes, ...]:
    """What a trainer leaves that dies at a store of `step` (0: of the fill); `number` counts those stores within the step."""
    with World(variant.layout) as world:
        at = [0]
        crash_at(
            lambda: life(variant, world, step or 1, lambda number: at.__setitem__(0, number)), point, moment, number, lambda: at[0] == step
        )
        return world.content()


# The truth --------------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Truth:
    """State of a run without a crash at one commit: leaves by group and path; copied regions and pieces byte by byte."""

    leaves: dict[str, bytes]
    regions: dict[str, bytes]
    pieces: tuple[bytes, ...]


def _truth(process: Incarnation, commit: int) -> Truth:
    retained, layout, job = process.retained, process.variant.layout, process.variant.job
    groups: list[tuple[str, Iterable, Iterable]] = [
        ("params", retained.params(commit), layout.spec.params),
        ("seen", retained.seen_params(commit), layout.spec.params),
        ("opt_state", retained.opt_state(commit), job.opt_specs),
        ("companions", retained.companions(commit), job.companion_specs),
        ("scalars", retained.values(commit), layout.spec.values),
        ("verdict", [retained.verdict(commit)], layout.scalars.leaves[-1:]),
        ("extras", retained.extras(commit), layout.spec.extras),
        ("metrics", retained.metrics(commit), layout.spec.metrics),
    ]
    leaves = {
        f"{name}{spec.path}": np.asarray(view).tobytes() for name, views, specs in groups for view, spec in zip(views, specs, strict=True)
    }
    regions = {}
    for name in ("scalars", "extras", "metrics"):
        region = layout.by_name[f"{name}{commit % 2}"]
        regions[name] = process.arenas.device.view(region.offset, region.nbytes).tobytes()
    pieces = tuple(process.arenas.device.view(layout.address(piece, commit), piece.nbytes).tobytes() for piece in layout.pieces)
    return Truth(leaves, regions, pieces)


@functools.cache
def truth(variant: Variant, commit: int) -> Truth:
    """The state at `commit` of a run in which nothing fails."""
    with World(variant.layout) as world:
        life(variant, world, commit)
        process = Incarnation(variant, world)
        found = _truth(process, commit)
        process.close()
    if commit:  # a run that stands still would make every comparison easy
        moved = [path for path, data in found.leaves.items() if data != truth(variant, commit - 1).leaves[path]]
        assert moved
        assert SKIPPED.get(variant.name) == commit or any(path.startswith("params") for path in moved)
    return found


@functools.cache
def _encoded(data: bytes, piece: Piece) -> tuple[bytes, np.ndarray]:
    """The guard block of a piece's bytes on the host, and the parity rows of its peer, by the reference."""
    rows = np.frombuffer(data, np.uint8).reshape(-1, piece.row_bytes)
    sums = checksum.page_checksums_np(np.frombuffer(data, np.uint32).reshape(piece.pages, -1))
    parity = reference.encode(rows, piece.parity_rows)
    return parity[: piece.local_rows].tobytes() + sums.tobytes(), parity[piece.local_rows :]


def check(variant: Variant, world: World, commit: int, padding: bool = True, metrics: bool = True, parity: bool = True) -> None:
    """Asserts that `world` holds commit `commit` bit by bit, with parity of it.

    padding: also what lies between leaves, and the checksums of gradients, which cover it. False after a page loss: lost padding is lost.
    metrics: False where they are unknown. parity: False where a parity row was corrupted that nothing was rebuilt from.
    """
    process = Incarnation(variant, world)
    try:
        retained, layout, want = process.retained, variant.layout, truth(variant, commit)
        assert retained.log.read().commit == commit
        found = _truth(process, commit)
        wrong = [path for path, data in found.leaves.items() if data != want.leaves[path] and (metrics or not path.startswith("metrics"))]
        assert not wrong, f"leaves of commit {commit} differ: {wrong}"
        for name in ("scalars", "extras", "metrics"):
            assert not (padding and metrics) or found.regions[name] == want.regions[name], f"{name} of commit {commit} differ"
        fill = process.metadata.latest(Kind.LIFE)
        assert fill is not None
        for piece, data, right in zip(layout.pieces, found.pieces, want.pieces, strict=True):
            assert not padding or data == right, f"padding of piece {piece.index} differs"
            version = fill.step if piece.chunk is None else commit
            assert retained.guard.version(piece) == version, f"piece {piece.index}: version {retained.guard.version(piece)}, not {version}"
            _, (offset, _) = retained.guard.ranges(piece)
            expected, theirs = _encoded(data, piece)
            peer = retained.guard.peer
            if parity and peer is not None and peer.has(piece, version):
                assert np.array_equal(peer.parity(piece, version), theirs), (
                    f"piece {piece.index}: the peer's parity is not that of its data"
                )
            assert not parity or process.arenas.host.view(offset, len(expected)).tobytes() == expected, (
                f"piece {piece.index}: parity is not that of its data"
            )
        assert not process.metadata.lost()
        assert not retained.log.read().torn
    finally:
        process.close()


# Damage -----------------------------------------------------------------------------------------------------------------------------


def damage(world: World, arena: str, offset: int, nbytes: int, seed: int = 0) -> None:
    """Overwrites bytes with noise, as a fault would. Nobody is told."""
    arenas = world.map()
    noise = np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)
    getattr(arenas, arena).damage(offset, noise)
    arenas.close()


def lose(world: World, arena: str, offset: int, nbytes: int, seed: int = 0) -> None:
    """As `damage`, with the range on the LOST list first: what a probe or an injector does."""
    arenas = world.map()
    arenas.metadata.add_lost(LostRange("host" if arena == "host" else "device", offset, nbytes))
    arenas.close()
    damage(world, arena, offset, nbytes, seed)


def count(found: Iterable[Crossing]) -> collections.Counter:
    return collections.Counter(crossing.point for crossing in found)
