"""One number for a whole training state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from leto_jax.checkpoint.frozen import Form


def state_digest(form: Form, leaves: Callable[[str], Iterable[np.ndarray]], commit: int, position: bytes) -> str:
    """SHA-256 (hex) over parameters (read-only ones included), optimizer state, companions, extras and data position, in tree order.

    leaves: those of a group, in storage form. Every leaf counts with its path, dtype and shape. Cost: reads the state once, about 1 GB/s.
    """
    digest = hashlib.sha256()
    for name, specs in form.specs.items():
        for array, leaf in zip(leaves(name), specs, strict=True):
            _add(digest, [name, leaf.describe()])
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    _add(digest, [f"step {commit}"])
    digest.update(position)
    return digest.hexdigest()


def _add(digest, words: Iterable[str]) -> None:
    for word in words:
        digest.update(word.encode() + b"\0")
