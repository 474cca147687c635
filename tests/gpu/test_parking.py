"""CUDA's process checkpoint on a real GPU. Run there: ``JAX_PLATFORMS=cuda pytest -m gpu tests/gpu/test_parking.py``."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from leto_jax import errors
from leto_jax.agent import nvml
from leto_jax.agent.parking import MOVE_SECS, Parking, park, unpark

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
HELD_BYTES = 1 << 30
# Holds an array and a compiled program; for each line that comes, computes and says what it found.
WAITING = f"""if True:
    import sys, jax, jax.numpy as jnp
    held = jnp.arange({HELD_BYTES} // 4, dtype=jnp.uint32)
    found = jax.jit(lambda x: jnp.bitwise_xor.reduce(x * 2654435761))
    print(int(found(held)), flush=True)
    for line in sys.stdin:
        print(int(found(held)), flush=True)
"""


@pytest.fixture
def free() -> Iterator:
    module = nvml.library()
    indices = nvml.job_indices(module, os.environ, [0])
    yield lambda: nvml.free_bytes(module, indices)
    module.nvmlShutdown()


@pytest.fixture
def waiting() -> Iterator[tuple[subprocess.Popen, str]]:
    """A process with GPU state that waits, and what it has computed."""
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        yield process, process.stdout.readline()
        process.kill()


def test_all_of_its_memory_is_free_and_comes_back_with_its_programs(waiting, free):
    process, first = waiting
    before = free()
    began = time.monotonic()
    park(process.pid)
    parked = time.monotonic() - began
    freed = free() - before
    assert freed > HELD_BYTES
    process.stdin.write("go on\n")  # it waits in its next call of CUDA
    time.sleep(0.5)
    began = time.monotonic()
    unpark(process.pid)
    print(f"parked in {parked:.2f} s, {freed >> 20} MiB free; back in {time.monotonic() - began:.2f} s")
    assert process.stdout.readline() == first
    assert abs(free() - before) < HELD_BYTES // 4


def test_it_moves_in_a_thread_and_more_than_once(waiting):
    process, first = waiting
    parking = Parking()
    for _ in range(2):
        for aside in (True, False):
            parking.begin(process.pid, aside)
            assert not parking.ended
            parking.wait(MOVE_SECS)
    process.stdin.write("go on\n")
    assert process.stdout.readline() == first


def test_a_parked_process_can_be_killed(waiting):
    process, _ = waiting
    park(process.pid)
    process.kill()
    process.wait(10)
    assert process.returncode == -9


def test_a_process_without_cuda_is_refused():
    with subprocess.Popen(["sleep", "60"]) as process:
        with pytest.raises(errors.DeviceError, match="cuCheckpointProcessLock"):
            park(process.pid)
        process.kill()
