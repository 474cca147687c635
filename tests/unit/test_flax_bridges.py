"""Flax models through a session give what a plain Flax and optax loop gives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import leto_jax as leto
from leto_jax import errors

STEPS = 4
KEY = jax.random.key(3)


class Block(nnx.Module):
    """Attention, BatchNorm and two dropouts, whose masks must differ.

    No bias before a normalisation or a softmax: its gradient is rounding noise, which Adam makes as large as any other.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, dropout_rate=0.1, use_bias=False, deterministic=False, decode=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.scales = nnx.List([nnx.Param(jnp.float32(0.1)) for _ in range(11)])  # more than ten: 10 sorts after 9, '10' does not
        self.drops = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.drops[0](self.norm(x + self.attention(x)))
        for n, scale in enumerate(self.scales):
            x = x + scale[...] * jnp.roll(jnp.tanh(self.linear(x)), n, -1)
        return self.drops[1](x)


def nnx_loss(model: Block, batch: dict[str, jax.Array]):
    out = model(batch["x"])
    return jnp.mean((out - batch["y"]) ** 2), {"size": jnp.mean(jnp.abs(out))}


class Cnn(linen.Module):
    @linen.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = linen.relu(linen.BatchNorm(use_running_average=not train)(linen.Conv(4, (3, 3), use_bias=False)(x)))
        x = linen.Dropout(0.4, deterministic=not train)(x.mean((1, 2)))
        return linen.Dense(3)(x)


def linen_loss(apply, batch):
    logits = apply(batch["x"], train=True)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), {"right": (logits.argmax(-1) == batch["y"]).mean()}


def sequences(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"x": rng.standard_normal((6, 5, 8), np.float32), "y": rng.standard_normal((6, 5, 8), np.float32)}


def images(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"x": rng.standard_normal((6, 8, 8, 1), np.float32), "y": rng.integers(0, 3, 6).astype(np.int32)}


def optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)))


def train(init, step: leto.TrainStep, dataset, steps: int = STEPS):
    """(parameters, extras, metrics of each step) after a stand-alone session."""
    seen = []
    with leto.session(init, step, dataset, key=KEY, steps=steps) as s:
        state = s.state
        for _, batch in s:
            state, metrics = s.step(state, batch)
            seen.append(jax.tree.map(float, metrics))
        return jax.tree.map(_plain, state.params), jax.tree.map(_plain, state.extras), seen


def _plain(x) -> np.ndarray:
    return np.array(jax.random.key_data(x) if jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key) else x)


def assert_close(found, expected) -> None:
    paths = lambda tree: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    assert paths(found) == paths(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, jax.tree.map(_plain, expected))


