"""The three arenas of one rank, mapped: from the state manager, or private to a process that runs alone."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from leto_jax.arena import metadata
from leto_jax.arena.memory import Arena
from leto_jax.arena.metadata import HostMetadata
from leto_jax.layout import Layout


@dataclasses.dataclass(frozen=True)
class Arenas:
    """device: state, gradients, log, staging. host: parity, ring. metadata: life, epoch, lost ranges."""

    device: Arena
    host: Arena
    metadata_arena: Arena

    @property
    def metadata(self) -> HostMetadata:
        return HostMetadata(self.metadata_arena)

    def close(self) -> None:
        for arena in (self.device, self.host, self.metadata_arena):
            arena.close()


def arena_names(rank: int) -> tuple[str, str, str]:
    """Names under which the state manager keeps a rank's arenas."""
    return f"device.{rank}", f"host.{rank}", f"metadata.{rank}"


def map_arenas(layout: Layout, rank: int, descriptor: Callable[[str, int], int]) -> Arenas:
    """Maps a rank's arenas. descriptor(name, nbytes) gives an open descriptor, which stays the caller's."""
    device, host, meta = arena_names(rank)
    sizes = {device: layout.device_bytes, host: layout.host_bytes, meta: metadata.BYTES}
    return Arenas(*(Arena(descriptor(name, sizes[name]), sizes[name], name) for name in (device, host, meta)))


def private_arenas(layout: Layout) -> Arenas:
    """Arenas that nobody else sees, zeroed; they go when they are closed. Pages are taken as they are touched."""

    def make(name: str, nbytes: int) -> int:
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        opened.append(fd)
        os.ftruncate(fd, nbytes)
        return fd

    opened: list[int] = []
    try:
        return map_arenas(layout, 0, make)
    finally:
        for fd in opened:
            os.close(fd)
