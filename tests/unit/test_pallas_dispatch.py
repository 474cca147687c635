"""Which implementation is chosen, and what is said about it. Lowering for the GPU is checked here too: it needs none."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import optax
import pytest
from pallas_suite import OPTIMIZERS, Chunk, coefficients, moments, named

from leto_jax.pallas import dispatch, parity, words
from leto_jax.pallas.elementwise import kernel_form
from leto_jax.pallas.shapes import DEVICE_PARITY, DEVICE_UPDATE, SMALL_UPDATE, UpdateShape


def device(platform="gpu", capability="9.0", version="PJRT C API cuda 13000", kind="NVIDIA H200"):
    return SimpleNamespace(
        platform=platform, compute_capability=capability, device_kind=kind, client=SimpleNamespace(platform_version=version)
    )


@pytest.mark.parametrize(
    ("found", "kernel", "reason"),
    [
        (device(), True, "kernel: NVIDIA H200"),
        (device(capability="10.3"), True, "kernel"),
        (device(capability="8.0", kind="NVIDIA A100"), False, "NVIDIA A100 has compute capability 8.0, kernels need 9.0"),
        (device(version="rocm 7", kind="MI300"), False, "kernels are for NVIDIA GPUs"),
        (device(platform="cpu", kind="cpu"), False, "the device is cpu"),
    ],
)
def test_device_choice(found, kernel, reason):
    choice = dispatch.device_choice(found)
    assert choice.kernel is kernel
    assert reason in choice.reason


def test_parity_choice_names_sizes_that_do_not_fit():
    assert dispatch.parity(device(), 4096, 1024).kernel
    choice = dispatch.parity(device(), 4096, 128)
    assert not choice.kernel
    assert "a multiple of 512 words, found 4096 and 128" in choice.reason
    assert not dispatch.parity(device(platform="cpu"), 4096, 1024).kernel


def test_update_choice_says_why_not():
    lane = jax.ShapeDtypeStruct((4 * 1024,), jnp.float32)
    settings = {"data_rows": 4, "coefficients": coefficients(4, 2), "page_bytes": 4096}
    fits = lambda scalars, grad, lanes: [lanes[0] * 2]
    assert dispatch.update(device(), fits, (), None, (lane,), **settings).kernel
    ordered = lambda scalars, grad, lanes: [jnp.sort(lanes[0])]
    choice = dispatch.update(device(), ordered, (), None, (lane,), **settings)
    assert not choice.kernel
    assert "Mosaic GPU does not lower this update" in choice.reason
    choice = dispatch.update(device(), fits, (), None, (jax.ShapeDtypeStruct((4 * 1024,), jnp.int8),), **settings)
    assert choice == (False, "XLA: fused update: expected dtypes of 2 or 4 bytes, found int8")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("shape", named(dataclasses.replace(s, data_rows=2, parity_rows=min(s.parity_rows, 2)) for s in SMALL_UPDATE[:3]))
def test_common_optimizers_lower_for_the_gpu(name, shape, seed):
    chunk = Chunk(shape, OPTIMIZERS[name](), seed)
    choice = dispatch.update(device(), chunk.update, chunk.scalars, chunk.grad, chunk.lanes, **chunk.settings)
    assert choice.kernel, choice.reason


def test_updates_that_may_be_skipped_lower_for_the_gpu(seed):
    chunk = Chunk(SMALL_UPDATE[0], optax.chain(optax.clip(0.5), optax.adamw(1e-3)), seed)
    scalars = (*chunk.scalars, jnp.int32(1))
    choice = dispatch.update(device(), chunk.update_or_skip, scalars, chunk.grad, chunk.lanes, **chunk.settings)
    assert choice.kernel, choice.reason


def test_pages_of_the_device_lower_for_the_gpu(seed):
    """Pages of 2 MiB take another path for checksums than the small ones that are interpreted."""
    for shape in (DEVICE_PARITY[1], DEVICE_PARITY[5]):
        factors = coefficients(shape.data_rows, shape.parity_rows)
        program = jax.jit(lambda x, s=shape, f=factors: parity.encode(x, f, page_words=s.page_words))
        program.trace(jax.ShapeDtypeStruct((shape.data_rows, shape.row_words), jnp.uint32)).lower(lowering_platforms=("cuda",))
    shape: UpdateShape = dataclasses.replace(DEVICE_UPDATE[2], data_rows=2)
    chunk = Chunk(dataclasses.replace(shape, row=4096, page_bytes=4096), optax.adamw(1e-3, **moments(shape)), seed)
    structs = [jax.ShapeDtypeStruct((shape.elements,), x.dtype) for x in (chunk.grad, *chunk.lanes)]
    settings = {"data_rows": 2, "coefficients": coefficients(2, 2), "page_bytes": shape.page_bytes}
    choice = dispatch.update(device(), chunk.update, chunk.scalars, structs[0], structs[1:], **settings)
    assert choice.kernel, choice.reason


def test_report_on_this_device():
    rows = dispatch.report(jax.devices("cpu")[0])
    assert [row["operation"] for row in rows] == ["encode", "decode", "page checksums", "fused update"]
    assert all(row["implementation"] == "xla" and row["ok"] and "the device is cpu" in row["reason"] for row in rows)


def test_report_is_a_program():
    done = subprocess.run([sys.executable, "-m", "leto_jax.pallas.dispatch"], capture_output=True, text=True, check=True, timeout=120)
    assert len(json.loads(done.stdout)) == 4


def test_horner_shift_recognises_the_power_form():
    assert words.horner_shifts(coefficients(32, 3)) == (0, 1, 2)
    assert words.horner_shifts(coefficients(8, 4)) is None
    assert words.horner_shift((4, 2, 1)) == 1
    assert words.horner_shift((1, 2, 4)) is None
    assert words.horner_shifts(()) == ()


def test_kernel_form_writes_out_what_mosaic_refuses(seed):
    def function(x, which):
        return {
            "powers": [jax.lax.integer_pow(x, y) for y in (0, 1, 2, 3, -1, -2)],
            "chosen": jax.lax.select_n(which, x, x + 1, x * 2),
            "one_for_all": jnp.where(which[0] == 0, x, -x),
            "clamped": jax.lax.clamp(-0.5, x, 0.5),
            "called": jax.jit(lambda y: jnp.where(y > 0, y, 0.0))(x),
        }

    x = jax.random.normal(jax.random.key(seed), (64,))
    which = jnp.arange(64, dtype=jnp.int32) % 3
    plain, rewritten = function(x, which), kernel_form(function)(x, which)
    assert jax.tree.structure(plain) == jax.tree.structure(rewritten)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(rewritten), strict=True):
        assert jnp.allclose(a, b, rtol=1e-6)
    primitives = {eqn.primitive.name for eqn in jax.make_jaxpr(kernel_form(function))(x, which).eqns}
    assert primitives.isdisjoint({"jit", "pjit", "clamp"})