def test_nnx_equals_a_plain_loop():
    graphdef, params, rest = nnx.split(Block(nnx.Rngs(KEY)), nnx.Param, ...)
    params, rest, rows = nnx.to_pure_dict(params), nnx.to_pure_dict(rest), []
    tx = optimizer()
    opt_state = tx.init(params)

    @jax.jit
    def plain_step(params, rest, opt_state, batch, key):
        def loss(params):
            model = nnx.merge(graphdef, params, rest, copy=True)
            nnx.reseed(model, default=jax.random.fold_in(key, 0))
            value, metrics = nnx_loss(model, batch)
            return value, (nnx.split(model, nnx.Param, ...)[2], metrics)

        (value, (rest, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), nnx.to_pure_dict(rest), opt_state, {"loss": value, **metrics}

    for step in range(1, STEPS + 1):
        params, rest, opt_state, metrics = plain_step(params, rest, opt_state, sequences(step), jax.random.fold_in(KEY, step))
        rows.append(jax.tree.map(float, metrics))

    init, loss_fn = leto.flax.nnx(Block, nnx_loss)
    found_params, found_extras, found_rows = train(init, leto.TrainStep(loss_fn, tx), sequences)
    assert_close(found_params, params)
    assert_close(found_extras, rest)
    assert_close(found_rows, rows)
    assert not np.allclose(found_extras["norm"]["mean"], 0)
    assert found_extras["drops"][0]["rngs"]["count"] == 1, "the stream of a dropout was used once since it was reseeded"


def test_linen_equals_a_plain_loop():
    net, tx = Cnn(), optimizer()
    variables = net.init({"params": jax.random.fold_in(KEY, 0), "dropout": jax.random.fold_in(KEY, 1)}, images(1)["x"], train=True)
    params, stats, rows = variables["params"], variables["batch_stats"], []
    opt_state = tx.init(params)

    @jax.jit
    def plain_step(params, stats, opt_state, batch, key):
        def loss(params):
            rngs = {"dropout": jax.random.fold_in(jax.random.fold_in(key, 0), 0)}
            logits, updated = net.apply(
                {"params": params, "batch_stats": stats}, batch["x"], train=True, rngs=rngs, mutable=["batch_stats"]
            )
            value = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
            return value, (updated["batch_stats"], {"right": (logits.argmax(-1) == batch["y"]).mean()})

        (value, (stats, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), stats, opt_state, {"loss": value, **metrics}

    for step in range(1, STEPS + 1):
        params, stats, opt_state, metrics = plain_step(params, stats, opt_state, images(step), jax.random.fold_in(KEY, step))
        rows.append(jax.tree.map(float, metrics))

    init, loss_fn = leto.flax.linen(net, linen_loss, (jax.ShapeDtypeStruct((6, 8, 8, 1), jnp.float32),), train=True)
    found_params, found_extras, found_rows = train(init, leto.TrainStep(loss_fn, tx), images)
    assert_close(found_params, params)
    assert_close(found_extras, {"batch_stats": stats})
    assert_close(found_rows, rows)
    assert not np.allclose(found_extras["batch_stats"]["BatchNorm_0"]["mean"], 0)


@pytest.mark.parametrize("bridge", ["nnx", "linen"])
def test_a_step_draws_from_its_key_alone(bridge: str):
    if bridge == "nnx":
        (init, loss_fn), batch = leto.flax.nnx(Block, nnx_loss), sequences(1)
    else:
        (init, loss_fn), batch = leto.flax.linen(Cnn(), linen_loss, (images(1)["x"],), train=True), images(1)
    params, extras = jax.jit(init)(KEY)
    run = jax.jit(loss_fn)
    once, twice, other = (run(params, extras, batch, jax.random.fold_in(KEY, n)) for n in (1, 1, 2))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(_plain(a), _plain(b)), once, twice)
    assert float(once[0]) != float(other[0])


def test_streams_of_one_model_differ():
    def loss(model, batch):
        ones = jnp.ones((64, 8))
        return jnp.sum(batch["x"]) * 0.0, {"same": jnp.mean(model.drops[0](ones) == model.drops[1](ones))}

    init, loss_fn = leto.flax.nnx(Block, loss)
    _, (_, metrics) = jax.jit(loss_fn)(*jax.jit(init)(KEY), sequences(1), KEY)
    assert 0.3 < float(metrics["same"]) < 0.7

    def twice(apply, batch):
        a, b = apply(batch["x"], train=True), apply(batch["x"], train=True)
        return jnp.mean(a - b) ** 2, {"same": jnp.mean(a == b)}

    init, loss_fn = leto.flax.linen(Cnn(), twice, (images(1)["x"],), train=True)
    _, (_, metrics) = jax.jit(loss_fn)(*jax.jit(init)(KEY), images(1), KEY)
    assert float(metrics["same"]) < 0.5


def test_vectorised_streams_and_own_names():
    """Streams split over a vmapped axis keep their shape; a model may bring streams of other names."""

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.weight = nnx.Param(jax.random.normal(rngs.params(), (8,)))
            self.noise = nnx.Rngs(noise=rngs.noise(), other=rngs.other()).split({"noise": 6, ...: None})

        def __call__(self, x):
            shift = jax.vmap(jax.random.normal)(jax.vmap(lambda key: jax.random.fold_in(key, 0))(self.noise.noise.key[...]))
            return x * self.weight[...] + shift[:, None, None] + jax.random.normal(self.noise.other())

    init, loss_fn = leto.flax.nnx(Model, lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2))
    _, extras, rows = train(init, leto.TrainStep(loss_fn, optax.sgd(0.1)), sequences)
    assert extras["noise"]["noise"]["key"].shape == (6, 2)
    assert len({row["loss"] for row in rows}) == STEPS


