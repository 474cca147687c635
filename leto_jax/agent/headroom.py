"""How much memory is free on a job's GPUs, asked of NVML again and again by a thread: NVML may hang, and the agent must not."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from leto_jax import errors
from leto_jax.agent import nvml

PERIOD_SECS = 1.0


class Sample(NamedTuple):
    """free: bytes on the fullest GPU. at: time.monotonic()."""

    free: int
    at: float


class Headroom:
    """Watches from its making to `close`. gpus: as CUDA numbers them under `environ`. library: for tests.

    latest: the last answer, None before the first. problem: why there will be no other one, '' if there will.
    """

    def __init__(
        self,
        gpus: Sequence[int],
        environ: Mapping[str, str],
        library: Callable[[], Any] = nvml.library,
        period_secs: float = PERIOD_SECS,
    ):
        self._gpus, self._environ, self._library, self._period_secs = tuple(gpus), environ, library, period_secs
        self.latest: Sample | None = None
        self.problem = ""
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="leto-headroom", daemon=True).start()

    def close(self) -> None:
        """Ends the watch; does not wait for an answer that is under way."""
        self._ended.set()

    def _run(self) -> None:
        try:
            module = self._library()
        except errors.LetoError as exception:
            self.problem = str(exception)
            return
        try:
            indices = nvml.job_indices(module, self._environ, self._gpus)
            while not self._ended.is_set():
                self.latest = Sample(nvml.free_bytes(module, indices), time.monotonic())
                self._ended.wait(self._period_secs)
        except errors.LetoError as exception:
            self.problem = str(exception)
        finally:
            with contextlib.suppress(nvml.QueryError):
                nvml.ask(module, "nvmlShutdown")
