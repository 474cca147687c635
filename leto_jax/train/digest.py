"""One number for a whole training state."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from leto_jax.layout import LeafSpec
from leto_jax.rmu.retained import Retained


def state_digest(retained: Retained, commit: int, position: bytes) -> str:
    """SHA-256 (hex) over parameters (read-only ones included), optimizer state, companions, extras and data position, in tree order.

    Every leaf counts with its path, dtype and shape. Cost: reads the state once, about 1 GB/s.
    """
    spec, job = retained.layout.spec, retained.job
    digest = hashlib.sha256()
    parts: list[tuple[str, Sequence[LeafSpec]]] = [
        ("params", spec.params),
        ("opt_state", job.opt_specs),
        ("companions", job.companion_specs),
        ("extras", spec.extras),
    ]
    for name, specs in parts:
        for array, leaf in zip(retained.arrays(name, commit), specs, strict=True):
            _add(digest, [name, leaf.describe()])
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    _add(digest, [f"step {commit}"])
    digest.update(position)
    return digest.hexdigest()


def _add(digest, words: Iterable[str]) -> None:
    for word in words:
        digest.update(word.encode() + b"\0")
