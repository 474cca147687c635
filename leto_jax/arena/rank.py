"""The three arenas of one rank, mapped: from the state manager, private to a process that runs alone, or scratch memory to rehearse on.

Where the device is a GPU, its arena is GPU memory in segments, each kept under a name of its own (`device.0.003`), so that one can be replaced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from leto_jax.arena import metadata
from leto_jax.arena.memory import Arena, HostArena
from leto_jax.arena.metadata import HostMetadata
from leto_jax.layout import Layout, round_up

if TYPE_CHECKING:
    from leto_jax.arena.device import Renewal

# (name, bytes, GPU or None for host memory) -> an open descriptor, which stays the caller's
type Opener = Callable[[str, int, int | None], int]


@dataclasses.dataclass(frozen=True)
class Arenas:
    """device: state, gradients, log, staging. host: parity, ring. metadata: life, epoch, lost ranges. peer: what a peer keeps, None without."""

    device: Arena
    host: Arena
    metadata_arena: Arena
    peer: HostArena | None = None

    @property
    def metadata(self) -> HostMetadata:
        return HostMetadata(self.metadata_arena)

    def close(self) -> None:
        for arena in (self.device, self.host, self.metadata_arena, self.peer):
            if arena is not None:
                arena.close()


def arena_names(rank: int) -> tuple[str, str, str]:
    """Names under which the state manager keeps a rank's arenas."""
    return f"device.{rank}", f"host.{rank}", f"metadata.{rank}"


def peer_name(rank: int) -> str:
    """Name of the memory in which its peer keeps parity for a rank."""
    return f"peer.{rank}"


def segment_names(rank: int, nbytes: int, gpu: int) -> list[tuple[str, int]]:
    """(name, bytes) of the segments that hold `nbytes` of a rank's device arena."""
    from leto_jax.arena import cuda, device

    sizes = device.segment_sizes(nbytes, cuda.granularity(gpu))
    return [(f"{arena_names(rank)[0]}.{number:03}", size) for number, size in enumerate(sizes)]


def map_arenas(layout: Layout, rank: int, descriptor: Opener, gpu: int | None = None, renewal: Renewal | None = None) -> Arenas:
    """Maps a rank's arenas. gpu: ordinal of the rank's GPU, None on the CPU backend. renewal: for lost memory of the GPU."""
    device, host, meta = arena_names(rank)
    state: Arena
    if gpu is None:
        state = HostArena(descriptor(device, layout.device_bytes, None), layout.device_bytes, device)
    else:
        from leto_jax.arena.device import DeviceArena

        segments = [(descriptor(name, nbytes, gpu), nbytes) for name, nbytes in segment_names(rank, layout.device_bytes, gpu)]
        state = DeviceArena(gpu, segments, layout.device_bytes, device, renewal)
    return Arenas(
        state,
        HostArena(descriptor(host, layout.host_bytes, None), layout.host_bytes, host),
        HostArena(descriptor(meta, metadata.BYTES, None), metadata.BYTES, meta),
        _peer(layout, rank, descriptor),
    )


def _peer(layout: Layout, rank: int, descriptor: Opener) -> HostArena | None:
    if not layout.peer_bytes:
        return None
    name = peer_name(rank)
    return HostArena(descriptor(name, layout.peer_bytes, None), layout.peer_bytes, name)


def private_arenas(layout: Layout, gpu: int | None = None) -> Arenas:
    """Arenas that nobody else sees; they go when they are closed. Host pages are zero and taken as they are touched."""
    with contextlib.ExitStack() as opened:

        def make(name: str, nbytes: int, on: int | None) -> int:
            fd = _gpu_memory(on, nbytes) if on is not None else _host_memory(name, nbytes)
            opened.callback(os.close, fd)
            return fd

        arenas = map_arenas(layout, 0, make, gpu, None if gpu is None else functools.partial(_private_segment, gpu))
        arenas.device.wipe()
        return arenas


def scratch_bytes(layout: Layout) -> int:
    """How much device memory `scratch_arenas` takes on a GPU, but for what is mapped over and over."""
    gradients = layout.by_name["gradients"]
    return gradients.offset + gradients.nbytes


def scratch_arenas(layout: Layout, gpu: int | None = None) -> Arenas:
    """Private arenas for programs whose results do not matter. On a GPU everything behind the gradients is one small piece of memory, mapped
    over and over: addresses as large as the state, and little memory. On the CPU they are as large as the state.

    The gradients are real: XLA keeps intermediate values of compute where it will write them, and a kernel whose blocks wait for each other by
    counters there would wait for ever if they were also somewhere else (seen on an H200)."""
    if gpu is None:
        return private_arenas(layout)
    from leto_jax.arena import cuda
    from leto_jax.arena.device import SCRATCH_BYTES, DeviceArena

    unit = cuda.granularity(gpu)
    kept = scratch_bytes(layout)
    with contextlib.ExitStack() as opened:

        def make(nbytes: int) -> int:
            fd = _gpu_memory(gpu, nbytes)
            opened.callback(os.close, fd)
            return fd

        real = round_up(max(kept, unit), unit)
        repeats = max(0, -(-(layout.device_bytes - real) // SCRATCH_BYTES))
        alias = make(SCRATCH_BYTES)
        segments = [(make(real), real), *[(alias, SCRATCH_BYTES)] * repeats]

        def on_host(name: str, nbytes: int, _: int | None = None) -> int:
            fd = _host_memory(name, nbytes)
            opened.callback(os.close, fd)
            return fd

        return Arenas(
            DeviceArena(gpu, segments, layout.device_bytes, "scratch"),
            HostArena(on_host("host", layout.host_bytes), layout.host_bytes, "host"),
            HostArena(on_host("metadata", metadata.BYTES), metadata.BYTES, "metadata"),
            _peer(layout, 0, on_host),
        )


@contextlib.contextmanager
def _private_segment(gpu: int, number: int, nbytes: int) -> Iterator[tuple[int, Callable[[], None]]]:
    fd = _gpu_memory(gpu, nbytes)
    try:
        yield fd, lambda: None  # nobody else knows of it
    finally:
        os.close(fd)


def _host_memory(name: str, nbytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, nbytes)
    return fd


def _gpu_memory(gpu: int, nbytes: int) -> int:
    from leto_jax.arena import cuda

    unit = cuda.granularity(gpu)
    return cuda.allocate(gpu, round_up(nbytes, unit))
