"""Xids: the numbers under which NVIDIA's driver reports errors of a GPU, what they mean for a recovery in place, and a watch for them."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

from leto_jax.agent.nvml import QueryError, ask

EVENTS_AT_ONCE = 256  # bounds a look at one GPU; more stay for the next


class XidClass(enum.StrEnum):
    """What is to be done about an Xid before the GPU is used again."""

    RESTART = "restart the application"
    IGNORE = "nothing"
    ACTION = "what the recovery action says"
    RESET = "reset the GPU"
    OFF_BUS = "bring the GPU back to the bus"
    UNKNOWN = "unknown"


# NVIDIA's Xid catalog, https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, immediate actions for A100 and H100.
# 154 says that the recovery action has changed, which `nvml.read` asks for.
XIDS: dict[XidClass, frozenset[int]] = {
    XidClass.RESTART: frozenset({8, 11, 13, 31, 32, 39, 40, 41, 69, 70, 71, 80, 94}),
    XidClass.IGNORE: frozenset({43, 45, 63, 92}),
    XidClass.ACTION: frozenset({154}),
    XidClass.RESET: frozenset({46, 62, 64, 95, 109, 119, 120, 140, 143, 158}),
    XidClass.OFF_BUS: frozenset({79}),
}
OPERABLE = frozenset({XidClass.RESTART, XidClass.IGNORE, XidClass.ACTION})
CLEANUP = 45
"""Channels of a process that ended were cleaned up: what a mere SIGKILL may leave."""


def classify(number: int) -> XidClass:
    """The class of an Xid; UNKNOWN for all that the table does not have."""
    return next((found for found, numbers in XIDS.items() if number in numbers), XidClass.UNKNOWN)


class Xid(NamedTuple):
    """One error. at: when it was seen, seconds since 1970."""

    gpu: int
    number: int
    at: float


class XidWatch:
    """Remembers the Xids of GPUs from when it is made; NVML cannot be asked for earlier ones.

    `seen`: the last of each number on each GPU. `unwatched`: GPUs without such events. `failed`: why Xids may have been missed, if so.
    If several come between two looks, NVML gives the number of the last for each: look often. The recovery action tells what that hides.
    """

    def __init__(self, nvml: Any, indices: Mapping[int, int]):
        """indices: NVML index of each GPU, by its number in the job. Raises QueryError."""
        self._nvml = nvml
        self._sets: dict[int, Any] = {}
        self._fresh: dict[tuple[int, int], Xid] = {}
        self.seen: dict[tuple[int, int], Xid] = {}
        self.failed = ""
        unwatched = []
        try:
            for gpu, index in indices.items():
                self._sets[gpu] = ask(nvml, "nvmlEventSetCreate")
                handle = ask(nvml, "nvmlDeviceGetHandleByIndex", index)
                try:
                    ask(nvml, "nvmlDeviceRegisterEvents", handle, nvml.nvmlEventTypeXidCriticalError, self._sets[gpu])
                except QueryError as exception:
                    if exception.code != nvml.NVML_ERROR_NOT_SUPPORTED:
                        raise
                    unwatched.append(gpu)
        except BaseException:
            self.close()
            raise
        self.unwatched = tuple(unwatched)

    def poll(self, now: float) -> None:
        """Collects what has come. now: seconds since 1970. Does not wait."""
        for gpu, events in self._sets.items():
            if gpu in self.unwatched or self.failed:
                continue
            for _ in range(EVENTS_AT_ONCE):
                try:
                    event = ask(self._nvml, "nvmlEventSetWait", events, 0)
                except QueryError as exception:
                    if exception.code != self._nvml.NVML_ERROR_TIMEOUT:
                        self.failed = f"GPU {gpu}: {exception}"
                    break
                if event.eventType == self._nvml.nvmlEventTypeXidCriticalError:
                    found = Xid(gpu, int(event.eventData), now)
                    self.seen[gpu, found.number] = self._fresh[gpu, found.number] = found

    def take(self) -> tuple[Xid, ...]:
        """What was collected since the last call."""
        fresh, self._fresh = self._fresh, {}
        return tuple(fresh.values())

    def close(self) -> None:
        """Ends the watch."""
        while self._sets:
            _, events = self._sets.popitem()
            with contextlib.suppress(QueryError):
                ask(self._nvml, "nvmlEventSetFree", events)
