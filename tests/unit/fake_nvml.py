"""NVML for tests: an object with the functions and constants of `pynvml` that are used, over GPUs that each test sets up."""

from __future__ import annotations

import dataclasses
import threading
import types
from typing import Any

SUCCESS, INVALID_ARGUMENT, NOT_SUPPORTED, TIMEOUT, GPU_IS_LOST = 0, 2, 3, 10, 15
WORDS = {
    2: "Invalid Argument",
    3: "Not Supported",
    10: "Timeout",
    12: "NVML Shared Library Not Found",
    15: "GPU is lost",
    999: "Unknown Error",
}


class NVMLError(Exception):
    def __init__(self, value: int):
        super().__init__(WORDS[value])
        self.value = value


@dataclasses.dataclass
class Gpu:
    """A healthy H200 until a test changes it. errors: NVML's code for each query that fails; 'recovery_action' for the field."""

    uuid: str = "GPU-00000000-aaaa"
    name: str = "NVIDIA H200"
    mig: int = 0
    mps_clients: int = 0
    recovery_action: int = 0
    ecc_uncorrected: int = 0
    free: int = 100 << 30
    remapped: tuple[int, int, int, int] = (0, 0, 0, 0)
    retired_pages: int = 0
    retirement_pending: int = 0
    links: dict[int, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(range(18), 1))
    errors: dict[str, int] = dataclasses.field(
        default_factory=lambda: {"nvmlDeviceGetRetiredPages": 3, "nvmlDeviceGetRetiredPagesPendingStatus": 3}
    )
    events: list[int] = dataclasses.field(default_factory=list)


class FakeNvml:
    NVMLError = NVMLError
    NVML_SUCCESS = SUCCESS
    NVML_ERROR_INVALID_ARGUMENT = INVALID_ARGUMENT
    NVML_ERROR_NOT_SUPPORTED = NOT_SUPPORTED
    NVML_ERROR_TIMEOUT = TIMEOUT
    NVML_FEATURE_ENABLED = 1
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_NVLINK_MAX_LINKS = 36
    NVML_P2P_STATUS_OK = 0
    NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR = 1
    NVML_VOLATILE_ECC = 0
    nvmlEventTypeXidCriticalError = 8

    def __init__(self, *gpus: Gpu):
        self.gpus = list(gpus) or [Gpu()]
        self.peers: dict[tuple[str, str, int], int] = {}  # status by UUIDs and capability, OK if not named
        self.errors: dict[str, int] = {}  # of queries that name no GPU
        self.sets: dict[int, Gpu | None] = {}
        self.opened = 0
        self.hang = threading.Event()
        self.hang.set()

    def library(self) -> FakeNvml:
        self._fail(self, "nvmlInit")
        self.opened += 1
        return self

    def _fail(self, where: Any, query: str) -> None:
        self.hang.wait(20)
        if query in where.errors:
            raise NVMLError(where.errors[query])

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:
        self._fail(self, "nvmlDeviceGetCount")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        self._fail(self.gpus[index], "nvmlDeviceGetHandleByIndex")
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        self._fail(gpu, "nvmlDeviceGetUUID")
        return gpu.uuid

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        self._fail(gpu, "nvmlDeviceGetName")
        return gpu.name

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        self._fail(gpu, "nvmlDeviceGetMemoryInfo")
        return types.SimpleNamespace(free=gpu.free)

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> list[int]:
        self._fail(gpu, "nvmlDeviceGetMigMode")
        return [gpu.mig, gpu.mig]

    def nvmlDeviceGetMPSComputeRunningProcesses(self, gpu: Gpu) -> list[object]:
        self._fail(gpu, "nvmlDeviceGetMPSComputeRunningProcesses")
        return [object()] * gpu.mps_clients

    def nvmlDeviceGetFieldValues(self, gpu: Gpu, fields: list[int]) -> list[Any]:
        self._fail(gpu, "nvmlDeviceGetFieldValues")
        assert fields == [self.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION]
        value = types.SimpleNamespace(uiVal=gpu.recovery_action)
        return [types.SimpleNamespace(nvmlReturn=gpu.errors.get("recovery_action", SUCCESS), value=value)]

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        self._fail(gpu, "nvmlDeviceGetTotalEccErrors")
        assert (kind, counter) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        return gpu.ecc_uncorrected

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, int, int, int]:
        self._fail(gpu, "nvmlDeviceGetRemappedRows")
        return gpu.remapped

    def nvmlDeviceGetRetiredPages(self, gpu: Gpu, cause: int) -> list[int]:
        self._fail(gpu, "nvmlDeviceGetRetiredPages")
        assert cause == self.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR
        return list(range(gpu.retired_pages))

    def nvmlDeviceGetRetiredPagesPendingStatus(self, gpu: Gpu) -> int:
        self._fail(gpu, "nvmlDeviceGetRetiredPagesPendingStatus")
        return gpu.retirement_pending

    def nvmlDeviceGetNvLinkState(self, gpu: Gpu, link: int) -> int:
        self._fail(gpu, "nvmlDeviceGetNvLinkState")
        if link not in gpu.links:
            raise NVMLError(INVALID_ARGUMENT)
        return gpu.links[link]

    def nvmlDeviceGetP2PStatus(self, one: Gpu, other: Gpu, capability: int) -> int:
        self._fail(one, "nvmlDeviceGetP2PStatus")
        return self.peers.get((one.uuid, other.uuid, capability), self.NVML_P2P_STATUS_OK)

    def nvmlEventSetCreate(self) -> int:
        self._fail(self, "nvmlEventSetCreate")
        number = len(self.sets) + 1
        self.sets[number] = None
        return number

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, kinds: int, events: int) -> None:
        self._fail(gpu, "nvmlDeviceRegisterEvents")
        assert kinds == self.nvmlEventTypeXidCriticalError
        self.sets[events] = gpu

    def nvmlEventSetWait(self, events: int, timeout_ms: int) -> Any:
        gpu = self.sets[events]
        assert gpu is not None
        assert timeout_ms == 0
        self._fail(gpu, "nvmlEventSetWait")
        if not gpu.events:
            raise NVMLError(TIMEOUT)
        return types.SimpleNamespace(eventType=self.nvmlEventTypeXidCriticalError, eventData=gpu.events.pop(0))

    def nvmlEventSetFree(self, events: int) -> None:
        del self.sets[events]
