"""The NumPy reference against the matrices, and the XLA codec against the reference, to the bit."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leto_jax.errors import TooManyErasuresError, UsageError
from leto_jax.rmp import codec, gf256, reference
from leto_jax.rmp.matrix import parity_matrix

SEED = 3
DTYPES = ["float32", "bfloat16", "int8", "uint8", "float16", "int16", "uint32", "bool", "float8_e4m3fn", "complex64"]
SIZES = [(1, 1), (1, 4), (2, 0), (3, 2), (7, 3), (16, 2), (16, 4), (32, 2)]
SMALL = [(total - parity_rows, parity_rows) for total in range(2, 11) for parity_rows in range(1, 5) if total > parity_rows]


@pytest.fixture
def rng():
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def random_rows(rng, *shape):
    return rng.integers(0, 256, shape, np.uint8)


def bytes_of(rows):
    """Rows of any dtype -> uint8[rows, N]."""
    return np.stack([np.frombuffer(np.asarray(row).tobytes(), np.uint8) for row in rows])


def erasure_patterns(data_rows, parity_rows):
    """(lost data rows, lost parity rows) for every set of up to H lost rows of the group."""
    for losses in range(parity_rows + 1):
        for lost in itertools.combinations(range(data_rows + parity_rows), losses):
            yield [row for row in lost if row < data_rows], [row - data_rows for row in lost if row >= data_rows]


# ---- reference


@pytest.mark.parametrize(("data_rows", "parity_rows"), SIZES)
@pytest.mark.parametrize("length", [0, 1, 1000, 70_000])  # 70,000: more than one block
def test_reference_is_the_matrix_product(rng, data_rows, parity_rows, length):
    data = random_rows(rng, data_rows, length)
    parity = reference.encode(data, parity_rows)
    assert parity.shape == (parity_rows, length)
    assert parity.dtype == np.uint8
    np.testing.assert_array_equal(parity, gf256.matmul(parity_matrix(data_rows, parity_rows), data))
    assert reference.verify(data, parity).tolist() == [True] * parity_rows


@pytest.mark.parametrize(("data_rows", "parity_rows"), SMALL)
def test_reference_rebuilds_every_erasure_pattern(rng, data_rows, parity_rows):
    data = random_rows(rng, data_rows, 24)
    parity = reference.encode(data, parity_rows)
    for lost_data, lost_parity in erasure_patterns(data_rows, parity_rows):
        damaged, damaged_parity = data.copy(), parity.copy()
        damaged[lost_data], damaged_parity[lost_parity] = random_rows(rng, 24), random_rows(rng, 24)
        rebuilt, rebuilt_parity = reference.reconstruct(damaged, damaged_parity, lost_data, lost_parity)
        np.testing.assert_array_equal(rebuilt, data[lost_data])
        np.testing.assert_array_equal(rebuilt_parity, parity[lost_parity])


@pytest.mark.parametrize(("data_rows", "parity_rows"), [(1, 1), (5, 2), (32, 3), (32, 4)])
def test_reference_update_equals_encoding_again(rng, data_rows, parity_rows):
    data = random_rows(rng, data_rows, 100)
    parity = reference.encode(data, parity_rows)
    for row in range(data_rows):
        changed = data.copy()
        changed[row] = random_rows(rng, 100)
        updated = reference.update(parity, data_rows, row, data[row], changed[row])
        np.testing.assert_array_equal(updated, reference.encode(changed, parity_rows))


def test_reference_verify_says_which_rows_differ(rng):
    data = random_rows(rng, 6, 50)
    parity = reference.encode(data, 3)
    parity[1, 49] ^= 1
    assert reference.verify(data, parity).tolist() == [True, False, True]
    data[2, 0] ^= 0x80
    assert reference.verify(data, parity).tolist() == [False, False, False]


def test_reference_leaves_its_arguments_alone(rng):
    data = random_rows(rng, 4, 2 * 64)[:, ::2]  # strided
    parity = reference.encode(data, 2)
    for array in (data, parity):
        array.flags.writeable = False
    copies = data.copy(), parity.copy()
    results = [reference.encode(data, 2), reference.update(parity, 4, 1, data[1], data[0]), *reference.reconstruct(data, parity, [0], [1])]
    assert not any(np.shares_memory(result, argument) for result in results for argument in (data, parity))
    np.testing.assert_array_equal(data, copies[0])
    np.testing.assert_array_equal(parity, copies[1])


@pytest.mark.parametrize("lost_parity", [[], [1]])
@pytest.mark.parametrize("module", [reference, codec])
def test_more_losses_than_parity_is_an_error(rng, module, lost_parity):
    data, parity = random_rows(rng, 5, 8), random_rows(rng, 2, 8)
    if module is codec:
        data, parity = jnp.asarray(data.view(np.uint32)), jnp.asarray(parity.view(np.uint32))
    lost_data = [0, 4] if lost_parity else [0, 2, 4]
    text = rf"{len(lost_data)} data rows are lost \(0, .*but only {2 - len(lost_parity)} parity rows are intact \(0"
    with pytest.raises(TooManyErasuresError, match=text):
        module.reconstruct(data, parity, lost_data, lost_parity)


def test_reference_checks_its_arguments(rng):
    data, parity = random_rows(rng, 4, 8), random_rows(rng, 2, 8)
    with pytest.raises(UsageError, match=r"data rows: expected uint8\[rows, bytes\], found uint32\[4, 2\]; use .view"):
        reference.encode(data.view(np.uint32), 2)
    with pytest.raises(UsageError, match=r"expected data and parity rows of equal length, found 8 and 7 bytes"):
        reference.verify(data, parity[:, :7])
    with pytest.raises(UsageError, match=r"expected different data rows in 0\.\.3, found \(4,\)"):
        reference.update(parity, 4, 4, data[0], data[1])
    with pytest.raises(UsageError, match=r"update: expected old and new of shape \(8,\), found \(8,\) and \(7,\)"):
        reference.update(parity, 4, 0, data[0], data[1, :7])
    with pytest.raises(UsageError, match="expected 0 to 4 parity rows, found 5"):
        reference.encode(data, 5)


# ---- words


def random_array(rng, dtype, count):
    dtype = jnp.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(bool)
    return rng.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)  # any bits: NaNs and infinities too


def check_words(rng, dtype):
    x = random_array(rng, dtype, 96)
    device = jnp.asarray(x)
    assert device.dtype == x.dtype
    words = jax.jit(lambda x: codec.to_words(x, 3))(device)
    assert all(row.dtype == jnp.uint32 and row.shape == (x.nbytes // 12,) for row in words)
    assert b"".join(np.asarray(row).astype("<u4").tobytes() for row in words) == x.tobytes()
    back = jax.jit(lambda *words: codec.from_words(words, x.dtype))(*words)
    assert back.dtype == x.dtype
    assert np.asarray(back).tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_are_the_bytes_of_memory(rng, dtype):
    check_words(rng, dtype)


@pytest.mark.parametrize("dtype", ["float64", "int64"])
def test_words_of_eight_byte_dtypes(rng, dtype):
    with jax.enable_x64(True):
        check_words(rng, dtype)


@pytest.mark.parametrize(("x", "rows", "text"), [
    (np.zeros(10, np.float32), 3, r"expected a multiple of 4 bytes in each of 3 rows, found 40 bytes in all; pad the array"),
    (np.zeros(6, np.int8), 3, r"expected a multiple of 4 bytes in each of 3 rows, found 6 bytes"),
    (np.zeros((2, 6), np.float32), 2, r"expected a flat array of a dtype of 1, 2, 4 or 8 bytes, found float32\[2, 6\]"),
    (np.zeros(8, jnp.int4), 2, r"found int4\[8\]"),
    (jax.ShapeDtypeStruct((4,), jax.eval_shape(lambda: jax.random.key(0)).dtype), 2, r"found key<fry>\[4\]"),
])  # fmt: skip
def test_to_words_checks_its_arguments(x, rows, text):
    with pytest.raises(UsageError, match=text):
        jax.eval_shape(lambda x: codec.to_words(x, rows), x)


def test_double_is_multiplication_by_two():
    every = np.arange(256, dtype=np.uint8)
    # Every byte value in every position, with every neighbour that could spill over into it.
    grid = np.broadcast_arrays(every[:, None], every[None, :], every[:, None], every[None, :])
    words = np.stack(grid, axis=-1).reshape(-1).view(np.uint32)
    np.testing.assert_array_equal(np.asarray(codec.double(jnp.asarray(words))).view(np.uint8), gf256.mul(2, words.view(np.uint8)))


# ---- XLA = reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("data_rows", "parity_rows"), [(3, 2), (5, 4), (32, 2)])
def test_encode_equals_reference_for_every_dtype(rng, dtype, data_rows, parity_rows):
    x = random_array(rng, dtype, data_rows * 60)
    parity = jax.jit(lambda x: codec.encode(codec.to_words(x, data_rows), parity_rows))(jnp.asarray(x))
    assert isinstance(parity, tuple)
    expected = reference.encode(x.view(np.uint8).reshape(data_rows, -1), parity_rows)
    np.testing.assert_array_equal(bytes_of(parity), expected)


@pytest.mark.parametrize(("data_rows", "parity_rows"), [*SIZES, (128, 3), (128, 4)])
def test_encode_and_verify_equal_reference(rng, data_rows, parity_rows):
    data = random_rows(rng, data_rows, 4 * 37)
    words = jnp.asarray(data.view(np.uint32))
    parity = jax.jit(lambda words: codec.encode(words, parity_rows))(words)
    assert len(parity) == parity_rows
    if parity_rows:
        np.testing.assert_array_equal(bytes_of(parity), reference.encode(data, parity_rows))
    verify = jax.jit(codec.verify)
    assert verify(words, parity).tolist() == [True] * parity_rows
    for row in range(parity_rows):
        flip = np.zeros(37, np.uint32)
        flip[36] = 1 << 31
        damaged = tuple(value ^ flip if other == row else value for other, value in enumerate(parity))
        assert verify(words, damaged).tolist() == [other != row for other in range(parity_rows)]


@pytest.mark.parametrize(("data_rows", "parity_rows"), [(1, 1), (5, 3), (6, 4)])
def test_update_equals_encoding_again(rng, data_rows, parity_rows):
    data = random_rows(rng, data_rows, 40)
    parity = reference.encode(data, parity_rows)
    for row in range(data_rows):
        changed = data.copy()
        changed[row] = random_rows(rng, 40)
        old, new, before = (jnp.asarray(array.view(np.uint32)) for array in (data[row], changed[row], parity))
        np.testing.assert_array_equal(bytes_of(codec.update(before, data_rows, row, old, new)), reference.encode(changed, parity_rows))
    with pytest.raises(UsageError, match=rf"expected different data rows in 0\.\.{data_rows - 1}, found \({data_rows},\)"):
        codec.update(before, data_rows, data_rows, old, new)


@pytest.mark.parametrize(("data_rows", "parity_rows"), SMALL)
def test_reconstruct_rebuilds_every_erasure_pattern(rng, data_rows, parity_rows):
    """Op by op: a compilation for each of the 1,800 patterns would take minutes."""
    data = random_rows(rng, data_rows, 24)
    parity = reference.encode(data, parity_rows)
    words, parity_words = ([jnp.asarray(row.view(np.uint32)) for row in rows] for rows in (data, parity))
    for lost_data, lost_parity in erasure_patterns(data_rows, parity_rows):
        # None in the lost rows' places: whoever reads one fails.
        damaged = [None if row in lost_data else value for row, value in enumerate(words)]
        damaged_parity = [None if row in lost_parity else value for row, value in enumerate(parity_words)]
        rebuilt, rebuilt_parity = codec.reconstruct(damaged, damaged_parity, lost_data, lost_parity)
        assert len(rebuilt) == len(lost_data)
        assert len(rebuilt_parity) == len(lost_parity)
        if lost_data:
            np.testing.assert_array_equal(bytes_of(rebuilt), data[lost_data])
        if lost_parity:
            np.testing.assert_array_equal(bytes_of(rebuilt_parity), parity[lost_parity])


@pytest.mark.parametrize(("data_rows", "parity_rows", "lost_data", "lost_parity"), [
    (32, 2, [31], []), (32, 2, [0, 17], []), (32, 2, [5], [0]), (16, 3, [0, 1, 2], []), (16, 4, [3, 9], [0, 2]), (128, 2, [64, 127], []),
])  # fmt: skip
def test_reconstruct_compiled(rng, data_rows, parity_rows, lost_data, lost_parity):
    data = random_rows(rng, data_rows, 4 * 50)
    parity = reference.encode(data, parity_rows)
    arguments = jnp.asarray(data.view(np.uint32)), jnp.asarray(parity.view(np.uint32))
    rebuilt, rebuilt_parity = jax.jit(lambda words, parity: codec.reconstruct(words, parity, lost_data, lost_parity))(*arguments)
    np.testing.assert_array_equal(bytes_of(rebuilt), data[lost_data])
    if lost_parity:
        np.testing.assert_array_equal(bytes_of(rebuilt_parity), parity[lost_parity])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_encode_makes_no_copy_of_the_data(dtype):
    """Reinterpreting the whole array instead of its rows would: six times slower, and twice the memory."""
    x = jax.ShapeDtypeStruct((1 << 20,), dtype)
    compiled = jax.jit(lambda x: codec.encode(codec.to_words(x, 16), 2)).lower(x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096
