"""A small network learns sin(x): `leto run minimal.py`, or unprotected `python minimal.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import leto_jax as leto


def init(key):
    first, second = jax.random.split(key)
    params = {"in": jax.random.normal(first, (1, 64)), "bias": jnp.zeros(64), "out": 0.1 * jax.random.normal(second, (64, 1))}
    return params, {}  # no extras: nothing else is carried from step to step


def loss_fn(params, extras, batch, key):
    predicted = jnp.tanh(batch["x"] @ params["in"] + params["bias"]) @ params["out"]
    return jnp.mean((predicted - batch["y"]) ** 2), (extras, {})


def batch_of(step):  # a pure function of the step: after a failure the same batch comes again
    x = np.random.default_rng(step).uniform(-3, 3, (256, 1)).astype(np.float32)
    return {"x": x, "y": np.sin(x)}


step = leto.TrainStep(loss_fn, optax.adam(1e-2))
with leto.session(init, step, batch_of, key=jax.random.key(0), steps=500) as s:
    state = s.state  # side effects only after this line: a shadow waits above
    for t, batch in s:
        state, metrics = s.step(state, batch)
        if t % 100 == 0:
            print(f"step {t} loss {float(metrics['loss']):.5f}", flush=True)
