"""Where batches come from, and at which position the data stands."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from leto_jax import errors

PyTree = Any


class Source(Protocol):
    """A stream of batches whose position can be written down."""

    def position(self) -> bytes:
        """The position before the next batch."""
        ...

    def next(self, step: int) -> PyTree:
        """The batch of `step`. Raises StopIteration at the end of the data."""
        ...

    def restore(self, position: bytes) -> None:
        """Goes back to a position that `position` gave."""
        ...


class FunctionSource:
    """`f(step) -> batch`: the step number is the position."""

    def __init__(self, function: Callable[[int], PyTree]):
        self._function = function

    def position(self) -> bytes:
        return b""

    def next(self, step: int) -> PyTree:
        return canonical(self._function(step))

    def restore(self, position: bytes) -> None:
        if position:
            raise errors.UsageError("dataset: the job was started with a Grain dataset, this process brings a function of the step")


class IteratorSource:
    """A Grain dataset or data loader: its iterators have `get_state` and `set_state`. Grain itself is never imported here."""

    def __init__(self, dataset: Any):
        self._iterator = iter(dataset)
        if not (hasattr(self._iterator, "get_state") and hasattr(self._iterator, "set_state")):
            raise errors.UsageError(
                f"dataset: expected a Grain dataset (its iterator has get_state and set_state) or a function of the step, found {type(dataset).__name__}; "
                "a plain generator cannot go back to a position"
            )

    def position(self) -> bytes:
        state = self._iterator.get_state()
        return b"B" + state if isinstance(state, bytes) else b"J" + json.dumps(state, sort_keys=True).encode()

    def next(self, step: int) -> PyTree:
        return canonical(next(self._iterator))

    def restore(self, position: bytes) -> None:
        if not position:
            raise errors.UsageError(
                "dataset: the checkpoint does not say where a dataset with an iterator stood, or was of a job with a function of the step; "
                "resume from a checkpoint that leto wrote of this script, or bring f(step)"
            )
        if position[:1] not in (b"B", b"J"):
            raise errors.UsageError(
                "dataset: the job was started with a function of the step, this process brings a dataset with an iterator"
            )
        self._iterator.set_state(position[1:] if position[:1] == b"B" else json.loads(position[1:]))


def source(dataset: Any) -> Source:
    """The stream behind what the user passed as `dataset`. Raises UsageError for anything that cannot be repositioned."""
    if callable(dataset) and not hasattr(dataset, "__iter__"):
        return FunctionSource(dataset)
    if not hasattr(dataset, "__iter__"):
        raise errors.UsageError(f"dataset: expected a Grain dataset or f(step) -> batch, found {type(dataset).__name__}")
    return IteratorSource(dataset)


def canonical(batch: PyTree) -> PyTree:
    """A batch as NumPy arrays of the dtypes that JAX will use (int64 becomes int32 unless x64 is on).

    Owned copies where the data pipeline may reuse its buffer: NumPy views are copied, jax.Arrays are read.
    """

    def leaf(x):
        array = np.asarray(x)
        if array.dtype == object or (array.dtype.kind in "USV" and not hasattr(x, "dtype")):
            raise errors.UsageError(
                f"batch: expected arrays of numbers, found {type(x).__name__}; tokenise or drop it before the batch is made"
            )
        return np.array(array, dtype=jax.dtypes.canonicalize_dtype(array.dtype), copy=True, order="C")

    return jax.tree.map(leaf, batch)
