"""The erasure code as matrices: how parity rows depend on data rows, and how lost data rows follow from what is left. NumPy only.

A protection group has D data rows and H parity rows. `parity = P @ data` over GF(2^8), with P = `parity_matrix(D, H)` of shape [H, D].
The code is MDS: **any** D of the D + H rows give back all others, because every square minor of P is nonzero.

H <= 3, the power form: P[h, d] = (2**h) ** (D - 1 - d). A Horner loop over the data rows computes it with multiplications by 2 only:
``acc = 2**h * acc ^ row``. With x_d = 2**(D - 1 - d), all different for D <= 255, the rows are x**0, x**1 and x**2, so

- 1x1 minors are powers of 2;
- 2x2 minors are a power of 2 times (x_a ^ x_b) or (x_a**2 ^ x_b**2) = (x_a ^ x_b)**2;
- 3x3 minors are Vandermonde determinants, products of the (x_a ^ x_b).

H = 4, where a fourth power row would make singular minors: a Cauchy matrix C[h, d] = 1 / (h ^ (4 + d)), whose columns are scaled so that
row 0 is all ones: P[h, d] = (4 + d) / (h ^ (4 + d)). The x = {0..3} and y = {4..D+3} are disjoint for D <= 252. Every square sub-matrix
of a Cauchy matrix is a Cauchy matrix, its determinant prod (x_i ^ x_j)(y_i ^ y_j) / prod (x_i ^ y_j) is nonzero, and scaling a column by
a nonzero factor keeps that.

So row 0 is always the XOR of the data, P for H = 1 and 2 are the first rows of P for H = 3 (not of P for H = 4), and a group with fewer
data rows is one with zero rows in front (H <= 3) or behind (H = 4). `tests/unit/test_rs_matrix.py` checks the minors by brute force.

Source: H. P. Anvin, "The mathematics of RAID-6"; J. Blömer et al., "An XOR-based erasure-resilient coding scheme", 1995.
"""

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import numpy as np

from leto_jax.errors import TooManyErasuresError, UsageError
from leto_jax.rmp import gf256
from leto_jax.rmp.gf256 import Bytes

MAX_DATA_ROWS = 128
MAX_PARITY_ROWS = 4
MAX_POWER_FORM_ROWS = 3  # parity rows up to which P has the power form, else the Cauchy form


class DecodeMatrix(NamedTuple):
    """Lost data rows = `coefficients` @ the rows of `survivors`, in that order.

    `survivors`: D row numbers; 0..D-1 are data rows, D + h is parity row h. Data rows come first, each group ascending.
    `coefficients`: uint8[number of lost data rows, D]; row i rebuilds the i-th lost data row in ascending order.
    """

    survivors: tuple[int, ...]
    coefficients: Bytes


def check_rows(data_rows: int, parity_rows: int) -> None:
    """Raise `UsageError` unless 1 <= D <= 128 and 0 <= H <= 4."""
    if not 1 <= data_rows <= MAX_DATA_ROWS:
        raise UsageError(f"protection group: expected 1 to {MAX_DATA_ROWS} data rows, found {data_rows}")
    if not 0 <= parity_rows <= MAX_PARITY_ROWS:
        raise UsageError(f"protection group: expected 0 to {MAX_PARITY_ROWS} parity rows, found {parity_rows}")


def check_lost(what: str, lost: Iterable[int], rows: int) -> tuple[int, ...]:
    """`lost` as ascending ints. Raises `UsageError`, naming the rows as `what`, unless they are different row numbers in 0..rows-1."""
    ordered = tuple(sorted(int(row) for row in lost))
    if len(set(ordered)) != len(ordered) or (ordered and not 0 <= ordered[0] <= ordered[-1] < rows):
        raise UsageError(f"protection group: expected different {what} rows in 0..{rows - 1}, found {ordered}")
    return ordered


@cache
def parity_matrix(data_rows: int, parity_rows: int) -> Bytes:
    """P of the module's docstring: uint8[H, D], read-only. Raises `UsageError` for sizes that are not supported."""
    check_rows(data_rows, parity_rows)
    h = np.arange(parity_rows)[:, None]
    if parity_rows <= MAX_POWER_FORM_ROWS:
        matrix = gf256.power(gf256.power(gf256.GENERATOR, h), np.arange(data_rows)[::-1])
    else:
        y = MAX_PARITY_ROWS + np.arange(data_rows)
        matrix = gf256.div(y, h ^ y)
    matrix.flags.writeable = False
    return matrix


def decode_matrix(data_rows: int, parity_rows: int, lost_data: Iterable[int], available_parity: Iterable[int]) -> DecodeMatrix:
    """How to rebuild the data rows `lost_data` from the others and the first `len(lost_data)` of the parity rows `available_parity`.

    A single loss with parity row 0 available has coefficients that are all 1: a plain XOR.

    Raises `TooManyErasuresError` if fewer parity rows are available than data rows are lost, `UsageError` for bad row numbers or sizes.
    """
    check_rows(data_rows, parity_rows)
    lost = check_lost("data", lost_data, data_rows)
    available = check_lost("parity", available_parity, parity_rows)
    if len(lost) > len(available):
        raise TooManyErasuresError(
            f"protection group of {data_rows} data and {parity_rows} parity rows: {len(lost)} data rows are lost {lost}, "
            f"but only {len(available)} parity rows are intact {available}; expected at most as many losses as intact parity rows. "
            "Restore these pages from another tier (host parity, checkpoint)"
        )
    used = available[: len(lost)]
    kept = [row for row in range(data_rows) if row not in lost]
    # parity[used] = P[used, kept] @ data[kept] + P[used, lost] @ data[lost], solved for data[lost]. Only an L x L system, L <= 4.
    chosen = parity_matrix(data_rows, parity_rows)[list(used)]
    known = np.concatenate([chosen[:, kept], np.eye(len(used), dtype=np.uint8)], axis=1)
    coefficients = gf256.matmul(gf256.inverse(chosen[:, list(lost)]), known)
    return DecodeMatrix((*kept, *(data_rows + row for row in used)), coefficients)
