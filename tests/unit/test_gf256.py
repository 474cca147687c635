"""The field laws, over all cases: 256, 256**2 or 256**3 of them."""

import numpy as np
import pytest

from leto_jax.errors import UsageError
from leto_jax.rmp import gf256

SEED = 1
ALL = np.arange(256)
A, B = ALL[:, None], ALL[None, :]


def shift_and_add(a: int, b: int) -> int:
    """The definition: the product of two polynomials over GF(2), reduced modulo 0x11d."""
    product = 0
    for bit in range(8):
        if b >> bit & 1:
            product ^= a << bit
    for bit in range(14, 7, -1):
        if product >> bit & 1:
            product ^= 0x11D << (bit - 8)
    return product


def test_products_follow_the_definition():
    expected = [[shift_and_add(a, b) for b in range(256)] for a in range(256)]
    np.testing.assert_array_equal(gf256.mul(A, B), expected)
    np.testing.assert_array_equal(gf256.mul_table(), expected)


def test_two_generates_the_multiplicative_group():
    assert sorted(gf256.EXP[: gf256.ORDER].tolist()) == list(range(1, 256))
    np.testing.assert_array_equal(gf256.EXP[gf256.LOG[1:]], ALL[1:])


def test_ring_laws_for_all_triples():
    table = gf256.mul_table()
    c = ALL[None, None, :]
    for a in range(256):  # one slab of 256**2 at a time, to keep memory small
        ab = table[a, ALL]
        np.testing.assert_array_equal(table[ab[:, None], c[0]], table[a, table], err_msg="(a*b)*c = a*(b*c)")
        np.testing.assert_array_equal(table[a, A ^ B], ab[:, None] ^ ab[None, :], err_msg="a*(b+c) = a*b + a*c")


def test_commutative_with_neutral_and_zero():
    table = gf256.mul_table()
    np.testing.assert_array_equal(table, table.T)
    np.testing.assert_array_equal(table[1], ALL)
    assert not table[0].any()
    assert table[1:, 1:].all(), "no zero divisors"


def test_division_undoes_multiplication():
    nonzero = ALL[1:]
    np.testing.assert_array_equal(gf256.mul(nonzero, gf256.inv(nonzero)), np.ones(255))
    np.testing.assert_array_equal(gf256.div(gf256.mul(A, nonzero), nonzero), np.broadcast_to(A, (256, 255)))


@pytest.mark.parametrize("divide", [lambda: gf256.inv([3, 0]), lambda: gf256.div(1, [[0]])])
def test_division_by_zero_is_an_error(divide):
    with pytest.raises(UsageError, match=r"expected nonzero elements to invert or divide by, found a zero"):
        divide()


def test_power_is_repeated_multiplication():
    expected = np.ones(256, np.uint8)
    for n in range(600):  # more than twice around the group
        np.testing.assert_array_equal(gf256.power(ALL, n), expected)
        expected = gf256.mul(expected, ALL)
    with pytest.raises(UsageError, match="expected exponents >= 0, found -1"):
        gf256.power(2, [1, -1])


def test_matrix_product_and_inverse():
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    regular = 0
    for n in [1, 2, 3, 4, 7] * 20:
        matrix, other = rng.integers(0, 256, (2, n, n), np.uint8)
        products = [[[shift_and_add(int(matrix[i, k]), int(other[k, j])) for k in range(n)] for j in range(n)] for i in range(n)]
        slow = np.bitwise_xor.reduce(products, axis=-1)
        np.testing.assert_array_equal(gf256.matmul(matrix, other), slow)
        try:
            inverse = gf256.inverse(matrix)
        except UsageError:
            continue
        regular += 1
        np.testing.assert_array_equal(gf256.matmul(matrix, inverse), np.eye(n))
        np.testing.assert_array_equal(gf256.matmul(inverse, matrix), np.eye(n))
    assert regular >= 90


def test_inverse_needs_row_exchange():
    np.testing.assert_array_equal(gf256.inverse([[0, 1], [1, 0]]), [[0, 1], [1, 0]])


@pytest.mark.parametrize("singular", [[[0]], [[1, 2], [1, 2]], [[1, 2, 3], [2, 4, 6], [5, 9, 1]]])
def test_inverse_of_singular_matrix_is_an_error(singular):
    with pytest.raises(UsageError, match=r"expected a regular matrix, found one of rank < \d \(no pivot in column \d\)"):
        gf256.inverse(singular)


def test_shapes_are_checked():
    with pytest.raises(UsageError, match=r"expected shape \[n, n\], found \(1, 2\)"):
        gf256.inverse([[1, 2]])
    with pytest.raises(UsageError, match=r"expected shapes \[m, k\] and \[k, n\], found \(1, 2\) and \(1, 2\)"):
        gf256.matmul([[1, 2]], [[1, 2]])
