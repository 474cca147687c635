"""`python -m leto_jax.arena.damage`: overwrites bytes of GPU memory as a hardware fault would, for `leto inject`.

A process of its own, since the agent has no CUDA context and must not get one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import numpy as np

from leto_jax import errors
from leto_jax.arena.device import SEGMENT_BYTES, DeviceArena

DEADLINE_SECS = 60.0


def damage_gpu(gpu: int, fd: int, segment_bytes: int, offset: int, nbytes: int, seed: int) -> None:
    """Overwrites `nbytes` at `offset` of the segment behind `fd` with noise. Raises DeviceError if that cannot be done."""
    words = [gpu, fd, segment_bytes, offset, nbytes, seed]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "leto_jax.arena.damage", *map(str, words)],
            pass_fds=[fd],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECS,
        )
    except subprocess.TimeoutExpired as exception:
        raise errors.DeviceError(f"GPU {gpu}: its memory could not be damaged within {DEADLINE_SECS:.0f} s") from exception
    if done.returncode:
        raise errors.DeviceError(f"GPU {gpu}: its memory could not be damaged: {done.stderr.strip()[-500:]}")


def segment_of(name: str, offset: int) -> tuple[str, int]:
    """(name of the segment, offset in it) of a byte of the device arena `name`."""
    number, rest = divmod(offset, SEGMENT_BYTES)
    return f"{name}.{number:03}", rest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("gpu", "fd", "segment_bytes", "offset", "nbytes", "seed"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    arena = DeviceArena(options.gpu, [(options.fd, options.segment_bytes)], options.segment_bytes, "damaged")
    arena.damage(options.offset, np.random.default_rng(options.seed).integers(0, 256, options.nbytes, np.uint8))
    arena.close()


if __name__ == "__main__":
    main()
