"""The kernels in GPU interpret mode on the CPU: few blocks, all of the logic. On the GPU: tests/gpu/test_pallas_gpu.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pallas_suite import OPTIMIZERS, ParitySuite, UpdateSuite, bits, coefficients, named

from leto_jax.pallas import fused, mosaic, parity
from leto_jax.pallas.shapes import SMALL_PARITY, SMALL_UPDATE

BY_NAME = {shape.name: shape for shape in (*SMALL_PARITY, *SMALL_UPDATE)}


class TestParity(ParitySuite):
    interpret = True

    @pytest.mark.parametrize("shape", named(SMALL_PARITY))
    def test_encode_with_checksums(self, shape, seed):
        self.check_encode(shape, seed)

    def test_parity_or_checksums_alone(self, seed):
        self.check_parts(BY_NAME["power_form"], seed)

    @pytest.mark.parametrize(
        ("name", "lost", "kept"),
        [
            ("xor_only", (2,), (0,)),
            ("power_form", (0, 7), (0, 1)),
            ("power_form", (3,), (1,)),
            ("three_rows", (1, 2), (0, 2)),
            ("four_rows", (0, 3, 4, 7), (0, 1, 2, 3)),
        ],
    )
    def test_decode(self, name, lost, kept, seed):
        self.check_decode(BY_NAME[name], lost, kept, seed)

    @pytest.mark.parametrize("name", ["wide_tiles", "four_rows"])
    def test_settings_change_no_bit(self, name, seed):
        self.check_configs(BY_NAME[name], seed)


class TestUpdate(UpdateSuite):
    interpret = True

    @pytest.mark.parametrize("shape", named(SMALL_UPDATE))
    def test_adamw(self, shape, seed):
        self.check_shape(shape, seed)

    @pytest.mark.parametrize("name", OPTIMIZERS)
    def test_optimizers(self, name, seed):
        self.check_optimizer(name, BY_NAME["no_parity"], seed)

    def test_skip_keeps_every_bit(self, seed):
        self.check_skip(BY_NAME["float32"], seed)


def test_page_sums_kernel_adds_up_what_blocks_left(seed):
    """The kernel that finishes the checksums runs only for pages of many tiles, as on the GPU: tested by itself."""
    sums = mosaic.Sums(rows=2, count=3, tiles=512)
    partial = bits(seed, sums.output.shape)
    found = sums.page_sums(partial, [2, 2, 1], interpret=True)
    by_stream = np.asarray(partial).reshape(3, 2, 512, 2)
    for stream, pages in enumerate([2, 2, 1]):
        expected = by_stream[stream].reshape(2, pages, -1, 2).sum(axis=2, dtype=np.uint32).reshape(-1, 2)
        np.testing.assert_array_equal(found[stream], expected)


def test_refused_shapes_say_what_is_needed():
    lane = jnp.zeros(1024, jnp.float32)
    double = lambda scalars, grad, lanes: [lanes[0] * 2]
    settings = {"data_rows": 2, "coefficients": coefficients(2, 1), "page_bytes": 2048}
    with pytest.raises(ValueError, match="a multiple of 3, found"):
        fused.check(double, (), None, (lane,), **settings | {"data_rows": 3, "coefficients": coefficients(3, 1)})
    with pytest.raises(ValueError, match=r"whole pages in every lane.*found 512 elements and pages of 3072 bytes"):
        fused.check(double, (), None, (lane,), **settings | {"page_bytes": 3072})
    with pytest.raises(ValueError, match="dtypes of 2 or 4 bytes, found int8"):
        fused.check(double, (), None, (lane.astype(jnp.int8),), **settings)
    with pytest.raises(ValueError, match=r"elementwise update of lanes \(1024,\), found a result \(\)"):
        fused.check(lambda scalars, grad, lanes: [lanes[0].sum()], (), None, (lane,), **settings)
    with pytest.raises(ValueError, match=r"scalars of at most 4 bytes, found float32\[2\]"):
        fused.check(double, (jnp.zeros(2),), None, (lane,), **settings)
    with pytest.raises(ValueError, match="coefficients of parity row 0: expected 2 values"):
        fused.check(double, (), None, (lane,), **settings | {"coefficients": ((1, 2, 3),)})
    with pytest.raises(ValueError, match="at most 16 arrays in one pass, found 17"):
        fused.check(lambda scalars, grad, lanes: lanes, (), None, (lane,) * 17, **settings)
    words = jnp.zeros((2, 768), jnp.uint32)
    with pytest.raises(ValueError, match="a multiple of 512 words, found 768"):
        parity.encode(words, coefficients(2, 1), page_words=768)
    with pytest.raises(ValueError, match="found neither"):
        parity.encode(jnp.zeros((2, 512), jnp.uint32), ())
    with pytest.raises(ValueError, match="survivors below 2 \\+ 1"):
        parity.decode(jnp.zeros((2, 512), jnp.uint32), jnp.zeros((1, 512), jnp.uint32), (0, 3), ((1, 1),))


def test_update_without_gradient_or_scalars(seed):
    lane = jax.random.normal(jax.random.key(seed), (2048,))
    updated = fused.fused_update(
        lambda scalars, grad, lanes: [-lanes[0]],
        (),
        None,
        (lane,),
        data_rows=2,
        coefficients=coefficients(2, 2),
        page_bytes=None,
        interpret=True,
    )
    np.testing.assert_array_equal(updated.lanes[0], -lane)
    assert updated.checksums == ()
