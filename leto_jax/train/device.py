"""The device of a rank, and what this process compiles for it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from leto_jax import distributed, errors


def only_device() -> jax.Device:
    """The device of this rank. Raises UsageError where this version cannot retain its memory."""
    if jax.distributed.is_initialized() and distributed.current().count == 1:
        raise errors.UsageError(
            f"jax.distributed: expected it not to be initialized, found process {jax.process_index()} of {jax.process_count()}; "
            "trainers and shadows are jobs of their own: remove jax.distributed.initialize(), and start several ranks with `leto run --nproc-per-node`"
        )
    try:
        devices = jax.local_devices()
    except RuntimeError as exception:
        ranks = distributed.current()
        if ranks.count == 1:
            raise
        raise errors.UsageError(
            f"rank {ranks.rank} of {ranks.count}: expected a device of its own, found none ({exception}); take no more ranks than there are GPUs"
        ) from exception
    device = devices[0]
    nvidia = device.platform == "gpu" and "rocm" not in str(getattr(device.client, "platform_version", "")).lower()
    if device.platform != "cpu" and not nvidia:
        raise errors.UsageError(
            f"device: expected the CPU or an NVIDIA GPU, found {device.device_kind} ({device.platform}); set JAX_PLATFORMS=cpu"
        )
    if nvidia and len(devices) > 1:
        raise errors.UsageError(
            f"device: a rank drives one GPU, found {len(devices)}; use `leto run --nproc-per-node {len(devices)}`, or choose one with CUDA_VISIBLE_DEVICES"
        )
    return device


def count_compiles() -> Callable[[], int]:
    """Starts counting backend compilations of this process; the result tells how many there were."""
    seen: list[float] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return lambda: len(seen)
