"""A trainer's or shadow's connections to its job: memory from the state manager, orders from the agent, events to it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from leto_jax import errors
from leto_jax.arena.control import Control
from leto_jax.arena.memory import Arena, HostArena
from leto_jax.arena.rank import Arenas, arena_names, map_arenas, segment_names
from leto_jax.config import Level, Process
from leto_jax.layout import Layout
from leto_jax.manager import protocol
from leto_jax.manager.client import Descriptor, ManagerClient
from leto_jax.manager.store import ARENA, gpu_kind

AGENT_SOCKET = "agent.sock"
CHECKPOINT_FILE = "checkpoint.json"  # in the runtime directory: where the agent wants the state
SEND_SECS = 10.0
MANAGER_SECS = 20.0
RECLAIM_SECS = 45.0  # for the agent to end the shadows: two deadlines of its own, and a turn of its loop


def blob_names(rank: int) -> tuple[str, str]:
    """Names of a rank's identity and executables: a program is compiled for the device that runs it."""
    return f"identity.{rank}", f"programs.{rank}"


IDENTITY = blob_names(0)[0]
"""Of rank 0, whose layout is that of every rank."""


def control_name(rank: int) -> str:
    return f"control.{rank}"


@dataclasses.dataclass(frozen=True)
class Promotion:
    """The agent's order to a shadow: the old trainers are dead, the epoch is raised. level: at which it came. ns: when, in CLOCK_MONOTONIC."""

    epoch: int
    level: Level
    ns: int


@functools.cache
def member_of(process: Process) -> Member:
    """The process's own, made once: a shadow may wait before its script begins, and then comes to its session with the same connections."""
    return Member(process)


