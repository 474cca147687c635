"""Checksums: NumPy = XLA = the definition, and which damage they notice."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leto_jax.errors import UsageError
from leto_jax.rmp import codec
from leto_jax.rmp.checksum import locate, page_checksums_np

SEED = 4


@pytest.fixture
def rng():
    print(f"seed {SEED}")
    return np.random.default_rng(SEED)


def random_words(rng, *shape):
    return rng.integers(0, 1 << 32, shape, np.uint32)


def definition(page):
    return [sum(page.tolist()) % 2**32, sum((i + 1) * (word ^ word >> 16) for i, word in enumerate(page.tolist())) % 2**32]


@pytest.mark.parametrize("shape", [(1,), (5, 1), (4, 1024), (3, 1000), (2, 3, 77), (3, 1 << 16), (0, 16)])
def test_numpy_and_xla_follow_the_definition(rng, shape):
    words = random_words(rng, *shape)
    expected = np.array([definition(page) for page in words.reshape(-1, shape[-1])], np.uint32).reshape(*shape[:-1], 2)
    found = page_checksums_np(words)
    assert found.dtype == np.uint32
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(jax.jit(codec.page_checksums)(jnp.asarray(words)), expected)


def test_largest_words_wrap_around():
    words = np.full((2, 1 << 17), 0xFFFFFFFF, np.uint32)
    expected = [definition(page) for page in words]
    np.testing.assert_array_equal(page_checksums_np(words), expected)
    np.testing.assert_array_equal(jax.jit(codec.page_checksums)(jnp.asarray(words)), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_checksums_of_arrays_of_any_dtype(rng, dtype):
    x = random_words(rng, 6 * 64).view(jnp.dtype(dtype))
    found = jax.jit(lambda x: codec.page_checksums(codec.to_words(x, 1)[0].reshape(6, 64)))(jnp.asarray(x))
    np.testing.assert_array_equal(found, page_checksums_np(x.view(np.uint32).reshape(6, 64)))


def test_strided_and_read_only_words(rng):
    words = random_words(rng, 8, 200)
    words.flags.writeable = False
    np.testing.assert_array_equal(page_checksums_np(words[::2, ::3]), page_checksums_np(words[::2, ::3].copy()))


def test_locate_finds_a_flipped_byte(rng):
    words = random_words(rng, 16, 256)
    expected = page_checksums_np(words)
    assert locate(expected, expected).tolist() == []
    for page, byte in [(0, 0), (7, 1023), (15, 511)]:
        words.view(np.uint8)[page, byte] ^= 0xFF
    assert locate(expected, page_checksums_np(words)).tolist() == [0, 7, 15]


def test_every_single_bit_flip_is_noticed(rng):
    page = random_words(rng, 64)
    flipped = np.tile(page, (64 * 32, 1))
    flipped[np.arange(64 * 32), np.arange(64 * 32) // 32] ^= np.uint32(1) << (np.arange(64 * 32, dtype=np.uint32) % 32)
    assert (page_checksums_np(flipped)[:, 0] != page_checksums_np(page)[0]).all()


def swaps(page):
    pairs = np.array(list(itertools.combinations(range(len(page)), 2)))
    swapped = np.tile(page, (len(pairs), 1))
    every = np.arange(len(pairs))
    swapped[every, pairs[:, 0]], swapped[every, pairs[:, 1]] = page[pairs[:, 1]], page[pairs[:, 0]]
    return pairs, (page_checksums_np(swapped) != page_checksums_np(page)).any(axis=-1)


def test_every_swap_of_two_words_of_a_random_page_is_noticed(rng):
    page = random_words(rng, 128)
    assert len(set(page.tolist())) == 128
    assert swaps(page)[1].all()


def test_every_swap_of_words_that_differ_in_one_half_is_noticed(rng):
    """float32 of bfloat16 precision, and words that differ in their top bits only: the worst case of a plain weighted sum."""
    for page in (
        random_words(rng, 128) & 0xFFFF0000,
        rng.integers(0, 8, 128).astype(np.uint32) << 29 | np.uint32(123),
        random_words(rng, 128) & 0xFFFF,
    ):
        (first, second), noticed = swaps(page)[0].T, swaps(page)[1]
        np.testing.assert_array_equal(noticed, page[first] != page[second])


def test_the_same_bit_flipped_in_two_words_is_noticed(rng):
    """A bad data line, for every bit and distances up to that of a 128 KiB page."""
    page = random_words(rng, 1 << 15)
    expected = page_checksums_np(page)
    for bit in range(32):
        for first, second in [(0, 1), (0, 2), (1, 3), (6, 14), (3, 3 + (1 << 14)), (0, (1 << 15) - 1)]:
            damaged = page.copy()
            damaged[[first, second]] ^= np.uint32(1) << np.uint32(bit)
            assert (page_checksums_np(damaged) != expected).any(), (bit, first, second)


def test_arguments_are_checked():
    with pytest.raises(UsageError, match=r"expected uint32\[..., page_words\], found float32\[2, 4\]; use .view"):
        page_checksums_np(np.zeros((2, 4), np.float32))
    with pytest.raises(UsageError, match=r"expected two arrays of checksums uint32\[pages, 2\], found shapes \(2, 2\) and \(3, 2\)"):
        locate(np.zeros((2, 2), np.uint32), np.zeros((3, 2), np.uint32))
