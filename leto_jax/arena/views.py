"""The one place where an address of retained memory becomes a `jax.Array`."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leto_jax import errors
from leto_jax.arena.device import DeviceArena
from leto_jax.arena.memory import Arena


def gpu_number(device: jax.Device) -> int | None:
    """What the driver calls this GPU, None for a CPU."""
    return None if device.platform == "cpu" else (device.local_hardware_id or 0)


def view(arena: Arena, offset: int, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    """A `jax.Array` on `device` that *is* the arena's memory: it shows later stores.

    Must not be donated on the CPU. On a GPU it may be, to programs whose output takes its place: then it is gone, and the output is there.
    """
    if isinstance(arena, DeviceArena):
        return device_view(arena, offset, shape, dtype, device)
    return host_view(arena, offset, shape, dtype, device)


def host_view(arena: Arena, offset: int, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    """A `jax.Array` on the CPU backend over host memory; must never be donated.

    shape, dtype: of the array; offset: bytes, a multiple of 64 (else XLA copies silently: refused with LayoutError).
    Cost: 5-10 us, no copy.
    """
    array = arena.array(offset, shape, dtype)
    view = jax.device_put(array, device)
    if array.size and view.unsafe_buffer_pointer() != array.ctypes.data:
        raise errors.LayoutError(
            f"arena {arena.name!r}, offset {offset}, {dtype}{list(shape)}: expected a view without a copy, found a copy at another address; "
            "the offset must be a multiple of 64 bytes"
        )
    return view


def device_view(arena: Arena, offset: int, shape: tuple[int, ...], dtype: np.dtype, device: jax.Device) -> jax.Array:
    """The same over device memory. Cost: 30-50 us."""
    if not np.prod(shape, dtype=np.int64):
        return jax.device_put(np.zeros(shape, dtype), device)
    return jax.dlpack.from_dlpack(_Tensor(arena.address + offset, shape, dtype, _CUDA, gpu_number(device) or 0))


_CPU, _CUDA = 1, 2  # DLDeviceType
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}  # DLDataTypeCode by NumPy's kind
_BFLOAT, _FLOAT8 = 4, {
    "float8_e3m4": 7, "float8_e4m3": 8, "float8_e4m3b11fnuz": 9, "float8_e4m3fn": 10, "float8_e4m3fnuz": 11,
    "float8_e5m2": 12, "float8_e5m2fnuz": 13, "float8_e8m0fnu": 14,
}  # fmt: skip


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_CAPSULE_NAME = b"dltensor"
# XLA calls a deleter from threads of its own: a C function that does nothing with its argument needs no interpreter lock there.
_nothing = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p).value
# Descriptions that XLA still reads: it may look at one for as long as its array lives, and tells nobody when. A hundred bytes each.
_kept: list[Any] = []


class _Tensor:
    """Memory at an address, offered by the DLPack protocol (https://dmlc.github.io/dlpack/latest/). It owns nothing."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: np.dtype, device_type: int, device_id: int):
        name = jnp.dtype(dtype).name
        code = _FLOAT8.get(name, _BFLOAT if name == "bfloat16" else _CODES.get(np.dtype(dtype).kind, -1))
        if code < 0:
            raise errors.LayoutError(f"dtype: expected one that DLPack knows, found {name}; cast the leaf")
        self._device = device_type, device_id
        dims = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        kind = _DLDataType(code, 8 * np.dtype(dtype).itemsize, 1)
        tensor = _DLTensor(address, _DLDevice(*self._device), len(shape), kind, dims, None, 0)
        self._managed = _DLManagedTensor(tensor, None, _nothing)
        _kept.append((dims, self._managed))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        return _new_capsule(ctypes.addressof(self._managed), _CAPSULE_NAME, None)
