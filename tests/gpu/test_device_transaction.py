"""The transaction over GPU memory, in one process. Run there: ``JAX_PLATFORMS=cuda pytest -m gpu tests/gpu/test_device_transaction.py``.

What dies is an incarnation: views, programs' outputs, a transaction, an epoch; the arenas stay. Real processes die in `test_gpu_jobs`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from leto_jax import faults
from leto_jax.arena.metadata import LostRange
from leto_jax.arena.rank import Arenas, private_arenas
from leto_jax.checkpoint import frozen
from leto_jax.config import MIB, Protection
from leto_jax.faults import Moment, Point
from leto_jax.rmp import checksum, reference
from leto_jax.rmu import programs, rollforward
from leto_jax.rmu.device import DRAIN_THREAD, DeviceTransaction
from leto_jax.rmu.recovery import Action
from leto_jax.rmu.retained import Retained
from leto_jax.shadow import executables
from leto_jax.train.step import TrainStep

pytestmark = pytest.mark.gpu
KEY = jax.random.key(5)
STEPS = 4
# The smallest that device memory allows: rows of one page of 2 MiB.
PROTECTION = Protection(data_rows=4, local_parity=2, page_bytes=2 * MIB, chunk_bytes=16 * MIB, align_elements=256, align_bytes=256)


class Killed(BaseException):
    pass


def init(key):
    k = jax.random.split(key, 3)
    params = {
        "in": {"b": jnp.zeros((2000,)), "w": jax.random.normal(k[0], (1000, 2000)) * 0.03},
        "mid": jax.random.normal(k[1], (2000, 3000)) * 0.02,
        "out": jax.random.normal(k[2], (3000, 16)) * 0.02,
        "scale": jnp.ones(()),
    }
    return params, {"seen": jnp.int32(0), "mean": jnp.zeros((16,))}


def loss_fn(params, extras, batch, key):
    x = batch["x"].astype(params["mid"].dtype)
    hidden = jnp.tanh(x @ params["in"]["w"] + params["in"]["b"])
    hidden = jax.nn.relu(hidden @ params["mid"]) * jax.random.bernoulli(key, 0.9, (3000,))
    out = ((hidden @ params["out"]) * params["scale"]).astype(jnp.float32)
    extras = {"seen": extras["seen"] + len(batch["x"]), "mean": 0.9 * extras["mean"] + 0.1 * out.mean(0)}
    return jnp.mean(jnp.square(out - batch["y"])), (extras, {"largest": jnp.abs(out).max()})


def adamw():
    return optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 2, 20)))


VARIANTS: dict[str, Callable[[], TrainStep]] = {
    "adamw": lambda: TrainStep(loss_fn, adamw()),
    "bf16 copy, ema": lambda: TrainStep(
        loss_fn, adamw(), compute_dtype=jnp.bfloat16, after_update={"ema": (jnp.array, lambda new, old, step: 0.9 * old + 0.1 * new)}
    ),
    "lamb": lambda: TrainStep(loss_fn, optax.lamb(1e-3)),
}


def batch(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(32, 1000)).astype(np.float32), "y": rng.normal(size=(32, 16)).astype(np.float32)}


@functools.cache
def compiled(name: str):
    job = programs.trace(init, VARIANTS[name]().spec, batch(1), KEY, PROTECTION, jax.devices()[0])
    lowered = executables.lower(job)
    blob = executables.pack(executables.compile_all(lowered, to_pack=True))
    return job, executables.unpack(memoryview(blob), lowered)  # as a shadow runs them


class Life:
    """One incarnation over `arenas`."""

    def __init__(self, name: str, arenas: Arenas):
        self.job, run = compiled(name)
        self.retained = Retained(self.job, arenas.device, arenas.host, arenas.metadata, jax.devices()[0])
        self.transaction = DeviceTransaction(self.retained, run, arenas.metadata.raise_epoch())
        self.commit = 0

    def attach(self) -> rollforward.Recovered:
        recovered = rollforward.recover(self.retained, self.transaction)
        if recovered.plan.action is Action.FILL:
            self.transaction.fill(0, *self.transaction.init(jax.random.key_data(KEY)))
        self.commit = recovered.commit or 0
        return recovered

    def train(self, steps: int) -> None:
        while self.commit < steps:
            self.transaction.step(self.commit + 1, jax.tree.leaves(batch(self.commit + 1)), jax.random.key_data(KEY))
            self.commit += 1

    def end(self) -> None:
        self.transaction.close()

    def state(self) -> dict[str, np.ndarray]:
        found = {}
        for name, specs in frozen.form_of(self.job).specs.items():
            found |= {f"{name}{spec.path}": x for x, spec in zip(self.retained.arrays(name, self.commit), specs, strict=True)}
        return found

    def digest(self) -> str:
        found = hashlib.sha256()
        for x in self.state().values():
            found.update(x.tobytes())
        return found.hexdigest()

    def check_guards(self, staged_too: bool = True) -> None:
        """Every piece's guard is that of its data, by the NumPy reference: on the host, and in staging, where a crash may have voided it."""
        retained, guard = self.retained, self.retained.guard
        for piece in retained.layout.pieces:
            version = self.transaction.version(piece, self.commit)
            staged = guard.staged(piece)
            assert (staged is None and not staged_too) or (staged is not None and staged.step == version)
            assert guard.version(piece) == version
            data = retained.device.view(retained.layout.address(piece, self.commit), piece.nbytes)
            block = guard.block(piece, version)
            assert block is not None
            assert np.array_equal(block.parity(), reference.encode(data.reshape(-1, piece.row_bytes), piece.parity_rows))
            assert np.array_equal(block.checksums, checksum.page_checksums_np(data.view(np.uint32).reshape(piece.pages, -1)))


