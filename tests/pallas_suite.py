"""The tests that every implementation of the kernels must pass: interpreted on the CPU (tests/unit), compiled on the GPU (tests/gpu).

A subclass says how kernels run (`interpret`) and which named shapes are checked. NumPy is the truth for the code and the checksums
(`rmp.reference`, `rmp.checksum`), XLA for the update.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from leto_jax.pallas import fused, parity, reference
from leto_jax.pallas.shapes import ParityShape, UpdateShape
from leto_jax.rmp import checksum, matrix
from leto_jax.rmp import reference as truth
from leto_jax.rmu import slicing


def coefficients(data_rows: int, parity_rows: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in matrix.parity_matrix(data_rows, parity_rows))


def named(shapes: Any) -> Any:
    return [pytest.param(shape, id=shape.name) for shape in shapes]


def bits(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.bits(jax.random.key(seed), shape, jnp.uint32)


def expected_parity(words: np.ndarray, parity_rows: int) -> np.ndarray:
    return truth.encode(np.ascontiguousarray(words).view(np.uint8), parity_rows).view(np.uint32)


def expected_sums(words: np.ndarray, page_words: int) -> np.ndarray:
    return checksum.page_checksums_np(np.ascontiguousarray(words).reshape(-1, page_words))


def row_words(lane: jax.Array, data_rows: int) -> np.ndarray:
    return np.asarray(lane).reshape(data_rows, -1).view(np.uint32)


class ParitySuite:
    interpret: ClassVar[bool]
    shapes: ClassVar[tuple[ParityShape, ...]]

    def check_encode(self, shape: ParityShape, seed: int) -> None:
        data = bits(seed, (shape.data_rows, shape.row_words))
        factors = coefficients(shape.data_rows, shape.parity_rows)
        run = jax.jit(lambda x: parity.encode(x, factors, page_words=shape.page_words, interpret=self.interpret))
        rows, sums = run(data)
        np.testing.assert_array_equal(rows, expected_parity(np.asarray(data), shape.parity_rows))
        np.testing.assert_array_equal(sums, expected_sums(np.asarray(data), shape.page_words))
        for kernel, plain in zip((rows, sums), reference.encode(data, factors, page_words=shape.page_words), strict=True):
            np.testing.assert_array_equal(kernel, plain)

    def check_parts(self, shape: ParityShape, seed: int) -> None:
        """Parity without checksums and checksums without parity."""
        data = bits(seed, (shape.data_rows, shape.row_words))
        factors = coefficients(shape.data_rows, shape.parity_rows)
        rows, none = jax.jit(lambda x: parity.encode(x, factors, interpret=self.interpret))(data)
        assert none is None
        np.testing.assert_array_equal(rows, expected_parity(np.asarray(data), shape.parity_rows))
        sums = jax.jit(lambda x: parity.page_checksums(x, shape.page_words, interpret=self.interpret))(data)
        np.testing.assert_array_equal(sums, expected_sums(np.asarray(data), shape.page_words))

    def check_decode(self, shape: ParityShape, lost: tuple[int, ...], kept_parity: tuple[int, ...], seed: int) -> None:
        data = bits(seed, (shape.data_rows, shape.row_words))
        rows = jnp.asarray(expected_parity(np.asarray(data), shape.parity_rows))
        plan = matrix.decode_matrix(shape.data_rows, shape.parity_rows, lost, kept_parity)
        factors = tuple(tuple(map(int, row)) for row in plan.coefficients)
        # Rows that are lost hold garbage: they must not be used.
        gone = jnp.asarray([row for row in range(shape.parity_rows) if row not in kept_parity], jnp.int32)
        damaged = data.at[jnp.asarray(lost)].set(0xDEADBEEF)
        run = jax.jit(lambda x, p: parity.decode(x, p, plan.survivors, factors, interpret=self.interpret))
        found = run(damaged, rows.at[gone].set(0x0BADF00D))
        np.testing.assert_array_equal(found, np.asarray(data)[list(lost)])
        np.testing.assert_array_equal(found, reference.decode(damaged, rows, plan.survivors, factors))

    def check_configs(self, shape: ParityShape, seed: int) -> None:
        """No setting changes a bit."""
        data = bits(seed, (shape.data_rows, shape.row_words))
        factors = coefficients(shape.data_rows, shape.parity_rows)
        for vectors, rows_per_step in itertools.product((1, 2), (1, 3)):
            config = parity.Config(vectors, rows_per_step)
            rows, sums = parity.encode(data, factors, page_words=shape.page_words, config=config, interpret=self.interpret)
            np.testing.assert_array_equal(rows, expected_parity(np.asarray(data), shape.parity_rows))
            np.testing.assert_array_equal(sums, expected_sums(np.asarray(data), shape.page_words))


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 100)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(SCHEDULE, weight_decay=0.01),
    "adam": lambda: optax.adam(1e-3),
    "sgd_momentum": lambda: optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
    "lion": lambda: optax.lion(SCHEDULE),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, mask={"a": True, "b": True})),
    "every_second": lambda: optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
}


class Chunk:
    """A chunk of a sliced optimizer, as the transaction would hold it."""

    def __init__(self, shape: UpdateShape, tx: Any, seed: int):
        self.shape = shape
        n, dtype = shape.elements, jnp.dtype(shape.param)
        half = jax.ShapeDtypeStruct((n // 2,), dtype)
        params = {"a": half, "b": jax.ShapeDtypeStruct((n - n // 2,), dtype)}
        sliced = slicing.slice_update(tx, params, grad_dtypes=[jnp.dtype(shape.grad)] * 2, compute_dtype=shape.copy)
        self.sliced, self.signature = sliced, sliced.signatures[0]
        assert len(sliced.signatures) == 1, "the leaves should share one update"
        assert self.signature.elementwise, self.signature.reason
        generator = np.random.default_rng(seed)
        make = lambda dtype, scale: jnp.asarray(generator.standard_normal(n, np.float32) * scale, jnp.dtype(dtype))
        self.grad = make(shape.grad, 1.0)
        self.lanes = tuple(
            jnp.abs(make(port.dtype, 1e-2)) if port.kind.startswith("state") else make(port.dtype, 0.1)
            for port in self.signature.inputs
            if port.kind != "grad"
        )
        self.scalars = tuple(
            jnp.asarray(generator.uniform(0.1, 0.9) if jnp.issubdtype(spec.dtype, jnp.floating) else True, spec.dtype)
            for spec in self.signature.value_specs
        )

    def update(self, scalars: Any, grad: Any, lanes: Any) -> tuple[jax.Array, ...]:
        kinds = [port.kind for port in self.signature.inputs if port.kind != "grad"]
        pieces = dict(zip(kinds, lanes, strict=True)) | {"grad": grad}
        return self.sliced.apply(self.signature, scalars, [pieces[port.kind] for port in self.signature.inputs], grad.shape)

    def update_or_skip(self, scalars: Any, grad: Any, lanes: Any) -> list[jax.Array]:
        """With a verdict as the last scalar, 1 to update: as `rmu.programs` has it."""
        *values, verdict = scalars
        new = self.update(values, grad, lanes)
        return [jnp.where(verdict == 1, a, b) for a, b in zip(new, lanes, strict=True)]

    @property
    def settings(self) -> dict[str, Any]:
        shape = self.shape
        factors = coefficients(shape.data_rows, shape.parity_rows)
        return {"data_rows": shape.data_rows, "coefficients": factors, "page_bytes": shape.page_bytes}


def moments(shape: UpdateShape) -> dict[str, Any]:
    return {"mu_dtype": jnp.dtype(shape.moment)} if shape.moment != shape.param else {}


class UpdateSuite:
    interpret: ClassVar[bool]
    shapes: ClassVar[tuple[UpdateShape, ...]]

    def run(self, chunk: Chunk, update: Any = None, **more: Any) -> fused.Updated:
        kernel = functools.partial(fused.fused_update, update or chunk.update, interpret=self.interpret, **chunk.settings, **more)
        return jax.jit(kernel)(chunk.scalars, chunk.grad, chunk.lanes)

    def check_guards(self, chunk: Chunk, updated: fused.Updated) -> None:
        """Parity and checksums are those of the bytes that were written, to the bit."""
        shape = chunk.shape
        assert len(updated.parity) == len(updated.checksums) == len(updated.lanes)
        for lane, rows, sums in zip(*updated, strict=True):
            words = row_words(lane, shape.data_rows)
            np.testing.assert_array_equal(rows, expected_parity(words, shape.parity_rows))
            np.testing.assert_array_equal(sums, expected_sums(words, shape.page_bytes // 4))

    def check_values(self, chunk: Chunk, updated: fused.Updated) -> None:
        """New lanes are XLA's, up to the rounding of contracted multiplications and divisions: a few units of the terms that are added."""
        plain = jax.jit(chunk.update)(chunk.scalars, chunk.grad, chunk.lanes)
        for found, expected in zip(updated.lanes, plain, strict=True):
            assert found.dtype == expected.dtype
            a, b = (np.asarray(x.astype(jnp.float32)) for x in (found, expected))
            unit = float(jnp.finfo(found.dtype).eps)
            np.testing.assert_allclose(a, b, rtol=4 * unit, atol=4 * unit * np.abs(b).max())

    def check_shape(self, shape: UpdateShape, seed: int) -> None:
        chunk = Chunk(shape, optax.adamw(SCHEDULE, weight_decay=0.01, **moments(shape)), seed)
        updated = self.run(chunk)
        self.check_guards(chunk, updated)
        self.check_values(chunk, updated)
        again = self.run(chunk)
        for first, second in zip(jax.tree.leaves(updated), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(np.asarray(first).view(np.uint8), np.asarray(second).view(np.uint8))

    def check_optimizer(self, name: str, shape: UpdateShape, seed: int) -> None:
        chunk = Chunk(shape, OPTIMIZERS[name](), seed)
        updated = self.run(chunk)
        self.check_guards(chunk, updated)
        self.check_values(chunk, updated)

    def check_skip(self, shape: UpdateShape, seed: int) -> None:
        """A step that is skipped by select keeps every bit, whatever the gradient holds."""
        chunk = Chunk(shape, optax.adamw(SCHEDULE), seed)
        chunk.grad = chunk.grad.at[::7].set(jnp.nan)

        chunk.scalars = (*chunk.scalars, jnp.int32(0))
        updated = self.run(chunk, chunk.update_or_skip)
        for found, old in zip(updated.lanes, chunk.lanes, strict=True):
            np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.asarray(old).view(np.uint8))
        self.check_guards(chunk, updated)
