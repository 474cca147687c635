"""CUDA's virtual memory: made without a context by the state manager, mapped by whoever computes. The one place that calls the driver.

Every function raises DeviceError with the driver's own word for what went wrong. `cuda-bindings` is imported at the first call.
`python -m leto_jax.arena.cuda` tries it all on the GPUs that it finds and prints what it found as JSON, for `leto doctor`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from leto_jax import errors

OLDEST_DRIVER = 12_000
BUFFER_BYTES = 16 << 20
MPS_DIRECTORY = "/tmp/nvidia-mps"
MPS_FOUND = (
    "expected no MPS (CUDA's multi-process service), found its control pipe: all its clients share one context, so a fault in the trainer "
    "would take the shadow along; end it (`echo quit | nvidia-cuda-mps-control`), or unset CUDA_MPS_PIPE_DIRECTORY"
)
_SUPPORT = {
    "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": "virtual memory management",
    "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED": "memory behind POSIX file descriptors",
}


def mps_is_active(directory: str | None) -> bool:
    """Whether MPS has a control pipe. directory: CUDA_MPS_PIPE_DIRECTORY."""
    return (Path(MPS_DIRECTORY if directory is None else directory) / "control").exists()


@functools.cache
def driver() -> Any:
    """`cuda.bindings.driver`, initialised. Raises DeviceError where there is no driver, one that is too old, or where MPS is active."""
    if mps_is_active(os.environ.get("CUDA_MPS_PIPE_DIRECTORY")):
        raise errors.DeviceError(MPS_FOUND)
    try:
        from cuda.bindings import driver as module
    except ImportError as exception:
        raise errors.DeviceError(
            "retained GPU memory needs the package cuda-bindings, which is not installed: uv sync --extra cuda"
        ) from exception
    try:
        code = module.cuInit(0)[0]
    except RuntimeError as exception:  # the library itself is missing
        raise errors.DeviceError(
            f"expected an NVIDIA driver, found none ({exception}); install one, or train with --device cpu"
        ) from exception
    if code != module.CUresult.CUDA_SUCCESS:
        raise errors.DeviceError(f"cuInit: {code.name}; is an NVIDIA GPU visible here (nvidia-smi, CUDA_VISIBLE_DEVICES)?")
    version = module.cuDriverGetVersion()[1]
    if version < OLDEST_DRIVER:
        raise errors.DeviceError(
            f"expected a driver for CUDA {OLDEST_DRIVER // 1000} or newer, found one for {version // 1000}.{version % 1000 // 10}; update it"
        )
    return module


def call(name: str, *arguments: Any) -> Any:
    """Calls a function of the driver; returns what it gives: nothing, one value, or a tuple."""
    module = driver()
    code, *values = getattr(module, name)(*arguments)
    if code != module.CUresult.CUDA_SUCCESS:
        raise errors.DeviceError(f"{name}: {code.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


@functools.cache
def granularity(ordinal: int) -> int:
    """Bytes in which memory of a device is made and replaced: 2 MiB on what there is today.

    Raises DeviceError if the device cannot keep memory outside of a process.
    """
    module = driver()
    device = call("cuDeviceGet", ordinal)
    for attribute, what in _SUPPORT.items():
        if not call("cuDeviceGetAttribute", getattr(module.CUdevice_attribute, attribute), device):
            raise errors.DeviceError(f"GPU {ordinal} does not support {what}, without which its memory cannot outlive a process")
    smallest = module.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call("cuMemGetAllocationGranularity", _properties(ordinal), smallest))


def allocate(ordinal: int, nbytes: int) -> int:
    """Device memory of `nbytes`, a multiple of `granularity`, behind a file descriptor, which the caller owns. Needs no context.

    The memory lives as long as the descriptor, a duplicate, or a mapping of it is open anywhere. Its content is not cleared.
    Raises MemoryBudgetError if the device has not that much. Cost: 1 ms per GiB or less.
    """
    unit = granularity(ordinal)
    if nbytes < 1 or nbytes % unit:
        raise errors.UsageError(f"device memory comes in multiples of {unit} bytes, found {nbytes}")
    try:
        handle = call("cuMemCreate", nbytes, _properties(ordinal), 0)
    except errors.DeviceError as exception:
        if "OUT_OF_MEMORY" not in str(exception):
            raise
        raise errors.MemoryBudgetError(
            f"cannot reserve {nbytes} bytes ({nbytes / 2**30:.2f} GiB) on GPU {ordinal}: {exception}; {_usage(ordinal)}. Take a smaller model, "
            "a smaller XLA_PYTHON_CLIENT_MEM_FRACTION, or end what else runs there (`leto run --plan` shows what is needed)"
        ) from exception
    try:
        return int(call("cuMemExportToShareableHandle", handle, _descriptor_type(), 0))
    finally:
        call("cuMemRelease", handle)


@functools.cache
def _primary_context(ordinal: int) -> Any:
    """The context that JAX uses, held until the process ends."""
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))


@contextlib.contextmanager
def context(ordinal: int) -> Iterator[None]:
    """Makes the context that JAX uses current in this thread, for calls that need one."""
    call("cuCtxPushCurrent", _primary_context(ordinal))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def memory(ordinal: int) -> tuple[int, int]:
    """(free, total) bytes of a GPU as this process sees it. Needs, hence makes, a context."""
    with context(ordinal):
        free, total = call("cuMemGetInfo")
    return int(free), int(total)


def synchronize(ordinal: int) -> None:
    """Waits until everything that this process has queued on a GPU is done. Raises DeviceError if something of it has failed for good."""
    with context(ordinal):
        call("cuCtxSynchronize")


class Mapping:
    """Descriptors mapped one after the other into the address space of this process, readable and writable by the device.

    segments: (descriptor, bytes), in order; the descriptors stay the caller's. `address`: of the first byte. alias: (first segment that is
    mapped over and over up to `nbytes`), for scratch memory whose content does not matter.

    Crash: the mapping goes with the process; what is kept outside stays.
    Cost: 1 ms or so, whatever the size.
    """

    def __init__(self, ordinal: int, segments: Sequence[tuple[int, int]]):
        self.ordinal, self.nbytes = ordinal, sum(nbytes for _, nbytes in segments)
        self._mapped: list[tuple[int, int]] = []
        with self.current():
            self.address = int(call("cuMemAddressReserve", self.nbytes, 0, 0, 0))
            try:
                handles: dict[int, Any] = {}
                for fd, nbytes in segments:
                    if fd not in handles:
                        handles[fd] = call("cuMemImportFromShareableHandle", fd, _descriptor_type())
                    at = self.address + sum(size for _, size in self._mapped)
                    call("cuMemMap", at, nbytes, 0, handles[fd], 0)
                    self._mapped.append((at, nbytes))
                for handle in handles.values():
                    call("cuMemRelease", handle)  # the mapping keeps the memory
                call("cuMemSetAccess", self.address, self.nbytes, [_access(ordinal)], 1)
            except BaseException:
                self._unmap()
                raise

    def current(self) -> contextlib.AbstractContextManager[None]:
        """`context` of the mapping's GPU."""
        return context(self.ordinal)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each segment."""
        return [nbytes for _, nbytes in self._mapped]

    def renew(self, number: int, fd: int, good: Sequence[tuple[int, int]], confirm: Callable[[], None]) -> None:
        """Maps the memory behind `fd` in the place of segment `number`, once the `good` ranges (offset, bytes) are copied there, the rest zero.

        confirm: called when the copy is complete and before any address changes.
        """
        at, nbytes = self._mapped[number]
        beside = Mapping(self.ordinal, [(fd, nbytes)])
        try:
            beside.clear(0, nbytes)
            for offset, size in good:
                beside.copy(offset, at + offset, size)
            confirm()
            with self.current():
                call("cuMemUnmap", at, nbytes)
                handle = call("cuMemImportFromShareableHandle", fd, _descriptor_type())
                call("cuMemMap", at, nbytes, 0, handle, 0)
                call("cuMemRelease", handle)
                call("cuMemSetAccess", at, nbytes, [_access(self.ordinal)], 1)
        finally:
            beside.close()

    def read(self, offset: int, target: Any) -> None:
        """Copies device memory from `offset` into a NumPy array. Blocks; does not wait for what other streams still compute."""
        with self.current():
            call("cuMemcpyDtoH", target.ctypes.data, self.address + offset, target.nbytes)

    def write(self, offset: int, source: Any) -> None:
        """Copies a contiguous NumPy array to `offset`. Blocks until it is there."""
        with self.current():
            call("cuMemcpyHtoD", self.address + offset, source.ctypes.data, source.nbytes)
            call("cuStreamSynchronize", 0)  # from pageable memory the call may return when it is staged

    def copy(self, offset: int, source: int, nbytes: int) -> None:
        """Copies `nbytes` from another device address to `offset`. Blocks."""
        with self.current():
            call("cuMemcpyDtoD", self.address + offset, source, nbytes)
            call("cuStreamSynchronize", 0)

    def clear(self, offset: int, nbytes: int) -> None:
        """Sets bytes to zero, at the bandwidth of the memory. Blocks."""
        with self.current():
            call("cuMemsetD8", self.address + offset, 0, nbytes)
            call("cuStreamSynchronize", 0)

    def close(self) -> None:
        """Unmaps. Nothing may use the addresses any more."""
        with self.current():
            self._unmap()

    def _unmap(self) -> None:
        for at, nbytes in self._mapped:
            call("cuMemUnmap", at, nbytes)
        self._mapped.clear()
        call("cuMemAddressFree", self.address, self.nbytes)


class Copies:
    """Reads from the device on a stream of its own, through two small pinned buffers. One thread uses it at a time.

    Nothing else is pinned: that would take 0.45 s per GiB, and a process that has pinned much is slow to die, which a takeover waits for.
    """

    def __init__(self, ordinal: int):
        module = driver()
        self._ordinal = ordinal
        with context(ordinal):
            self._stream = call("cuStreamCreate", module.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._buffers = [int(call("cuMemHostAlloc", BUFFER_BYTES, 0)) for _ in range(2)]
            self._events = [call("cuEventCreate", module.CUevent_flags.CU_EVENT_DISABLE_TIMING) for _ in range(2)]

    def read(self, source: int, nbytes: int) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) of what lies at a device address, part by part, while the next part is on its way. A part lasts until the next one."""
        sizes = [min(BUFFER_BYTES, nbytes - at) for at in range(0, nbytes, BUFFER_BYTES)]
        for number in range(len(sizes) + 1):
            with context(self._ordinal):
                if number < len(sizes):
                    call("cuMemcpyDtoHAsync", self._buffers[number % 2], source + number * BUFFER_BYTES, sizes[number], self._stream)
                    call("cuEventRecord", self._events[number % 2], self._stream)
                if number > 0:
                    call("cuEventSynchronize", self._events[(number - 1) % 2])
            if number > 0:
                part = (ctypes.c_ubyte * sizes[number - 1]).from_address(self._buffers[(number - 1) % 2])
                yield (number - 1) * BUFFER_BYTES, memoryview(part)