class Member:
    """Owns the two connections of one process. One thread uses it; events may come from any.

    promotion: of a shadow, once it has come.
    """

    def __init__(self, process: Process):
        self._sending = threading.Lock()
        self.process = process
        self.promotion: Promotion | None = None
        self._top = int(process.shadow_level) if process.role == "shadow" else 0
        self._stages: dict[str, float] = {}  # seconds that each has taken, in order
        self._stage, self._stage_began = "", 0.0
        self.manager = ManagerClient(process.socket, process.role, process.rank, process.incarnation)
        self._agent = protocol.connect(process.socket.parent / AGENT_SOCKET, deadline=time.monotonic() + SEND_SECS, what="the agent")
        self._send({"op": "hello", "role": process.role, "rank": process.rank, "incarnation": process.incarnation, "pid": os.getpid()})

    def enter(self, stage: str) -> None:
        """A shadow begins with a part of its way to being ready: for `leto status` now, for the journal once it is ready. '': with none."""
        now = time.monotonic()
        if self._stage:
            self._stages[self._stage] = self._stages.get(self._stage, 0.0) + now - self._stage_began
        self._stage, self._stage_began = stage, now
        if stage and self.process.role == "shadow":
            self.event("stage", stage=stage)

    def event(self, name: str, **fields: Any) -> None:
        """Tells the agent something for its journal. A dead agent is no error here: the manager and the guardian see to that."""
        try:
            self._send({"op": "event", "event": name, "ns": time.monotonic_ns(), **fields})
        except (errors.ProtocolError, errors.DeadlineError):
            pass

    def publish(self, identity: bytes, programs: bytes) -> None:
        """This rank's identity and executables, from the first incarnation; programs first, so that whoever sees an identity finds its programs."""
        names = blob_names(self.process.rank)
        self._ask(lambda: self.manager.put_blob(names[1], programs))
        self._ask(lambda: self.manager.put_blob(names[0], identity))

    def published(self, deadline_secs: float = 0.0) -> tuple[bytes, Descriptor] | None:
        """(identity, executables) of this rank, waiting for the first incarnation up to `deadline_secs`; None if there are none by then."""
        end, (identity_name, programs_name) = time.monotonic() + deadline_secs, blob_names(self.process.rank)
        while True:
            names = {kept.name for kept in self._ask(self.manager.list)}
            if {identity_name, programs_name} <= names:
                with self.manager.get_blob(identity_name) as identity:
                    return identity.read(), self.manager.get_blob(programs_name)
            if time.monotonic() >= end:
                return None
            time.sleep(0.05)

    def take_arenas(self, layout: Layout, gpu: int | None = None) -> Arenas:
        """Becomes the one writer of this rank's arenas and maps them; they are reserved if the job has none yet. gpu: its ordinal, or None.

        Raises JobError while the last writer lives, MemoryBudgetError if they do not fit, UsageError if the job's have another size.
        """
        opened: list[Descriptor] = []
        known = {kept.name for kept in self._ask(self.manager.list)} if gpu is not None else set()

        def descriptor(name: str, nbytes: int, on: int | None) -> int:
            kind = ARENA if on is None else gpu_kind(on)
            opened.append(self._ask(lambda: self.manager.reserve(name, nbytes, kind)))
            self._ask(lambda: self.manager.lease(name))
            return opened[-1].fd

        try:
            renewal = None if gpu is None else functools.partial(self._renew, layout, gpu)
            arenas = map_arenas(layout, self.process.rank, descriptor, gpu, renewal)
            if gpu is not None and opened[0].name not in known:
                arenas.device.wipe()
            return arenas
        finally:
            for item in opened:
                item.close()

    def take_memory(self, names: Sequence[str], nbytes: int) -> list[Arena]:
        """Becomes the one writer of host memory under these names, each of `nbytes`; reserved if the job has none yet.

        Raises JobError while the last writer lives, MemoryBudgetError if it does not fit, UsageError if the job's has another size.
        """
        arenas: list[Arena] = []
        for name in names:
            with self._ask(functools.partial(self.manager.reserve, name, nbytes, ARENA)) as item:
                self._ask(functools.partial(self.manager.lease, name))
                arenas.append(HostArena(item.fd, nbytes, name))
        return arenas

    @contextlib.contextmanager
    def _renew(self, layout: Layout, gpu: int, number: int, nbytes: int) -> Iterator[tuple[int, Callable[[], None]]]:
        """New memory for a segment of this rank's device arena (`arena.device.Renewal`)."""
        name = segment_names(self.process.rank, layout.device_bytes, gpu)[number][0]
        spare = f"{name}.spare"
        with self._ask(lambda: self.manager.reserve(spare, nbytes, gpu_kind(gpu))) as item:
            yield item.fd, lambda: self._ask(lambda: self.manager.replace(name, spare))

    def lease(self) -> None:
        """The lease on this rank's metadata, which a first incarnation needs before it may publish anything."""
        self._ask(lambda: self.manager.lease(arena_names(self.process.rank)[2]))

    def open_memory(self, name: str, nbytes: int, wait_secs: float) -> Arena:
        """Host memory of another rank, to be read. Raises JobError if the job has none of this name within `wait_secs`."""
        end = time.monotonic() + wait_secs
        while True:
            try:
                with self._ask(lambda: self.manager.open(name)) as item:
                    return HostArena(item.fd, nbytes, name)
            except errors.JobError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)

    def control(self, rank: int | None = None) -> Control:
        """The control words of a rank, this one's own by default."""
        with self._ask(lambda: self.manager.open(control_name(self.process.rank if rank is None else rank))) as descriptor:
            return Control(descriptor.fd)

    def checkpoint_request(self) -> tuple[str, bool]:
        """The directory that the agent wants a checkpoint in, '' if it has given up, and whether it ends this process then."""
        try:
            found = json.loads((self.process.socket.parent / CHECKPOINT_FILE).read_text())
        except FileNotFoundError:
            return "", False
        return str(found["directory"]), bool(found["last"])

    def wait_at(self, level: Level, note: str = "") -> None:
        """A shadow has come to `level`. Unless it may go on to a higher one it says that it is ready, and blocks until it may, or is promoted.

        All ranks of several are told the same in the same order, so that they leave in the same way. note: for the journal.
        Has no deadline: waiting is a shadow's job; the guardian ends it with the job.
        """
        if self.promotion is not None or level < self._top:
            return
        self.enter("")
        self.event("ready", level=level, note=note, stages=self._stages)
        while self.promotion is None and level >= self._top:
            try:
                message, fds = protocol.receive(self._agent, deadline=time.monotonic() + 3600)
            except errors.DeadlineError:
                continue
            except errors.ProtocolError as exception:
                # The agent is dead. The guardian ends this process with all that it has started, which a mere exit would leave behind.
                time.sleep(MANAGER_SECS)
                raise SystemExit(1) from exception
            protocol.close_fds(fds)
            if message.get("op") == "rise":
                self._top = int(message["level"])
            elif message.get("op") == "promote":
                came_ns = time.monotonic_ns()
                self._ask(lambda: self.manager.become("trainer", self.process.rank, self.process.incarnation))
                self.promotion = Promotion(int(message["epoch"]), level, came_ns)

    def reclaim(self, step: int) -> int:
        """As a trainer that has run out of memory in `step`: has the agent end the shadows. Returns the epoch that this trainer has from here on.

        Raises DeadlineError, ProtocolError if the agent is gone, JobError if it does not take this process for the trainer.
        Cost: as long as processes take to die.
        """
        self._send({"op": "reclaim", "step": step})
        reply, fds = protocol.receive(self._agent, deadline=time.monotonic() + RECLAIM_SECS)
        protocol.close_fds(fds)
        protocol.raise_error(reply)
        return int(reply["epoch"])

    def _ask[T](self, request: Callable[[], T]) -> T:
        """A request to the manager; once more after a reconnect if the manager was replaced meanwhile."""
        try:
            return request()
        except errors.ProtocolError:
            self.manager.reconnect(MANAGER_SECS)
            return request()

    def _send(self, message: protocol.Message) -> None:
        with self._sending:
            protocol.send(self._agent, message, deadline=time.monotonic() + SEND_SECS)
