"""The code is MDS: every square minor of the parity matrix is nonzero, by brute force for every supported size."""

import itertools

import numpy as np
import pytest

from leto_jax.errors import TooManyErasuresError, UsageError
from leto_jax.rmp import gf256
from leto_jax.rmp.matrix import MAX_DATA_ROWS, MAX_PARITY_ROWS, MAX_POWER_FORM_ROWS, decode_matrix, parity_matrix

SEED = 2
EVERY_H = range(MAX_PARITY_ROWS + 1)


def pair_minors(matrix: np.ndarray, first: int, second: int) -> np.ndarray:
    """uint8[D, D]: the 2x2 minors of two rows, for all pairs of columns."""
    product = gf256.mul(matrix[first][:, None], matrix[second][None, :])
    return product ^ product.T


def assert_all_minors_nonzero(matrix: np.ndarray) -> None:
    """Brute force over all rows and columns, by Laplace expansion into 2x2 minors. There are no signs in characteristic 2."""
    parity_rows, data_rows = matrix.shape
    table = gf256.mul_table()
    assert matrix.all(), "1x1"
    upper = np.triu_indices(data_rows, 1)
    pairs = {rows: pair_minors(matrix, *rows) for rows in itertools.combinations(range(parity_rows), 2)}
    for rows, minors in pairs.items():
        assert minors[upper].all(), f"2x2 of rows {rows}"
    for rows in itertools.combinations(range(parity_rows), 3):
        others = [tuple(other for other in rows if other != row) for row in rows]
        for a in range(data_rows):
            b, c = (a + 1 + half for half in np.triu_indices(data_rows - a - 1, 1))
            minors = np.bitwise_xor.reduce([table[matrix[row, a]][pairs[pair][b, c]] for row, pair in zip(rows, others, strict=True)])
            assert minors.all(), f"3x3 of rows {rows}, first column {a}"
    if parity_rows == 4:
        splits = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]
        for b in range(1, data_rows):
            c, d = (b + 1 + half for half in np.triu_indices(data_rows - b - 1, 1))
            right = {rows: minors[c, d] for rows, minors in pairs.items()}
            for a in range(b):
                minors = np.zeros(len(c), np.uint8)
                for left_rows, right_rows in splits:
                    minors ^= table[pairs[left_rows][a, b]][right[right_rows]] ^ table[pairs[right_rows][a, b]][right[left_rows]]
                assert minors.all(), f"4x4, columns {a}, {b} and two more"


def test_the_brute_force_finds_singular_minors():
    good = parity_matrix(12, 4)
    for rows, columns in [([1], [5]), ([0, 2], [3, 7]), ([0, 1, 3], [0, 4, 9]), ([0, 1, 2, 3], [2, 3, 5, 11])]:
        bad = good.copy()
        # The last row of the minor becomes a combination of the others; random factors keep its other minors regular, mostly.
        factors = np.array([17, 91, 200][: len(rows) - 1], np.uint8)
        bad[rows[-1], columns] = gf256.matmul(factors[None], good[np.ix_(rows[:-1], columns)])[0] if len(rows) > 1 else 0
        with pytest.raises(AssertionError):
            assert_all_minors_nonzero(bad)
    # The power form with a fourth row is not MDS, which is why H = 4 has a Cauchy matrix.
    power_form = gf256.power(gf256.power(2, np.arange(4)[:, None]), np.arange(128)[::-1])
    with pytest.raises(AssertionError):
        assert_all_minors_nonzero(power_form)


@pytest.mark.parametrize("parity_rows", range(1, MAX_PARITY_ROWS + 1))
def test_code_is_mds_for_every_size(parity_rows):
    """Exhaustive at D = 128. Smaller D follow, since their matrices are columns of this one (next test)."""
    assert_all_minors_nonzero(parity_matrix(MAX_DATA_ROWS, parity_rows))


@pytest.mark.parametrize("data_rows", range(1, MAX_DATA_ROWS + 1))
def test_matrices_of_all_sizes_are_parts_of_the_largest(data_rows):
    for parity_rows in range(MAX_POWER_FORM_ROWS + 1):
        part = parity_matrix(MAX_DATA_ROWS, MAX_POWER_FORM_ROWS)[:parity_rows, MAX_DATA_ROWS - data_rows :]
        np.testing.assert_array_equal(parity_matrix(data_rows, parity_rows), part)
    np.testing.assert_array_equal(parity_matrix(data_rows, 4), parity_matrix(MAX_DATA_ROWS, 4)[:, :data_rows])