@functools.cache
def undisturbed(name: str, steps: int = STEPS) -> str:
    return whole_life(name, steps)[0]


def whole_life(name: str, steps: int = STEPS) -> tuple[str, dict[str, np.ndarray]]:
    job, _ = compiled(name)
    arenas = private_arenas(job.layout, 0)
    life = Life(name, arenas)
    life.attach()
    life.train(steps)
    life.transaction.wait_drained()
    life.check_guards()
    found = life.digest(), life.state()
    life.end()
    arenas.close()
    return found


def crash_at(life: Life, act: Callable[[], None], point: Point, moment: Moment, number: int) -> None:
    """Ends `life` at the `number`-th time that `act` comes to (point, moment)."""
    count = 0

    def hook(found: Point, when: Moment, nbytes: int) -> bool:
        nonlocal count
        if (found, when) == (point, moment):
            count += 1
            if count > number:
                raise Killed
        return True

    with faults.armed(hook):
        with pytest.raises(Killed):
            act()
        for thread in threading.enumerate():
            if thread.name == DRAIN_THREAD:
                thread.join()
    with contextlib.suppress(Killed):
        life.end()  # memory that a process has pinned goes with the process


@pytest.fixture(autouse=True, scope="module")
def exact_products():
    """TF32 would hide differences, and make some."""
    jax.config.update("jax_default_matmul_precision", "highest")
    yield
    jax.config.update("jax_default_matmul_precision", None)


def test_steps_are_those_of_optax_and_repeat_to_the_bit():
    digest, found = whole_life("adamw")
    assert digest == undisturbed("adamw")
    tx = adamw()
    (params, extras), step = init(KEY), jax.jit(lambda p, s, e, b, k: plain(tx, p, s, e, b, k))
    state = tx.init(params)
    for t in range(1, STEPS + 1):
        params, state, extras = step(params, state, extras, batch(t), jax.random.fold_in(KEY, t))
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        np.testing.assert_allclose(found[f"params{jax.tree_util.keystr(path)}"], x, rtol=1e-2, atol=1e-4)  # four steps of up to 1e-3
    assert int(found["extras['seen']"]) == 32 * STEPS


