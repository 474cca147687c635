"""Can this machine go on after a failure? On the CPU: memory, limits, disk. Fails closed: a question that cannot be answered means no."""

from __future__ import annotations

import shutil
from pathlib import Path

from leto_jax.manager import limits

MIN_FREE_BYTES = 256 << 20
MIN_DISK_BYTES = 64 << 20


def check(job_dir: Path) -> tuple[bool, str]:
    """(operable, reason). Cost: three small reads of /proc and /sys."""
    try:
        budget = limits.available_bytes()
        disk = shutil.disk_usage(job_dir).free
    except OSError as exception:
        return False, f"memory or disk cannot be read: {exception}"
    if budget.available < MIN_FREE_BYTES:
        return False, f"expected {MIN_FREE_BYTES >> 20} MiB of free memory, found {budget.available >> 20} MiB ({budget.source})"
    if disk < MIN_DISK_BYTES:
        return False, f"expected {MIN_DISK_BYTES >> 20} MiB of free disk at {job_dir}, found {disk >> 20} MiB"
    return True, f"{budget.available >> 20} MiB of memory, {disk >> 20} MiB of disk free"
