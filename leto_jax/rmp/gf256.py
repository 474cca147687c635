"""Arithmetic in GF(2^8) = GF(2)[x] / (x^8 + x^4 + x^3 + x^2 + 1), the field 0x11d with generator 2. NumPy only.

It is the field of Linux RAID-6, ISA-L and klauspost/reedsolomon. Addition is XOR. All functions take and return uint8 arrays (or Python
ints in 0..255) and broadcast like NumPy; none modifies its arguments.

Source: H. P. Anvin, "The mathematics of RAID-6"; J. S. Plank, "A tutorial on Reed-Solomon coding for fault-tolerance in RAID-like systems".
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from leto_jax.errors import UsageError

type Bytes = npt.NDArray[np.uint8]

POLYNOMIAL = 0x11D
GENERATOR = 2
ORDER = 255  # of the multiplicative group

# "log 0". EXP is zero from here to the end, so a product with a zero factor needs no mask: LOG[0] + anything lands in the zeros.
_LOG_ZERO = 2 * ORDER


def _tables() -> tuple[Bytes, npt.NDArray[np.int32]]:
    exp = np.zeros(2 * _LOG_ZERO + 1, np.uint8)
    log = np.full(256, _LOG_ZERO, np.int32)
    value = 1
    for power_of_two in range(ORDER):
        exp[power_of_two] = exp[power_of_two + ORDER] = value
        log[value] = power_of_two
        value = (value << 1) ^ (POLYNOMIAL if value & 0x80 else 0)
    exp.flags.writeable = log.flags.writeable = False
    return exp, log


# EXP[i] = 2**i for 0 <= i < 510, then zeros. LOG[EXP[i]] = i mod 255.
EXP, LOG = _tables()


def mul(a: npt.ArrayLike, b: npt.ArrayLike) -> Bytes:
    """Product, elementwise: uint8[...] x uint8[...] -> uint8[...]."""
    return EXP[LOG[np.asarray(a)] + LOG[np.asarray(b)]]


def inv(a: npt.ArrayLike) -> Bytes:
    """Inverse, elementwise. Raises `UsageError` if any element is zero."""
    if not np.all(a):
        raise UsageError("GF(2^8): expected nonzero elements to invert or divide by, found a zero")
    return EXP[ORDER - LOG[np.asarray(a)]]


def div(a: npt.ArrayLike, b: npt.ArrayLike) -> Bytes:
    """Quotient a / b, elementwise. Raises `UsageError` if any element of `b` is zero."""
    return mul(a, inv(b))


def power(a: npt.ArrayLike, n: npt.ArrayLike) -> Bytes:
    """a**n, elementwise, for integers n >= 0 (not field elements); 0**0 = 1. Raises `UsageError` for a negative n."""
    base, exponent = np.asarray(a), np.asarray(n, np.int64)
    if np.any(exponent < 0):
        raise UsageError(f"GF(2^8): expected exponents >= 0, found {int(exponent.min())}")
    result = EXP[LOG[base].astype(np.int64) * exponent % ORDER]
    return np.where(base != 0, result, np.where(exponent == 0, 1, 0)).astype(np.uint8)


def matmul(a: npt.ArrayLike, b: npt.ArrayLike) -> Bytes:
    """Matrix product uint8[m, k] x uint8[k, n] -> uint8[m, n]. For small matrices: it holds all m*k*n products at once."""
    left, right = np.asarray(a), np.asarray(b)
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
        raise UsageError(f"GF(2^8) matrix product: expected shapes [m, k] and [k, n], found {left.shape} and {right.shape}")
    return np.bitwise_xor.reduce(mul(left[:, :, None], right[None, :, :]), axis=1)


def inverse(matrix: npt.ArrayLike) -> Bytes:
    """Inverse of a square matrix, uint8[n, n] -> uint8[n, n], by Gauss-Jordan elimination. Raises `UsageError` if it is singular."""
    source = np.asarray(matrix)
    if source.ndim != 2 or source.shape[0] != source.shape[1]:
        raise UsageError(f"GF(2^8) matrix inverse: expected shape [n, n], found {source.shape}")
    n = len(source)
    work = np.concatenate([source, np.eye(n)], axis=1).astype(np.uint8)
    for column in range(n):
        pivots = np.flatnonzero(work[column:, column])
        if not len(pivots):
            raise UsageError(f"GF(2^8) matrix inverse: expected a regular matrix, found one of rank < {n} (no pivot in column {column})")
        work[[column, column + pivots[0]]] = work[[column + pivots[0], column]]
        work[column] = div(work[column], work[column, column])
        factors = work[:, column].copy()
        factors[column] = 0
        work ^= mul(factors[:, None], work[column])
    return work[:, n:].copy()


@cache
def mul_table() -> Bytes:
    """All products, uint8[256, 256], read-only: row c is the 256-entry table of "times c"."""
    every = np.arange(256)
    table = mul(every[:, None], every[None, :])
    table.flags.writeable = False
    return table
