"""The agent's end of the state manager: the one that is there, or another one that takes the retained memory back from us."""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from leto_jax import errors
from leto_jax.manager import runtime
from leto_jax.manager.client import Descriptor, ManagerClient, spawn_manager

RETRY_SECS = 2.0
END_SECS = 5.0


class Link:
    """Owns the connections to the manager, the duplicates of everything that it keeps, and its process if we have started it.

    start: there is none yet.
    """

    def __init__(
        self,
        job: str,
        directory: Path,
        start: bool,
        orphan_timeout_secs: float,
        selector: selectors.BaseSelector,
        say: Callable[[str], None],
    ):
        self._job, self._directory, self._orphan_timeout, self._selector, self._say = job, directory, orphan_timeout_secs, selector, say
        path = directory / runtime.SOCKET_NAME
        self._process: subprocess.Popen | None = None
        self._due = 0.0
        if start:
            self._process = spawn_manager(job, directory, orphan_timeout_secs).process
        try:
            self._connect(path)
        except BaseException:
            self.kill()
            raise

    def _connect(self, path: Path) -> None:
        self.client = ManagerClient(path, "agent")
        self._subscription = self.client.subscribe()
        self._selector.register(self._subscription, selectors.EVENT_READ, self._spoke)

    @property
    def descriptors(self) -> Mapping[str, Descriptor]:
        """Duplicates of all that is retained, by name."""
        return self._subscription.descriptors

    @property
    def lost(self) -> bool:
        """Whether the manager is dead."""
        return self._subscription.lost

    @property
    def due(self) -> bool:
        """Whether to try another one now."""
        return self.lost and time.monotonic() >= self._due

    @property
    def pids(self) -> set[int]:
        return {self._process.pid} if self._process is not None else set()

    def register(self, entries: Iterable[tuple[int | None, str]]) -> None:
        """What must end with us: (pid, token)."""
        with contextlib.suppress(errors.ProtocolError):  # a manager that has just died: its successor is told again
            self.client.children(entries)

    def _spoke(self) -> None:
        with contextlib.suppress(errors.ProtocolError):
            self._subscription.poll()
        if self._subscription.lost:
            self._selector.unregister(self._subscription)
            self.client.close()
            self._say("the state manager died; starting another one with the agent's descriptors")

    def replace(self) -> int | None:
        """Starts a manager that takes the retained memory from us; its pid. Training goes on meanwhile, and if this fails it is tried again."""
        kept = self._subscription
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
        try:
            started = spawn_manager(self._job, self._directory, self._orphan_timeout, adopt=kept.descriptors.values())
            self._process = started.process
            self.client = ManagerClient(started.path, "agent")
            self._subscription = self.client.subscribe()
        except (errors.LetoError, OSError) as exception:
            self._due = time.monotonic() + RETRY_SECS
            self._say(f"no state manager: {exception}; trying again in {RETRY_SECS:g} s")
            return None
        kept.close()
        self._selector.register(self._subscription, selectors.EVENT_READ, self._spoke)
        return started.pid

    def kill(self) -> None:
        """Ends a manager that we have started and that keeps nothing yet."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def close(self, keep: bool) -> None:
        """Lets go. keep: the memory stays with the manager; else it is freed, and the manager's end waited for."""
        manager = -1
        with contextlib.suppress(OSError):  # it may be one that an earlier agent has started
            manager = os.pidfd_open(self.client.manager_pid)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._subscription)
        if not keep:
            with contextlib.suppress(errors.LetoError, OSError):
                self.client.free(force=True)
        self._subscription.close()
        self.client.close()
        if manager >= 0:
            if not keep:
                select.select([manager], [], [], END_SECS)
            os.close(manager)
        if self._process is not None:
            self._process.poll()
