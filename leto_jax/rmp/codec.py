"""The code of `reference`, to the bit, in XLA: pure functions to trace into a program of your own. Nothing here is jitted or executed.

Contract, order and names are those of `reference`; instead of uint8[D, N] there are D separate rows of **words**, uint32[W], four bytes of
the row in each word, in memory order (little-endian). `to_words` makes them. A uint32[D, W] array will do for a sequence of rows.

Three choices make the difference on the CPU backend (2 cores, D = 32, H = 2; see *Cost* of `encode`):

- Rows are sliced out first and reinterpreted one by one. Reinterpreting the whole array gives a copy of all data (3 instead of 18 GB/s).
- Multiplication by 2 works on packed bytes in ordinary 32-bit registers, so a row of any dtype compiles to the same loop.
- One output per parity row. `stack` and loops over rows (`fori_loop`, `scan`), or table look-ups, are several times slower.

Sources: H. P. Anvin, "The mathematics of RAID-6" (packed doubling, Horner); J. S. Plank et al., "Screaming fast Galois field arithmetic",
2013 (bit-major order).
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp

from leto_jax.errors import UsageError
from leto_jax.rmp.matrix import MAX_POWER_FORM_ROWS, check_lost, decode_matrix, parity_matrix

# D rows of uint32[W]; a uint32[D, W] array will do. Rows that are named as lost may be anything, None too.
type Rows = Sequence[jax.Array] | jax.Array

_BITS_OF_DTYPES = (8, 16, 32, 64)


def to_words(x_flat: jax.Array, rows: int) -> tuple[jax.Array, ...]:
    """Cut a flat array into `rows` equal rows of words: dtype[n] -> `rows` times uint32[n * itemsize / 4 / rows].

    The words' bytes are the bytes of the array. Any dtype of 1, 2, 4 or 8 bytes; bool counts as bytes 0 and 1. Raises `UsageError` for
    other dtypes and when the bytes do not divide into whole words per row.

    *Cost*: none when a consumer fuses it, as `encode` does.
    """
    plain = not jnp.issubdtype(x_flat.dtype, jax.dtypes.extended)  # extended: PRNG keys, whose bytes JAX hides
    if not (plain and x_flat.ndim == 1 and jax.dtypes.itemsize_bits(x_flat.dtype) in _BITS_OF_DTYPES):
        raise UsageError(f"to_words: expected a flat array of a dtype of 1, 2, 4 or 8 bytes, found {x_flat.dtype}{list(x_flat.shape)}")
    total = x_flat.size * x_flat.dtype.itemsize
    if rows < 1 or total % (4 * rows):
        raise UsageError(f"to_words: expected a multiple of 4 bytes in each of {rows} rows, found {total} bytes in all; pad the array")
    by_row = x_flat.reshape(rows, -1)
    return tuple(jax.lax.index_in_dim(by_row, row, keepdims=False).view(jnp.uint32) for row in range(rows))


def from_words(words: Rows, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Inverse of `to_words`, to the bit: rows of uint32[W] -> dtype[rows * W * 4 / itemsize]."""
    if not jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.concatenate([row.view(dtype) for row in words])
    # `view` makes complex numbers as real + 1j * imag, and that arithmetic loses denormals and NaNs.
    parts = from_words(words, jnp.float32).reshape(-1, 2)
    return jax.lax.complex(parts[:, 0], parts[:, 1])


def double(words: jax.Array) -> jax.Array:
    """2 * each byte in GF(2^8), four bytes at a time: uint32[...] -> uint32[...]."""
    # The product with 0x1d spreads over one byte only: its other factor is 0 or 1 in each byte.
    return ((words & jnp.uint32(0x7F7F7F7F)) << 1) ^ (((words >> 7) & jnp.uint32(0x01010101)) * jnp.uint32(0x1D))


def encode(words: Rows, parity_rows: int) -> tuple[jax.Array, ...]:
    """All parity rows: D times uint32[W] -> H times uint32[W], H = `parity_rows`.

    *Cost*: XLA on the CPU compiles one loop per parity row, each of which reads all data once; at H = 1 that is the memory bandwidth.
    """
    return tuple(_parity_row(words, parity_rows, row) for row in range(parity_rows))


