"""A mapped arena, and the one way to store to it.

Views are handed out read-only; `Arena.store`, `Arena.store_record` and `HostArena.write_through` are the only writers from the host, so each
store passes a crash point. `HostArena` is memory behind a memfd. `arena.device.DeviceArena` offers the same over GPU memory, where programs
also write by themselves, into donated views.
"""

from __future__ import annotations

import abc
import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

import numpy as np

from leto_jax import errors, faults, records
from leto_jax.faults import Moment, Point


class Arena(abc.ABC):
    """`nbytes` of retained memory under a name."""

    name: str
    nbytes: int

    @property
    @abc.abstractmethod
    def address(self) -> int:
        """Of the first byte, in this process (or as the device of this process sees it)."""

    @abc.abstractmethod
    def view(self, offset: int, nbytes: int) -> np.ndarray:
        """Read-only bytes: on the host the memory itself, of a device a copy of what is there once its programs are done."""

    @abc.abstractmethod
    def _write(self, offset: int, data: np.ndarray) -> None:
        """Writes bytes; blocks until they are there."""

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """`view` as an array of `shape` and `dtype`."""
        count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        return self.view(offset, count).view(dtype).reshape(shape)

    def store(self, point: Point, offset: int, data: np.ndarray) -> None:
        """Copies `data` (any dtype, C-contiguous) to `offset`.

        Crash: any prefix of the bytes may have arrived; a later record must say when they all have.
        Cost: one memcpy, 10 GB/s or so; blocking.
        """
        flat = data.reshape(-1).view(np.uint8) if data.size else np.empty(0, np.uint8)
        hook = faults.store_hook()
        if hook is None:
            self._write(offset, flat)
            return
        hook(point, Moment.BEFORE, flat.size)
        half = flat.size // 2
        self._write(offset, flat[:half])
        hook(point, Moment.TORN, flat.size)
        self._write(offset + half, flat[half:])
        hook(point, Moment.AFTER, flat.size)

    @abc.abstractmethod
    def store_record(self, point: Point, offset: int, record: records.Record) -> None:
        """Stores a record. Crash: the old record, the new one, or one that does not check."""

    def record(self, offset: int, kind: records.Kind) -> records.Record | None:
        """The valid record of `kind` at `offset`, or None."""
        return records.unpack(self.view(offset, records.BYTES).tobytes(), kind)

    def renew(self, lost: Sequence[tuple[int, int]]) -> None:  # noqa: B027 (most memory cannot be replaced)
        """Puts new memory under the lost bytes (offset, nbytes), where that can be done; what is not lost stays. They are zero then."""

    def wipe(self) -> None:  # noqa: B027 (new host memory is zero)
        """Makes new memory zero, before anybody looks for records in it."""

    @abc.abstractmethod
    def damage(self, offset: int, data: np.ndarray) -> None:
        """Overwrites bytes as a hardware fault would: not a store of ours, hence no crash point. For injectors and tests."""

    @abc.abstractmethod
    def close(self) -> None:
        """Drops the mapping."""


class HostArena(Arena):
    """`nbytes` of shared memory behind a descriptor, mapped read-write. Owns the mapping and a duplicate of the descriptor.

    Raises LayoutError if the descriptor holds fewer bytes than the plan needs.
    """

    def __init__(self, fd: int, nbytes: int, name: str):
        found = os.fstat(fd).st_size
        if found < nbytes:
            raise errors.LayoutError(
                f"arena {name!r}: the plan needs {nbytes} bytes, the descriptor holds {found}; it belongs to another plan"
            )
        self.name, self.nbytes, self._fd = name, nbytes, os.dup(fd)
        self._closed = weakref.finalize(self, os.close, self._fd)
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        if hasattr(mmap, "MADV_DONTDUMP"):
            self._map.madvise(mmap.MADV_DONTDUMP)  # a core dump must not copy the whole state to disk
        self._bytes = np.frombuffer(self._map, np.uint8)
        self._read_only = self._bytes.view()
        self._read_only.flags.writeable = False

    @property
    def address(self) -> int:
        return self._bytes.ctypes.data

    def view(self, offset: int, nbytes: int) -> np.ndarray:
        return self._read_only[offset : offset + nbytes]

    def _write(self, offset: int, data: np.ndarray) -> None:
        np.copyto(self._bytes[offset : offset + data.size], data)

    def write_through(self, point: Point, offset: int, data: memoryview) -> None:
        """Stores bytes through the descriptor, past the mapping: pages that a process has never touched need not be unmapped when it dies, which
        takes 0.2 s per GiB.

        Crash: any prefix of the bytes may have arrived.
        Cost: one copy by the kernel, 5 GB/s or so; blocking.
        """
        hook = faults.store_hook()
        half = len(data) // 2 if hook is not None else len(data)
        for moment, part in ((Moment.BEFORE, data[:0]), (Moment.TORN, data[:half]), (Moment.AFTER, data[half:])):
            at = offset if moment is not Moment.AFTER else offset + half
            while part:
                written = os.pwrite(self._fd, part, at)
                part, at = part[written:], at + written
            if hook is not None:
                hook(point, moment, len(data))

    def store_record(self, point: Point, offset: int, record: records.Record) -> None:
        """Stores a record: its first 56 bytes, then the last 8 with the crc as one aligned store.

        Crash: the old record, the new one, or one that does not check.
        """
        data = np.frombuffer(record.pack(), np.uint64)
        target = self._bytes[offset : offset + records.BYTES].view(np.uint64)
        hook = faults.store_hook()
        if hook is not None:
            hook(point, Moment.BEFORE, records.BYTES)
        target[:7] = data[:7]
        if hook is not None:
            hook(point, Moment.TORN, records.BYTES)
        target[7] = data[7]
        if hook is not None:
            hook(point, Moment.AFTER, records.BYTES)

    def damage(self, offset: int, data: np.ndarray) -> None:
        ctypes.memmove(self.address + offset, data.ctypes.data, data.nbytes)

    def close(self) -> None:
        """Drops the mapping once no view is left; views that still live keep it until they go."""
        self._closed()
        self._read_only = self._bytes = np.empty(0, np.uint8)
        try:
            self._map.close()
        except BufferError:
            pass  # a view is alive: the mapping goes with it
