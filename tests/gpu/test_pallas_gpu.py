"""The kernels as compiled for the GPU. Run there: ``JAX_PLATFORMS=cuda pytest -m gpu tests/gpu/test_pallas_gpu.py``."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pallas_suite import OPTIMIZERS, SCHEDULE, Chunk, ParitySuite, UpdateSuite, named

from leto_jax.pallas import dispatch, fused
from leto_jax.pallas.shapes import DEVICE_PARITY, DEVICE_UPDATE, SMALL_PARITY, SMALL_UPDATE

pytestmark = pytest.mark.gpu
BY_NAME = {shape.name: shape for shape in DEVICE_PARITY}


class TestParity(ParitySuite):
    interpret = False

    @pytest.mark.parametrize("shape", named((*SMALL_PARITY, *DEVICE_PARITY)))
    def test_encode_with_checksums(self, shape, seed):
        self.check_encode(shape, seed)

    @pytest.mark.parametrize("name", ["d8_h1", "d16_h4"])
    def test_parity_or_checksums_alone(self, name, seed):
        self.check_parts(BY_NAME[name], seed)

    @pytest.mark.parametrize(
        ("name", "lost", "kept"),
        [
            ("d2_h1", (1,), (0,)),
            ("d32_h2", (5,), (0,)),
            ("d32_h2", (0, 31), (0, 1)),
            ("d16_h3", (1, 2), (0, 2)),
            ("d16_h4", (0, 3, 14, 15), (0, 1, 2, 3)),
            ("d32_h4", (7, 8), (2, 3)),
        ],
    )
    def test_decode(self, name, lost, kept, seed):
        self.check_decode(BY_NAME[name], lost, kept, seed)

    @pytest.mark.parametrize("name", ["d16_h2", "d16_h4"])
    def test_settings_change_no_bit(self, name, seed):
        self.check_configs(BY_NAME[name], seed)


class TestUpdate(UpdateSuite):
    interpret = False

    @pytest.mark.parametrize("shape", named((*SMALL_UPDATE, *(dataclasses.replace(s, name=f"pages_{s.name}") for s in DEVICE_UPDATE))))
    def test_adamw(self, shape, seed):
        self.check_shape(shape, seed)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_optimizers(self, name, seed):
        self.check_optimizer(name, SMALL_UPDATE[0], seed)

    def test_skip_keeps_every_bit(self, seed):
        self.check_skip(DEVICE_UPDATE[0], seed)

    def test_results_take_the_place_of_donated_arrays(self, seed):
        """As the transaction calls it: the old lanes stay, each result has the address of its donated target."""
        chunk = Chunk(DEVICE_UPDATE[0], optax.adamw(SCHEDULE), seed)
        rows, length = chunk.shape.parity_rows, chunk.shape.row
        pages = chunk.shape.elements * 4 // chunk.shape.page_bytes
        target = fused.Updated(
            tuple(jnp.full_like(x, jnp.nan) for x in chunk.lanes),
            tuple(jnp.full((rows, length), 7, jnp.uint32) for _ in chunk.lanes),
            tuple(jnp.full((pages, 2), 7, jnp.uint32) for _ in chunk.lanes),
        )
        before = [np.asarray(x) for x in chunk.lanes]
        addresses = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(target)]

        def run(scalars, grad, old, target):
            return fused.fused_update(chunk.update, scalars, grad, old, **chunk.settings)

        program = jax.jit(run, donate_argnums=3, keep_unused=True).lower(chunk.scalars, chunk.grad, chunk.lanes, target).compile()
        assert program.as_text().count("may-alias") + program.as_text().count("must-alias") == len(addresses)
        updated = program(chunk.scalars, chunk.grad, chunk.lanes, target)
        assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(updated)] == addresses
        for x, kept in zip(chunk.lanes, before, strict=True):
            np.testing.assert_array_equal(np.asarray(x), kept)
        self.check_guards(chunk, updated)


def test_report_tries_every_kernel():
    rows = dispatch.report()
    assert all(row["implementation"] == "kernel" and row["ok"] for row in rows), rows