def update(parity: Rows, data_rows: int, row_index: int, old: jax.Array, new: jax.Array) -> tuple[jax.Array, ...]:
    """The parity after data row `row_index` changed from `old` to `new` (uint32[W] each): H times uint32[W] -> H times uint32[W].

    *Cost*: reads old, new and all parity rows, writes the parity rows.
    """
    check_lost("data", [row_index], data_rows)
    column = parity_matrix(data_rows, len(parity))[:, row_index].tolist()
    delta = old ^ new
    return tuple(row ^ _combine([delta], [factor]) for row, factor in zip(parity, column, strict=True))


def verify(words: Rows, parity: Rows) -> jax.Array:
    """Which parity rows agree with the data: bool[H]. *Cost*: as `encode`."""
    expected = encode(words, len(parity))
    return jnp.array([jnp.all(row == found) for row, found in zip(expected, parity, strict=True)], bool)


def reconstruct(
    words: Rows, parity: Rows, lost_data: Iterable[int] = (), lost_parity: Iterable[int] = ()
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """The lost data rows and the lost parity rows, each ascending, as uint32[W]. The erasure pattern is static: one program per pattern.

    *Cost*: reads the D rows that it uses once per rebuilt data row, and all data once per rebuilt parity row.
    """
    data_rows, parity_rows = len(words), len(parity)
    absent = check_lost("data", lost_data, data_rows), check_lost("parity", lost_parity, parity_rows)
    plan = decode_matrix(data_rows, parity_rows, absent[0], [row for row in range(parity_rows) if row not in absent[1]])
    rows = [*words, *parity]
    rebuilt = tuple(_combine([rows[row] for row in plan.survivors], factors) for factors in plan.coefficients.tolist())
    for row, value in zip(absent[0], rebuilt, strict=True):
        rows[row] = value
    return rebuilt, tuple(_parity_row(rows[:data_rows], parity_rows, row) for row in absent[1])


def page_checksums(words: jax.Array) -> jax.Array:
    """`checksum.page_checksums_np` in XLA: uint32[..., page_words] -> uint32[..., 2].

    *Cost*: reads the words once, at memory bandwidth.
    """
    weights = jax.lax.broadcasted_iota(jnp.uint32, words.shape, words.ndim - 1) + 1
    zero = jnp.uint32(0)
    # One reduction with two results. XLA on the CPU does not vectorise two separate sums (3 instead of 47 GB/s).
    sums = jax.lax.reduce(
        (words, (words ^ (words >> 16)) * weights), (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), (words.ndim - 1,)
    )
    return jnp.stack(sums, axis=-1)


def _parity_row(words: Rows, parity_rows: int, row: int) -> jax.Array:
    factors = parity_matrix(len(words), parity_rows)[row].tolist()
    # Horner takes one pass over the rows, whatever D is, while bit-major order visits each row up to 8 times. But from row 2 on Horner
    # needs two doublings per data row, and bit-major order is faster (measured).
    if parity_rows > MAX_POWER_FORM_ROWS or row > 1:
        return _combine(words, factors)
    accumulator = words[0]
    for data_row in range(1, len(words)):
        accumulator = (double(accumulator) if row == 1 else accumulator) ^ words[data_row]
    return accumulator


def _combine(rows: Rows, factors: Sequence[int]) -> jax.Array:
    """XOR over i of factors[i] * rows[i], not all factors zero. Bit-major: Horner over the factors' bits, so 7 doublings serve all rows."""
    accumulator = None
    for bit in range(max(factors).bit_length() - 1, -1, -1):
        if accumulator is not None:
            accumulator = double(accumulator)
        for row, factor in zip(rows, factors, strict=True):
            if factor >> bit & 1:
                accumulator = row if accumulator is None else accumulator ^ row
    assert accumulator is not None
    return accumulator
