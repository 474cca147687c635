"""Moves the GPU state of a waiting shadow to host memory and back, by CUDA's process checkpoint.

The process is locked meanwhile: a call of CUDA in it would wait. All of its device memory is free once it is parked; contexts, loaded programs
and addresses are as before when it is back. Only for a process of one GPU without peers: with NCCL the driver refuses, and the process dies.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from leto_jax import errors
from leto_jax.arena import cuda

LOCK_MS = 5000  # until the process' own calls of CUDA are done
MOVE_SECS = 20.0


def park(pid: int) -> None:
    """Moves the GPU state of a process to host memory, from outside of it. Raises DeviceError; then it is as it was, if the driver can do that.

    Cost: 1.2 s for a shadow, measured; makes no context here.
    """
    arguments = cuda.driver().CUcheckpointLockArgs()
    arguments.timeoutMs = LOCK_MS
    cuda.call("cuCheckpointProcessLock", pid, arguments)
    try:
        cuda.call("cuCheckpointProcessCheckpoint", pid, None)
    except errors.DeviceError:
        with contextlib.suppress(errors.DeviceError):
            cuda.call("cuCheckpointProcessUnlock", pid, None)
        raise


def unpark(pid: int) -> None:
    """Moves it back. Raises DeviceError: above all, where the device has not that much memory. Cost: 0.5 s for a shadow, measured."""
    cuda.call("cuCheckpointProcessRestore", pid, None)
    cuda.call("cuCheckpointProcessUnlock", pid, None)


class Parking:
    """One process on its way aside or back. The driver is called in a thread: it takes seconds, and may hang.

    park, unpark: for tests. One thread uses it.
    """

    def __init__(self, park: Callable[[int], None] = park, unpark: Callable[[int], None] = unpark):
        self._park, self._unpark = park, unpark
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None
        self.pid = 0  # of the process that is, or was last, on its way
        self.aside = False  # and where to

    @property
    def moving(self) -> bool:
        """Whether a move was begun whose end nobody has taken note of."""
        return self._thread is not None

    @property
    def ended(self) -> bool:
        """Whether such a move is over."""
        return self._thread is not None and not self._thread.is_alive()

    def begin(self, pid: int, aside: bool) -> None:
        """Begins to park a process, or to bring it back. Nothing else may be moving."""
        assert not self.moving
        self.pid, self.aside, self._problem = pid, aside, None
        self._thread = threading.Thread(
            target=self._run, args=(self._park if aside else self._unpark, pid), name="leto-parking", daemon=True
        )
        self._thread.start()

    def wait(self, secs: float = MOVE_SECS) -> None:
        """Until nothing is moving. Raises DeviceError with what went wrong, DeadlineError after `secs`, and then it is still moving."""
        if self._thread is None:
            return
        self._thread.join(secs)
        if self._thread.is_alive():
            raise errors.DeadlineError(f"CUDA did not move the GPU state of process {self.pid} within {secs:g} s")
        self._thread = None
        if self._problem is not None:
            raise errors.DeviceError(f"process {self.pid}: {self._problem}") from self._problem

    def _run(self, move: Callable[[int], None], pid: int) -> None:
        try:
            move(pid)
        except Exception as exception:  # not only ours: a binding that does not fit the driver raises others
            self._problem = exception
