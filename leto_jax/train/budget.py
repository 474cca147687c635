"""What a job needs of a GPU's memory, before any of it is taken."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from leto_jax import errors
from leto_jax.arena import cuda
from leto_jax.arena.rank import scratch_bytes
from leto_jax.config import AUTO, PARKED, Level
from leto_jax.layout import Layout

CONTEXT_BYTES = 640 << 20  # of a process with CUDA, cuBLAS and its loaded programs; measured: 0.53 GiB idle
MARGIN_BYTES = 1 << 30


def temporary_bytes(programs: Mapping[str, Any]) -> int:
    """The most that one of the compiled programs takes beside its arguments and what it writes in place; 0 where XLA does not say."""
    most = 0
    for program in programs.values():
        found = program.memory_analysis()
        if found is not None:
            own = max(0, found.output_size_in_bytes - found.alias_size_in_bytes)
            most = max(most, found.temp_size_in_bytes + own)
    return most


def rows(layout: Layout, temporary: int, level: str) -> list[tuple[str, int, str]]:
    """(what, bytes, note): what is taken beside a trainer that has opened the device. level: of the shadow, one of `config.SHADOW_LEVELS`."""
    loaded = CONTEXT_BYTES + scratch_bytes(layout) + temporary
    shadow = {str(Level.LOADED.value): loaded, PARKED: loaded, str(Level.DEVICE.value): CONTEXT_BYTES}.get(level, 0)
    note = "its context; while it rehearses gradients, and the same"
    if level == AUTO:
        note = f"where there is room, {loaded / 2**30:.2f} GiB for its context, and while it rehearses for gradients and the same"
    return [
        ("retained", layout.device_bytes, "state, gap, gradients, staging, log"),
        ("trainer", temporary, "the largest program's temporary memory"),
        ("shadow", shadow, note),
        ("margin", MARGIN_BYTES, "the driver, fragments, what the script itself keeps"),
    ]


def check(layout: Layout, programs: Mapping[str, Any], gpu: int, level: str) -> None:
    """Prints the table on stderr. Raises MemoryBudgetError with it if the device has not that much free. level: as for `rows`."""
    free, total = cuda.memory(gpu)
    found = rows(layout, temporary_bytes(programs), level)
    needed = sum(nbytes for _, nbytes, _ in found)
    lines = [f"  {what:<10}{nbytes / 2**30:>9.2f} GiB  {note}" for what, nbytes, note in found]
    table = "\n".join([f"GPU {gpu}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB are free, {needed / 2**30:.2f} are needed", *lines])
    if needed > free:
        raise errors.MemoryBudgetError(
            f"{table}\ntake a smaller model, batch or Protection(chunk_bytes=...), set XLA_PYTHON_CLIENT_PREALLOCATE=false, or end what else runs there (nvidia-smi)"
        )
    print(f"leto: {table}", file=sys.stderr, flush=True)


def print_plan(layout: Layout, gpu: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title=f"memory plan, rank 0: {layout.device_bytes / 2**20:.1f} MiB device arena, {layout.host_bytes / 2**20:.1f} MiB host arena",
        title_justify="left",
    )
    table.add_column("what")
    table.add_column("MiB", justify="right")
    table.add_column("where")
    for what, nbytes, note in layout.table():
        table.add_row(what, f"{nbytes / 2**20:.2f}", note)
    scratch, note = layout.device_bytes + layout.host_bytes, "its own memory; one rehearsal on scratch arenas"
    if gpu is not None:
        scratch, note = (
            CONTEXT_BYTES + scratch_bytes(layout),
            "its CUDA context, gradients; what its programs take while it rehearses comes on top",
        )
    table.add_row("shadow, while it gets ready", f"{scratch / 2**20:.2f}", note)
    Console(width=120).print(table)
