"""What NVML says about the GPUs of a job: read here, judged in `operability`. Makes no CUDA context.

`nvidia-ml-py` is imported at the first call. Functions take the module `pynvml`, so that tests hand in another. What is optional and not
supported here reads as None; every other query that fails raises QueryError, which names it.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from leto_jax import errors


class QueryError(errors.DeviceError):
    """A query that NVML did not answer. code: NVML's number for why; None if the failure is not one of NVML's."""

    def __init__(self, query: str, exception: Exception):
        super().__init__(f"NVML, {query}: {exception}")
        self.code = getattr(exception, "value", None)


class RecoveryAction(enum.IntEnum):
    """`nvmlDeviceGpuRecoveryAction_t`: what the driver wants done before the GPU is used again."""

    NONE = 0
    GPU_RESET = 1
    NODE_REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7


@dataclasses.dataclass(frozen=True)
class GpuFacts:
    """One GPU. None: the driver or the GPU does not know the field.

    gpu: as CUDA numbers it in the job. index: as NVML does. recovery_action: a `RecoveryAction`, or a number that is newer than it.
    ecc_uncorrected: since the driver was loaded. remap_*: rows of HBM. retired_pages: for double-bit errors, on GPUs before A100.
    links_up: NVLinks by number, where they were asked for.
    """

    gpu: int
    index: int
    uuid: str
    name: str
    mig: bool
    mps_clients: int | None
    recovery_action: int | None
    ecc_uncorrected: int | None
    remap_pending: bool | None
    remap_failed: bool | None
    retired_pages: int | None
    retirement_pending: bool | None
    links_up: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All GPUs of a job at one moment. peers: (GPU, other GPU, capability) of each peer-to-peer path that NVML calls OK."""

    gpus: tuple[GpuFacts, ...]
    peers: tuple[tuple[int, int, str], ...] = ()


PEER_CAPABILITIES = {"read": 0, "write": 1, "nvlink": 2}  # NVML_P2P_CAPS_INDEX_*; pynvml's own for read is a tuple, by a stray comma


def library() -> Any:
    """`pynvml`, initialised. Raises DeviceError where the package or the driver is missing. Cost: seconds if nothing else holds the driver."""
    try:
        import pynvml
    except ImportError as exception:
        raise errors.DeviceError("NVML needs the package nvidia-ml-py, which is not installed: uv sync --extra cuda") from exception
    ask(pynvml, "nvmlInit")
    return pynvml


def ask(nvml: Any, query: str, *arguments: Any) -> Any:
    """One query. Raises QueryError."""
    try:
        return getattr(nvml, query)(*arguments)
    except Exception as exception:  # not only NVMLError: a binding and a driver that do not fit raise others
        raise QueryError(query, exception) from exception


def ask_optional(nvml: Any, query: str, *arguments: Any) -> Any:
    """The same, None where it is not supported."""
    try:
        return ask(nvml, query, *arguments)
    except QueryError as exception:
        if exception.code == nvml.NVML_ERROR_NOT_SUPPORTED:
            return None
        raise


def visible(setting: str | None, uuids: Sequence[str]) -> list[int]:
    """NVML indices of the GPUs that CUDA shows, in its order. setting: CUDA_VISIBLE_DEVICES. uuids: of all GPUs, in NVML's order.

    As in CUDA a GPU is named by index or by the beginning of its UUID, and the first name that fits none ends the list.
    Raises DeviceError for MIG devices and for a GPU that is named twice.
    """
    if setting is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for name in (part.strip() for part in setting.split(",")):
        if name.startswith("MIG"):
            raise errors.DeviceError(f"CUDA_VISIBLE_DEVICES names {name}: MIG devices are not supported, name whole GPUs")
        if name.isdecimal():
            fitting = [index for index in range(len(uuids)) if index == int(name)]
        else:
            fitting = [index for index, uuid in enumerate(uuids) if name.startswith("GPU-") and uuid.startswith(name)]
        if len(fitting) != 1:
            break
        if fitting[0] in found:
            raise errors.DeviceError(f"CUDA_VISIBLE_DEVICES={setting} names GPU {fitting[0]} twice")
        found += fitting
    return found


