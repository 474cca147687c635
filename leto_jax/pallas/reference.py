"""What the kernels compute, in plain XLA: no tiles, no tricks, any shape. Kernels equal it to the bit, updates up to rounding of the compiler.

Each function has the name and the arguments of its kernel. Nothing here is meant to be fast; `rmp.codec` is.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from leto_jax.pallas import words as arithmetic
from leto_jax.pallas.fused import Update, Updated
from leto_jax.pallas.words import Coefficients


def encode(data: jax.Array, coefficients: Coefficients, *, page_words: int | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Parity rows and page checksums: uint32[D, W] -> uint32[H, W], uint32[pages, 2] or None."""
    rows = [arithmetic.combine(list(data), factors) for factors in coefficients]
    parity = jnp.stack(rows) if rows else jnp.zeros((0, data.shape[1]), jnp.uint32)
    return parity, page_checksums(data, page_words) if page_words else None


def page_checksums(data: jax.Array, page_words: int) -> jax.Array:
    """uint32[D, W] -> uint32[D * W / page_words, 2]: sum of w_i, and sum of (i + 1) * (w_i ^ (w_i >> 16)), modulo 2**32."""
    pages = data.reshape(-1, page_words)
    weights = jnp.arange(1, page_words + 1, dtype=jnp.uint32)
    total = lambda x: jnp.sum(x, axis=-1, dtype=jnp.uint32)
    return jnp.stack([total(pages), total(arithmetic.fold(pages) * weights)], axis=-1)


def decode(data: jax.Array, parity: jax.Array, survivors: Sequence[int], coefficients: Coefficients) -> jax.Array:
    """The lost rows: uint32[lost, W]."""
    rows = [*data, *parity]
    return jnp.stack([arithmetic.combine([rows[row] for row in survivors], factors) for factors in coefficients])


def fused_update(
    function: Update,
    scalars: Sequence[jax.Array],
    grad: jax.Array | None,
    lanes: Sequence[jax.Array],
    *,
    data_rows: int,
    coefficients: Coefficients,
    page_bytes: int | None,
) -> Updated:
    """The update, then what guards its results."""
    new = tuple(function(tuple(scalars), grad, tuple(lanes)))
    guards = [encode(words_of(x, data_rows), coefficients, page_words=page_bytes // 4 if page_bytes else None) for x in new]
    return Updated(new, tuple(parity for parity, _ in guards), tuple(sums for _, sums in guards if sums is not None))


def words_of(lane: jax.Array, data_rows: int) -> jax.Array:
    """The bytes of a flat array as D rows of words."""
    return jax.lax.bitcast_convert_type(lane.reshape(-1, 4 // lane.dtype.itemsize).squeeze(), jnp.uint32).reshape(data_rows, -1)
