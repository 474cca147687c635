"""What can be known of a device arena without a GPU: how it is cut into segments, and what of a segment is kept when it is replaced."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_jax import errors
from leto_jax.arena import cuda, views
from leto_jax.arena.damage import segment_of
from leto_jax.arena.device import SEGMENT_BYTES, good_ranges, segment_sizes
from leto_jax.arena.rank import segment_names

UNIT = 2 << 20


@given(nbytes=st.integers(1, 5 * SEGMENT_BYTES))
def test_segments_hold_the_arena_and_no_more_than_a_granule_above(nbytes):
    sizes = segment_sizes(nbytes, UNIT)
    assert nbytes <= sum(sizes) < nbytes + UNIT
    assert all(size % UNIT == 0 for size in sizes)
    assert all(size == SEGMENT_BYTES for size in sizes[:-1])


@pytest.mark.parametrize("offset", [0, 1, SEGMENT_BYTES - 1, SEGMENT_BYTES, 3 * SEGMENT_BYTES + 77])
def test_the_segment_of_a_byte_has_the_name_under_which_it_is_kept(offset, monkeypatch):
    monkeypatch.setattr(cuda, "granularity", lambda gpu: UNIT)
    names = segment_names(0, 4 * SEGMENT_BYTES, 0)
    name, rest = segment_of("device.0", offset)
    assert names[offset // SEGMENT_BYTES] == (name, SEGMENT_BYTES)
    assert rest == offset % SEGMENT_BYTES


@given(holes=st.lists(st.tuples(st.integers(0, 16 * UNIT - 1), st.integers(1, 3 * UNIT)), max_size=5))
def test_what_is_good_is_all_but_the_granules_that_a_hole_touches(holes):
    nbytes = 16 * UNIT
    cut = [(begin, min(begin + size, nbytes)) for begin, size in holes]
    good = good_ranges(nbytes, UNIT, cut)
    kept = {granule for begin, size in good for granule in range(begin // UNIT, (begin + size) // UNIT)}
    lost = {granule for begin, end in cut for granule in range(begin // UNIT, -(-end // UNIT))}
    assert kept == set(range(16)) - lost
    assert all(begin % UNIT == 0 and size % UNIT == 0 for begin, size in good)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("shape", [(8, 8), (64,), (1, 2, 32), ()])
def test_memory_offered_by_dlpack_is_taken_as_it_is(dtype, shape):
    """As device memory is, but on the CPU: the same description, another device."""
    kind = jnp.dtype(dtype)
    nbytes = int(np.prod(shape)) * kind.itemsize
    room = np.ones(nbytes + 64, np.uint8)
    memory = room[-room.ctypes.data % 64 :][:nbytes]
    array = jax.dlpack.from_dlpack(views._Tensor(memory.ctypes.data, shape, kind, views._CPU, 0))
    assert (array.dtype, array.shape) == (kind, shape)
    assert array.unsafe_buffer_pointer() == memory.ctypes.data
    assert np.asarray(array).tobytes() == memory.tobytes()
    array.delete()  # calls the deleter


def test_a_dtype_that_dlpack_does_not_know_is_refused():
    with pytest.raises(errors.LayoutError, match="dtype: expected one that DLPack knows, found datetime64"):
        views._Tensor(0, (1,), np.dtype("datetime64[s]"), views._CPU, 0)


def test_mps_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")
    (tmp_path / "control").touch()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    cuda.driver.cache_clear()
    try:
        with pytest.raises(errors.DeviceError, match="expected no MPS"):
            cuda.driver()
    finally:
        cuda.driver.cache_clear()