def test_model_of_a_state_evaluates():
    init, loss_fn = leto.flax.nnx(Block, nnx_loss)

    @jax.jit
    def evaluate(state, batch):
        model = loss_fn.model(state.params, state.extras)
        model.eval()
        return nnx_loss(model, batch)[0]

    with leto.session(init, leto.TrainStep(loss_fn, optax.adam(1e-2)), sequences, key=KEY, steps=2, warm=[evaluate]) as s:
        state = s.state
        first = float(evaluate(state, sequences(9)))
        assert float(evaluate(state, sequences(9))) == first, "no dropout in evaluation"
        model = loss_fn.model(state.params, state.extras)
        assert not model.drops[0].deterministic
        for _, batch in s:
            state, _ = s.step(state, batch)
        assert float(evaluate(state, sequences(9))) != first


@pytest.mark.parametrize("bridge", ["nnx", "linen"])
def test_compute_dtype(bridge: str):
    """The loss sees bfloat16 parameters; parameters and BatchNorm statistics stay float32."""
    seen = []
    if bridge == "nnx":

        def loss(model, batch):
            seen.append(model.linear.kernel[...].dtype)
            return nnx_loss(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), batch))

        (init, loss_fn), dataset = leto.flax.nnx(Block, loss), sequences
    else:
        net = Cnn()

        def loss(apply, batch):
            out = apply(batch["x"].astype(jnp.bfloat16), train=True)
            seen.append(out.dtype)
            return optax.softmax_cross_entropy_with_integer_labels(out.astype(jnp.float32), batch["y"]).mean()

        (init, loss_fn), dataset = leto.flax.linen(net, loss, (images(1)["x"],), train=True), images
    params, extras, rows = train(init, leto.TrainStep(loss_fn, optax.adam(1e-2), compute_dtype=jnp.bfloat16), dataset)
    assert {np.dtype(jnp.bfloat16)} == set(map(np.dtype, seen))
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(params))
    assert all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(extras))
    assert all(np.isfinite(row["loss"]) for row in rows)


def test_a_grain_dataset_equals_the_function_of_its_steps():
    grain = pytest.importorskip("grain")
    rows = images(0)["x"].repeat(8, 0) + np.arange(48, dtype=np.float32)[:, None, None, None] / 48
    labels = np.arange(48, dtype=np.int32) % 3
    dataset = grain.MapDataset.source(range(48)).shuffle(seed=1).repeat().map(lambda n: {"x": rows[n], "y": labels[n]}).batch(6)
    init, loss_fn = leto.flax.linen(Cnn(), linen_loss, (rows[:6],), train=True)
    step = leto.TrainStep(loss_fn, optax.adam(1e-2))
    ours = train(init, step, dataset)
    batches = iter(dataset)
    drawn = {number: next(batches) for number in range(1, STEPS + 1)}
    theirs = train(init, step, drawn.__getitem__)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_models_without_extras_or_metrics():
    class Linear(linen.Module):
        @linen.compact
        def __call__(self, x):
            return linen.Dense(3)(x.reshape(len(x), -1))

    init, loss_fn = leto.flax.linen(Linear(), lambda apply, batch: jnp.mean(apply(batch["x"]) ** 2), (images(1)["x"],), rngs=())
    _, extras, rows = train(init, leto.TrainStep(loss_fn, optax.sgd(0.1)), images)
    assert (extras, set(rows[0])) == ({}, {"loss"})

    init, loss_fn = leto.flax.nnx(lambda rngs: nnx.Linear(8, 8, rngs=rngs), lambda model, batch: jnp.mean(model(batch["x"]) ** 2))
    _, extras, rows = train(init, leto.TrainStep(loss_fn, optax.sgd(0.1)), sequences)
    assert (extras, set(rows[0])) == ({}, {"loss"})