def test_power_form_minors_are_shift_invariant():
    """Shifting columns scales row h by a power of 2**h, so the minors with the last column stand for all. A second proof, up to D = 255."""
    rows = gf256.power(gf256.power(2, np.arange(3)[:, None]), np.arange(255))  # column d is the exponent D - 1 - d
    np.testing.assert_array_equal(rows[:, 1:], gf256.mul(rows[:, :-1], np.array([[1], [2], [4]])))
    assert rows.all()
    pairs = {pair: pair_minors(rows, *pair) for pair in [(0, 1), (0, 2), (1, 2)]}
    for minors in pairs.values():
        assert minors[0, 1:].all()
    b, c = (1 + half for half in np.triu_indices(254, 1))
    assert (pairs[1, 2][b, c] ^ pairs[0, 2][b, c] ^ pairs[0, 1][b, c]).all()  # rows[:, 0] is all ones


def test_shape_of_the_matrix():
    for parity_rows in EVERY_H:
        matrix = parity_matrix(5, parity_rows)
        assert matrix.shape == (parity_rows, 5)
        assert matrix.dtype == np.uint8
        assert not matrix.flags.writeable
        assert (matrix[:1] == 1).all(), "row 0 is the XOR"
    # 4**4 = 256 = 0x1d modulo 0x11d.
    np.testing.assert_array_equal(parity_matrix(5, 3), [[1, 1, 1, 1, 1], [16, 8, 4, 2, 1], [29, 64, 16, 4, 1]])
    # By hand from the Cauchy formula: 4 / (h ^ 4) for the first column.
    np.testing.assert_array_equal(parity_matrix(5, 4)[:, 0], [gf256.div(4, 4 ^ h) for h in range(4)])


@pytest.mark.parametrize(("data_rows", "parity_rows", "text"), [
    (0, 1, "expected 1 to 128 data rows, found 0"),
    (129, 1, "expected 1 to 128 data rows, found 129"),
    (8, 5, "expected 0 to 4 parity rows, found 5"),
    (8, -1, "expected 0 to 4 parity rows, found -1"),
])  # fmt: skip
def test_unsupported_sizes(data_rows, parity_rows, text):
    with pytest.raises(UsageError, match=text):
        parity_matrix(data_rows, parity_rows)


def test_decode_matrix_inverts_the_code():
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    for data_rows, parity_rows in itertools.product([1, 2, 5, 31, 128], EVERY_H):
        generator = np.concatenate([np.eye(data_rows, dtype=np.uint8), parity_matrix(data_rows, parity_rows)])
        for losses in range(min(data_rows, parity_rows) + 1):
            lost = rng.choice(data_rows, losses, replace=False)
            available = rng.choice(parity_rows, rng.integers(losses, parity_rows + 1), replace=False)
            survivors, coefficients = decode_matrix(data_rows, parity_rows, lost, available)
            assert len(survivors) == data_rows
            assert not set(survivors) & set(lost.tolist())
            assert [row - data_rows for row in survivors if row >= data_rows] == sorted(available.tolist())[:losses]
            np.testing.assert_array_equal(gf256.matmul(coefficients, generator[list(survivors)]), generator[sorted(lost)])


def test_one_loss_with_row_0_is_an_xor():
    plan = decode_matrix(8, 2, [3], [0, 1])
    assert plan.survivors == (0, 1, 2, 4, 5, 6, 7, 8)
    assert (plan.coefficients == 1).all()


def test_too_many_erasures():
    with pytest.raises(TooManyErasuresError) as caught:
        decode_matrix(8, 3, [7, 2, 5], [2, 0])
    assert str(caught.value) == (
        "protection group of 8 data and 3 parity rows: 3 data rows are lost (2, 5, 7), but only 2 parity rows are intact (0, 2); "
        "expected at most as many losses as intact parity rows. Restore these pages from another tier (host parity, checkpoint)"
    )


@pytest.mark.parametrize(("lost", "available", "text"), [
    ([8], [0], r"expected different data rows in 0\.\.7, found \(8,\)"),
    ([1, 1], [0, 1], r"expected different data rows in 0\.\.7, found \(1, 1\)"),
    ([1], [-1], r"expected different parity rows in 0\.\.1, found \(-1,\)"),
])  # fmt: skip
def test_row_numbers_are_checked(lost, available, text):
    with pytest.raises(UsageError, match=text):
        decode_matrix(8, 2, lost, available)