@functools.cache
def copies(ordinal: int) -> Copies:
    """The process's own, so that a rehearsal makes what a takeover will use."""
    return Copies(ordinal)


def _usage(ordinal: int) -> str:
    """What a device's memory is used for, as far as it can be told without a context."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(ordinal)
        memory, processes = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        users = ", ".join(f"process {p.pid} {(p.usedGpuMemory or 0) / 2**30:.2f} GiB" for p in processes)
        return f"{memory.used / 2**30:.2f} of {memory.total / 2**30:.2f} GiB are in use ({users or 'by no process that can be seen'})"
    except Exception as exception:  # only for the message: NVML may be missing or not allowed
        return f"what uses it cannot be told ({exception})"


def _properties(ordinal: int) -> Any:
    module = driver()
    made = module.CUmemAllocationProp()
    made.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = ordinal
    made.requestedHandleTypes = _descriptor_type()
    return made


def _access(ordinal: int) -> Any:
    module = driver()
    made = module.CUmemAccessDesc()
    made.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = ordinal
    made.flags = module.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made


def _descriptor_type() -> Any:
    return driver().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def examine() -> dict[str, Any]:
    """What works here: `driver` (as CUDA numbers them), `gpus` (rows of `gpu`, `ok`, `reason`), or `reason` why there is nothing."""
    try:
        module = driver()
        count = call("cuDeviceGetCount")
    except errors.DeviceError as exception:
        return {"driver": None, "gpus": [], "reason": str(exception)}
    rows = []
    for ordinal in range(count):
        try:
            unit = granularity(ordinal)
            _try(ordinal, unit)
            rows.append({"gpu": ordinal, "ok": True, "reason": f"memory outlives its process, in pages of {unit >> 20} MiB"})
        except errors.LetoError as exception:
            rows.append({"gpu": ordinal, "ok": False, "reason": str(exception)})
    return {"driver": module.cuDriverGetVersion()[1], "gpus": rows, "reason": ""}


def _try(ordinal: int, nbytes: int) -> None:
    """Makes memory, maps it, writes, maps it anew, reads."""
    import numpy as np

    fd = allocate(ordinal, nbytes)
    try:
        wanted, found = np.arange(16, dtype=np.uint32), np.zeros(16, np.uint32)
        first = Mapping(ordinal, [(fd, nbytes)])
        first.write(0, wanted)
        first.close()
        again = Mapping(ordinal, [(fd, nbytes)])
        again.read(0, found)
        again.close()
    finally:
        os.close(fd)
    if not np.array_equal(wanted, found):
        raise errors.DeviceError(f"GPU {ordinal}: memory that was mapped again does not hold what was written")


if __name__ == "__main__":
    print(json.dumps(examine()))
