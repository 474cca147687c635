"""Arithmetic of the code and of the checksum on words: four bytes of a row in each uint32, little-endian. Traceable anywhere, kernels included.

The field is GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1; each byte of a word is an element of it.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

# One row of coefficients for each parity row, one coefficient (0..255) for each data row.
type Coefficients = tuple[tuple[int, ...], ...]

MAX_SHIFT = 2


def double(words: jax.Array) -> jax.Array:
    """2 * each byte: uint32[...] -> uint32[...]."""
    # The product with 0x1d stays within its byte, since its other factor is 0 or 1 there.
    return ((words & jnp.uint32(0x7F7F7F7F)) << 1) ^ (((words >> 7) & jnp.uint32(0x01010101)) * jnp.uint32(0x1D))


def fold(words: jax.Array) -> jax.Array:
    """What the second sum of a page checksum weighs: w ^ (w >> 16)."""
    return words ^ (words >> 16)


def horner_shift(factors: Sequence[int]) -> int | None:
    """h such that factors[d] = (2**h) ** (D - 1 - d) for all d: then ``acc = 2**h * acc ^ row`` computes the parity row. None if there is none."""
    for shift in range(MAX_SHIFT + 1):
        expected = 1
        for factor in reversed(factors):
            if factor != expected:
                break
            for _ in range(shift):
                expected = (expected << 1) ^ (0x11D if expected & 0x80 else 0)
        else:
            return shift
    return None


def horner_shifts(coefficients: Coefficients) -> tuple[int, ...] | None:
    """`horner_shift` of every row, None unless all of them have one."""
    shifts = tuple(shift for row in coefficients if (shift := horner_shift(row)) is not None)
    return shifts if len(shifts) == len(coefficients) else None


def horner(accumulator: jax.Array, words: jax.Array, shift: int) -> jax.Array:
    """One step: 2**shift * accumulator ^ words."""
    for _ in range(shift):
        accumulator = double(accumulator)
    return accumulator ^ words


def combine(rows: Sequence[jax.Array], factors: Sequence[int]) -> jax.Array:
    """XOR over i of factors[i] * rows[i], not all factors zero. Seven doublings serve all rows: Horner over the bits of the factors."""
    by_bit: list[jax.Array | None] = [None] * max(factors).bit_length()
    for row, factor in zip(rows, factors, strict=True):
        for bit in range(len(by_bit)):
            if factor >> bit & 1:
                held = by_bit[bit]
                by_bit[bit] = row if held is None else held ^ row
    return evaluate(by_bit)


def evaluate(by_bit: Sequence[jax.Array | None]) -> jax.Array:
    """XOR over bits b of 2**b * by_bit[b], where None is zero; at least one is not None."""
    accumulator: jax.Array | None = None
    for value in reversed(by_bit):
        accumulator = None if accumulator is None else double(accumulator)
        if value is not None:
            accumulator = value if accumulator is None else accumulator ^ value
    assert accumulator is not None
    return accumulator


def check_coefficients(coefficients: Coefficients, data_rows: int) -> None:
    """Raises ValueError unless there is one coefficient of 0..255 for each data row, and no row of zeros."""
    for number, row in enumerate(coefficients):
        if len(row) != data_rows or not all(0 <= factor <= 255 for factor in row) or not any(row):
            raise ValueError(f"coefficients of parity row {number}: expected {data_rows} values in 0..255, not all zero, found {row}")