def job_indices(nvml: Any, environ: Mapping[str, str], gpus: Sequence[int] | None = None) -> dict[int, int]:
    """NVML index of each GPU of a job, by its number in the job. gpus: None for all that CUDA shows.

    Raises DeviceError if one is not there, or if CUDA may count GPUs of several models in another order than NVML.
    """
    handles = [ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in range(ask(nvml, "nvmlDeviceGetCount"))]
    setting = environ.get("CUDA_VISIBLE_DEVICES")
    shown = visible(setting, [ask(nvml, "nvmlDeviceGetUUID", handle) for handle in handles])
    models = {ask(nvml, "nvmlDeviceGetName", handle) for handle in handles}
    by_uuid = setting is not None and setting.lstrip().startswith("GPU-")
    if len(models) > 1 and not by_uuid and environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise errors.DeviceError(
            f"GPUs of several models ({', '.join(sorted(models))}), which CUDA numbers by speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    missing = [gpu for gpu in gpus or () if gpu >= len(shown)]
    if missing:
        raise errors.DeviceError(
            f"expected GPU {missing[0]}, found {len(shown)} of {len(handles)} visible (CUDA_VISIBLE_DEVICES={'not set' if setting is None else setting})"
        )
    return {gpu: shown[gpu] for gpu in (range(len(shown)) if gpus is None else gpus)}


def read(nvml: Any, indices: Mapping[int, int]) -> Snapshot:
    """The GPUs of a job now, by their numbers there. Raises QueryError. Cost: ten queries for each GPU; of several the links too (`read_gpu`)."""
    several = len(indices) > 1
    return Snapshot(tuple(read_gpu(nvml, gpu, index, links=several) for gpu, index in indices.items()), read_peers(nvml, indices))


def free_bytes(nvml: Any, indices: Mapping[int, int]) -> int:
    """Memory that nobody has taken on the fullest GPU of a job. Raises QueryError. Cost: two queries for each."""
    handles = [ask(nvml, "nvmlDeviceGetHandleByIndex", index) for index in indices.values()]
    return min(int(ask(nvml, "nvmlDeviceGetMemoryInfo", handle).free) for handle in handles)


def read_peers(nvml: Any, indices: Mapping[int, int]) -> tuple[tuple[int, int, str], ...]:
    """`Snapshot.peers`. Raises QueryError. Cost: three queries for each pair."""
    handles = {gpu: ask(nvml, "nvmlDeviceGetHandleByIndex", index) for gpu, index in indices.items()}
    return tuple(
        (one, other, capability)
        for one, other in itertools.combinations(handles, 2)
        for capability, number in PEER_CAPABILITIES.items()
        if ask_optional(nvml, "nvmlDeviceGetP2PStatus", handles[one], handles[other], number) == nvml.NVML_P2P_STATUS_OK
    )


def read_gpu(nvml: Any, gpu: int, index: int, links: bool) -> GpuFacts:
    """One GPU, which the job calls `gpu`. Raises QueryError. links: whether to look at its NVLinks, a query for each."""
    handle = ask(nvml, "nvmlDeviceGetHandleByIndex", index)
    mig = ask_optional(nvml, "nvmlDeviceGetMigMode", handle)
    clients = ask_optional(nvml, "nvmlDeviceGetMPSComputeRunningProcesses", handle)
    _, _, pending, failed = ask_optional(nvml, "nvmlDeviceGetRemappedRows", handle) or (None,) * 4
    retired = ask_optional(nvml, "nvmlDeviceGetRetiredPages", handle, nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
    retiring = ask_optional(nvml, "nvmlDeviceGetRetiredPagesPendingStatus", handle)
    return GpuFacts(
        gpu=gpu,
        index=index,
        uuid=ask(nvml, "nvmlDeviceGetUUID", handle),
        name=ask(nvml, "nvmlDeviceGetName", handle),
        mig=mig is not None and mig[0] != 0,
        mps_clients=None if clients is None else len(clients),
        recovery_action=_recovery_action(nvml, handle),
        ecc_uncorrected=ask_optional(
            nvml, "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        ),
        remap_pending=None if pending is None else bool(pending),
        remap_failed=None if failed is None else bool(failed),
        retired_pages=None if retired is None else len(retired),
        retirement_pending=None if retiring is None else bool(retiring),
        links_up=_links_up(nvml, handle) if links else None,
    )


def _recovery_action(nvml: Any, handle: Any) -> int | None:
    """None where the driver is older than the field."""
    (field,) = ask(nvml, "nvmlDeviceGetFieldValues", handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    if field.nvmlReturn in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
        return None
    if field.nvmlReturn != nvml.NVML_SUCCESS:
        raise QueryError("nvmlDeviceGetFieldValues of the recovery action", nvml.NVMLError(field.nvmlReturn))
    return int(field.value.uiVal)


def _links_up(nvml: Any, handle: Any) -> tuple[int, ...] | None:
    """Numbers of the NVLinks that are active; None on a GPU without NVLink."""
    states: dict[int, int] = {}
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            state = ask_optional(nvml, "nvmlDeviceGetNvLinkState", handle, link)
        except QueryError as exception:
            if exception.code != nvml.NVML_ERROR_INVALID_ARGUMENT:
                raise
            break  # the GPU has fewer
        if state is not None:
            states[link] = state
    return tuple(link for link, state in states.items() if state == nvml.NVML_FEATURE_ENABLED) if states else None
