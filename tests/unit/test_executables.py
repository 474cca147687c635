"""Programs as bytes: what one process compiles, another one loads; and what makes two processes incarnations of one job."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from leto_jax.shadow import executables


def double_xor(x, y):
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) ^ jax.lax.bitcast_convert_type(y, jnp.uint32)
    return jnp.tanh(x @ y) * 2, bits


@pytest.fixture
def warm_cache(tmp_path: Path):
    """A persistent compilation cache of its own."""
    names = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    for name, value in names.items():
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_programs_load_also_where_the_compilation_cache_is_warm(warm_cache):
    """What XLA for the CPU has loaded from its cache it cannot serialise again: the result loads, and then lacks its functions."""
    x, y = np.full((64, 64), 0.5, np.float32), np.ones((64, 64), np.float32)
    expected = [np.asarray(found) for found in jax.jit(double_xor)(x, y)]
    assert list(warm_cache.glob("*-cache"))
    jax.clear_caches()
    lowered = {"program": jax.jit(double_xor).lower(x, y)}
    blob = executables.pack(executables.compile_all(lowered, to_pack=True))
    found = executables.unpack(memoryview(blob), lowered)["program"](x, y)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected))
    assert jax.config.jax_enable_compilation_cache
