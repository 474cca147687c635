"""Reed-Solomon over rows of bytes, by table look-up. NumPy only. The truth that other codecs must equal to the bit, and what repair runs.

The contract, for every function here and for its twin in `codec`:

- **Order.** A group is D data rows and H parity rows of N bytes; the rows' order is part of the code. Parity row 0 is the XOR of the data.
- **Sizes.** D in 1..128, H in 0..4, N any number of bytes, 0 included. All rows have the same length. D and H follow from the rows that
  are passed, so pass all of them, lost ones too: a subset of the rows is another code, and gives wrong bytes without an error.
- **Ownership.** Arguments are read, never written and not kept; results are new arrays. Arguments may be read-only or strided views.
- **Not checked.** Nobody can see from the bytes which rows are good: `reconstruct` believes that every row not named as lost is intact, and
  `update` that `old` is what the parity covers. Call `verify`, or compare checksums, where that is not certain.
- **Errors.** `UsageError` for shapes, dtypes and row numbers, `TooManyErasuresError` when more rows are lost than there are parity rows.

Source: klauspost/reedsolomon, interface `Encoder`, for verbs and contract. *Cost*: each coefficient that is neither 0 nor 1 costs one
look-up per byte (about 2 GB/s on one core), a coefficient 1 is an XOR (about 10 times as fast). Nothing is threaded.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from leto_jax.errors import UsageError
from leto_jax.rmp import gf256
from leto_jax.rmp.gf256 import Bytes
from leto_jax.rmp.matrix import check_lost, check_rows, decode_matrix, parity_matrix

# Bytes of a row that are worked on at a time: accumulator, row and product stay in the L2 cache.
_BLOCK = 1 << 16


def encode(data: Bytes, parity_rows: int) -> Bytes:
    """All parity rows: uint8[D, N] -> uint8[H, N], H = `parity_rows`."""
    _check_group("data", data)
    return _combine(data, parity_matrix(len(data), parity_rows))


def update(parity: Bytes, data_rows: int, row_index: int, old: Bytes, new: Bytes) -> Bytes:
    """The parity after data row `row_index` changed from `old` to `new`: uint8[H, N], uint8[N], uint8[N] -> uint8[H, N].

    `data_rows` is D: the coefficients depend on it.
    """
    _check_group("parity", parity)
    check_lost("data", [row_index], data_rows)
    if not parity.shape[1:] == old.shape == new.shape:
        raise UsageError(f"update: expected old and new of shape {parity.shape[1:]}, found {old.shape} and {new.shape}")
    delta = (old ^ new)[None]
    return parity ^ _combine(delta, parity_matrix(data_rows, len(parity))[:, row_index : row_index + 1])


def verify(data: Bytes, parity: Bytes) -> np.ndarray:
    """Which parity rows agree with the data: uint8[D, N], uint8[H, N] -> bool[H].

    One wrong data row makes every parity row disagree; one wrong parity row only itself.
    """
    _check_same_length(data, parity)
    return np.all(encode(data, len(parity)) == parity, axis=1)


def reconstruct(data: Bytes, parity: Bytes, lost_data: Iterable[int] = (), lost_parity: Iterable[int] = ()) -> tuple[Bytes, Bytes]:
    """The lost rows, from the others: uint8[D, N], uint8[H, N] -> (uint8[len(lost_data), N], uint8[len(lost_parity), N]), ascending.

    What `data` and `parity` hold at lost rows is not looked at. Up to H rows may be lost, data and parity rows alike.
    """
    _check_same_length(data, parity)
    data_rows, parity_rows = len(data), len(parity)
    absent = check_lost("data", lost_data, data_rows), check_lost("parity", lost_parity, parity_rows)
    plan = decode_matrix(data_rows, parity_rows, absent[0], [row for row in range(parity_rows) if row not in absent[1]])
    rows = [*data, *parity]
    rebuilt = _combine([rows[row] for row in plan.survivors], plan.coefficients)
    for row, value in zip(absent[0], rebuilt, strict=True):
        rows[row] = value
    return rebuilt, _combine(rows[:data_rows], parity_matrix(data_rows, parity_rows)[list(absent[1])])


def _combine(rows: Sequence[Bytes] | Bytes, coefficients: Bytes) -> Bytes:
    """coefficients @ rows over GF(2^8): uint8[m, k] @ uint8[k, N] -> uint8[m, N]."""
    length = len(rows[0])
    out = np.zeros((len(coefficients), length), np.uint8)
    table = gf256.mul_table()
    for start in range(0, length, _BLOCK):
        block = slice(start, start + _BLOCK)
        for accumulator, factors in zip(out[:, block], coefficients, strict=True):
            for row, factor in zip(rows, factors, strict=True):
                if factor == 1:
                    accumulator ^= row[block]
                elif factor:
                    # bytes.translate is the fastest 256-entry look-up at hand: NumPy's take widens every index to 8 bytes first.
                    accumulator ^= np.frombuffer(row[block].tobytes().translate(table[factor]), np.uint8)
    return out


def _check_group(what: str, rows: Bytes) -> None:
    if rows.dtype != np.uint8 or rows.ndim != 2:
        raise UsageError(f"{what} rows: expected uint8[rows, bytes], found {rows.dtype}{list(rows.shape)}; use .view(numpy.uint8)")


def _check_same_length(data: Bytes, parity: Bytes) -> None:
    _check_group("data", data)
    _check_group("parity", parity)
    check_rows(len(data), len(parity))
    if data.shape[1] != parity.shape[1]:
        found = f"{data.shape[1]} and {parity.shape[1]} bytes"
        raise UsageError(f"protection group: expected data and parity rows of equal length, found {found}")
