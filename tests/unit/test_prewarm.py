"""A rehearsal that cannot be made says why; the shadow is ready without it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import leto_jax as leto
from leto_jax.config import Protection
from leto_jax.rmu import programs
from leto_jax.shadow import executables, prewarm


@pytest.fixture(scope="module")
def job():
    def loss_fn(params, extras, batch, key):
        return jnp.mean(jnp.square(batch @ params["w"])), (extras, {})

    init = lambda key: ({"w": jax.random.normal(key, (16, 8))}, {})
    step = leto.TrainStep(loss_fn, optax.adamw(1e-3))
    return programs.trace(init, step.spec, np.ones((4, 16), np.float32), jax.random.key(0), Protection(4, 1, 0, 4096, 64 << 10))


@pytest.fixture(scope="module")
def run(job):
    return executables.compile_all(executables.lower(job))


def rehearse(job, run):
    return prewarm.rehearse(job, run, jax.random.key_data(jax.random.key(0)), jax.devices()[0], [])


def test_all_programs_run(job, run):
    used = set()

    def noted(name):
        def call(*arguments):
            used.add(name)
            return run[name](*arguments)

        return call

    assert rehearse(job, {name: noted(name) for name in run}) == ""
    assert used == set(run)


def test_a_device_without_memory_for_it_is_said(job, run):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nmore")

    said = rehearse(job, {**run, "compute": full})
    assert said == "no memory to rehearse: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes."


def test_another_error_of_the_device_is_not_taken_for_it(job, run):
    def broken(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is gone")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        rehearse(job, {**run, "compute": broken})