ok = lambda model, batch: jnp.zeros(())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: leto.flax.nnx(Block(nnx.Rngs(0)), ok),
            r"nnx: make_model: expected .*, found a Block; write lambda rngs: Block\(..., rngs=rngs\)",
        ),
        (lambda: leto.flax.nnx(Cnn(), ok), "nnx: make_model: expected a function of rngs, found a Cnn"),
        (lambda: leto.flax.nnx(3, ok), "nnx: make_model: expected a function of rngs, found int"),
        (lambda: leto.flax.nnx(Block, None), r"nnx: loss: expected a function loss\(model, batch\), found NoneType"),
        (lambda: leto.flax.nnx(lambda rngs: Cnn(), ok)[0](KEY), r"nnx: make_model\(rngs\): expected an nnx.Module, found Cnn"),
        (lambda: leto.flax.nnx(lambda rngs: Block, ok)[0](KEY), r"nnx: make_model\(rngs\): expected an nnx.Module, found class Block"),
        (lambda: leto.flax.linen(Block(nnx.Rngs(0)), ok, ()), "linen: model: expected a flax.linen.Module, found Block; nnx models go to"),
        (lambda: leto.flax.linen(Cnn, ok, ()), "linen: model: expected a flax.linen.Module, found class Cnn"),
        (lambda: leto.flax.linen(Cnn(), "loss", ()), r"linen: loss: expected a function loss\(apply, batch\), found str"),
        (lambda: leto.flax.linen(Cnn(), ok, np.zeros(3)), r"linen: example: expected a tuple of arguments .*, found ndarray; write \(x,\)"),
        (lambda: leto.flax.linen(Cnn(), ok, (), rngs="dropout"), "linen: rngs: expected a tuple .* besides 'params', found 'dropout'"),
        (
            lambda: leto.flax.linen(Cnn(), ok, (), rngs=("params",)),
            r"linen: rngs: expected a tuple .* besides 'params', found \('params',\)",
        ),
    ],
)
def test_wrong_arguments(call, message: str):
    with pytest.raises(errors.UsageError, match=rf"^leto\.flax\.{message}"):
        call()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: None, r"leto.flax.nnx: loss: expected a scalar or \(scalar, dict of metrics\), found NoneType"),
        (lambda model, batch: (jnp.zeros(()), 1, 2), r"found a tuple of 3 \(.*, int, int\)"),
        (lambda model, batch: (jnp.zeros(()), [1]), r"found a tuple of 2 \(.*, list\)"),
        (lambda model, batch: {"loss": jnp.zeros(())}, "found dict"),
    ],
)
def test_a_loss_that_returns_something_else(loss, message: str):
    init, loss_fn = leto.flax.nnx(Block, loss)
    with pytest.raises(errors.UsageError, match=message):
        train(init, leto.TrainStep(loss_fn, optax.sgd(0.1)), sequences)


def test_apply_sets_rngs_and_mutable_itself():
    init, loss_fn = leto.flax.linen(
        Cnn(), lambda apply, batch: jnp.mean(apply(batch["x"], train=True, mutable=["batch_stats"])[0]), (images(1)["x"],), train=True
    )
    with pytest.raises(errors.UsageError, match=r"leto.flax.linen: apply: expected no 'mutable', it is set here"):
        train(init, leto.TrainStep(loss_fn, optax.sgd(0.1)), images)


def test_extras_that_change_are_refused():
    """A model that collects something new on each call has no fixed state."""

    class Collector(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x):
            self.seen = nnx.Intermediate(x)
            return self.linear(x)

    init, loss_fn = leto.flax.nnx(Collector, lambda model, batch: jnp.mean(model(batch["x"])))
    with pytest.raises(
        errors.UsageError, match=r"extras: expected the loss to return extras with the leaves that it got, found nothing -> \['seen'\]"
    ):
        train(init, leto.TrainStep(loss_fn, optax.sgd(0.1)), sequences)
