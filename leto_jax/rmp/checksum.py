"""Checksums of pages, to find out which page of a protection group is the damaged one. NumPy only; the XLA form is `codec.page_checksums`.

A page is `page_words` little-endian uint32 words w_0, w_1, ... Its checksum is two words, sums modulo 2**32:

    s1 = sum of w_i
    s2 = sum of (i + 1) * (w_i ^ (w_i >> 16))

Both are sums, so they may be computed in any order and split, and equal bytes give equal checksums on every backend.

What they notice:

- every change within one word (s1), so every single-bit flip;
- every swap of two words that differ in one half only, in pages of up to 2**16 words, and every swap at an odd distance;
- the same bit flipped in two words (a bad data line), in pages of up to 2**15 words;
- other damage with a probability of about 1 - 2**-64 if it is random.

Folding the upper half of a word into the lower one is what makes top bits count: a weighted sum of the words themselves loses, modulo
2**32, the top bits of words at even weights, and two float32 whose sign bits flip would pass. Structured damage of both halves of several
words can still pass.

No protection against intent. Source: the weighted sum of J. G. Fletcher, "An arithmetic checksum for serial transmissions", 1982.
"""

import numpy as np
import numpy.typing as npt

from leto_jax.errors import UsageError

type Words = npt.NDArray[np.uint32]


def page_checksums_np(words: Words) -> Words:
    """(s1, s2) of each page: uint32[..., page_words] -> uint32[..., 2]. Raises `UsageError` for another dtype.

    *Cost*: one core, about 3 GB/s; a temporary of the size of the words.
    """
    if words.dtype != np.uint32 or words.ndim < 1:
        found = f"{words.dtype}{list(words.shape)}"
        raise UsageError(f"page checksums: expected uint32[..., page_words], found {found}; use .view(numpy.uint32)")
    weights = np.arange(1, words.shape[-1] + 1, dtype=np.uint32)
    # einsum multiplies and adds in one pass; (words * weights).sum() is three times slower.
    return np.stack([words.sum(axis=-1, dtype=np.uint32), np.einsum("...i,i->...", words ^ (words >> np.uint32(16)), weights)], axis=-1)


def locate(expected: Words, found: Words) -> npt.NDArray[np.intp]:
    """Numbers of the pages whose checksums differ, ascending: two uint32[pages, 2] -> intp[k]. Raises `UsageError` for unequal shapes."""
    if expected.shape != found.shape or expected.ndim != 2 or expected.shape[-1] != 2:
        raise UsageError(f"locate: expected two arrays of checksums uint32[pages, 2], found shapes {expected.shape} and {found.shape}")
    return np.flatnonzero(np.any(expected != found, axis=-1))