def plain(tx, params, state, extras, batch, key):
    (_, (extras, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, extras, batch, key)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, extras


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "adamw"])
def test_other_updates_repeat_to_the_bit(name):
    assert whole_life(name)[0] == undisturbed(name)


PLACES = [
    (Point.FILL_SCALARS, Moment.BEFORE, 0),  # the next one fills again, over what `init` has already written
    (Point.GRADIENTS_STORED, Moment.BEFORE, 2),
    (Point.GRADIENTS_STORED, Moment.AFTER, 2),
    (Point.SCALARS, Moment.TORN, 2),
    (Point.INTENT, Moment.AFTER, 2),
    (Point.PIECE, Moment.BEFORE, 5),
    (Point.PIECE, Moment.AFTER, 4),
    (Point.MARK, Moment.BEFORE, 3),
    (Point.MARK, Moment.AFTER, 6),
    (Point.COMMIT, Moment.TORN, 2),
    (Point.DRAIN_FLUX, Moment.AFTER, 12),
    (Point.DRAIN_PARITY, Moment.BEFORE, 12),
    (Point.DRAIN_VERSION, Moment.BEFORE, 13),
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]}-{place[1]}-{place[2]}")
def test_a_crash_is_survived(place):
    job, _ = compiled("adamw")
    arenas = private_arenas(job.layout, 0)

    first = Life("adamw", arenas)

    def act() -> None:
        first.attach()
        first.train(STEPS)
        first.transaction.wait_drained()

    crash_at(first, act, *place)
    life = Life("adamw", arenas)
    life.attach()
    life.transaction.wait_drained()
    if life.commit:
        life.check_guards(staged_too=False)
    life.train(STEPS)
    life.transaction.wait_drained()
    life.check_guards()
    assert life.digest() == undisturbed("adamw")
    life.end()
    arenas.close()


@pytest.mark.parametrize("told", [True, False], ids=["lost", "corrupted"])
@pytest.mark.parametrize("name", list(VARIANTS))
def test_pages_that_are_damaged_with_a_crash_between_marks(name, told):
    job, _ = compiled(name)
    arenas = private_arenas(job.layout, 0)

    first = Life(name, arenas)

    def act() -> None:
        first.attach()
        first.train(STEPS)

    marks = len(job.layout.chunks)
    crash_at(first, act, Point.MARK, Moment.AFTER, 2 * marks)  # the first mark of step 3
    order = list(job.layout.order(3))
    for index, commit in ((order[0], 3), (order[-1], 2)):  # one that is at its new place, one at its old
        piece = job.layout.pieces_of_chunk[index][0]
        offset = job.layout.address(piece, commit) + piece.page_bytes
        if told:
            arenas.metadata.add_lost(LostRange("device", offset, piece.page_bytes))
        arenas.device.damage(offset, np.random.default_rng(index).integers(0, 256, piece.page_bytes, np.uint8))
    address = arenas.device.address
    life = Life(name, arenas)
    recovered = life.attach()
    assert (recovered.commit, recovered.repaired_pages) == (3, 2)
    assert arenas.device.address == address
    assert not arenas.metadata.lost()
    life.train(STEPS)
    life.transaction.wait_drained()
    life.check_guards()
    assert life.digest() == undisturbed(name)
    life.end()
    arenas.close()


def test_scrub_finds_a_silent_corruption_before_the_next_update():
    job, _ = compiled("adamw")
    arenas = private_arenas(job.layout, 0)
    life = Life("adamw", arenas)
    life.attach()
    life.train(2)
    life.transaction.wait_drained()
    # A step looks at one piece: the third one's is the third.
    piece = job.layout.pieces[2]
    arenas.device.damage(job.layout.address(piece, 2), np.full(piece.page_bytes, 255, np.uint8))
    life.train(STEPS)
    life.transaction.wait_drained()
    life.check_guards()
    assert life.digest() == undisturbed("adamw")
    life.end()
    arenas.close()
