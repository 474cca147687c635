"""The one place where an address of retained memory becomes a `jax.Array`."""

from __future__ import annotations

import jax
import numpy as np

from leto_jax import errors
from leto_jax.arena.memory import Arena


def host_view(arena: Arena, offset: int, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    """A `jax.Array` on the CPU backend that *is* the arena's memory: it shows later stores, and must never be donated.

    shape, dtype: of the array; offset: bytes, a multiple of 64 (else XLA copies silently: refused with LayoutError).
    Cost: 5-10 us, no copy.
    """
    array = arena.array(offset, shape, dtype)
    view = jax.device_put(array, device)
    if array.size and view.unsafe_buffer_pointer() != array.ctypes.data:
        raise errors.LayoutError(
            f"arena {arena.name!r}, offset {offset}, {dtype}{list(shape)}: expected a view without a copy, found a copy at another address; "
            "the offset must be a multiple of 64 bytes"
        )
    return view
