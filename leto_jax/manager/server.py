"""The state manager process: `python -m leto_jax.manager.server --job NAME --dir RUNTIME_DIR --orphan-timeout-secs S`.

It owns all retained memory of one job and does nothing else, so that nothing else can take that memory with it: no JAX, no CUDA context,
a session of its own, SIGINT and SIGHUP ignored. What it promises:

    whoever dies            what it does
    the writer of an arena  the lease ends with the process (pidfd), not with its socket; the arena is an orphan with all its content
    the agent               kills the agent's children (`fence`), keeps the memory, greets the next agent after that; without one it
                            frees everything after --orphan-timeout-secs
    itself                  agent and writers hold duplicates: a new manager takes them back (--adopt-fd) before it listens

    SIGTERM                 refused while an agent or a writer lives, else everything is freed

A change is in the agent's socket buffer before the process that asked for it is answered: nobody relies on memory of which the manager
has the only descriptor (unless there is no agent).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from leto_jax.arena import cuda
from leto_jax.errors import DeadlineError, JobError, LetoError, ProtocolError, UsageError
from leto_jax.manager import limits, memory, protocol, runtime
from leto_jax.manager.fence import Fence, FenceReport, ProcessId, check_token, is_dead, process_id
from leto_jax.manager.hub import Connection, Handler, Hub, Log, Reply, Steps, exited
from leto_jax.manager.store import ARENA, BLOB, Entry, Store, check_kind, check_name, check_sha256, gpu_of

ROLES = ("agent", "trainer", "shadow", "tool")
MAX_CHILDREN = 1024
MAX_BYTES = 1 << 62
FENCE_SECS = 10.0
ADOPT_SECS = 600.0
GOODBYE_SECS = 1.0
TICK_SECS = 1.0
TOUCH_SECS = 3600.0  # cleaners of /tmp and of XDG_RUNTIME_DIR remove what looks unused
_FENCE_LOOK_SECS = 0.01
_LIST_BYTES = protocol.MAX_BODY_BYTES // 2


class _Watched(NamedTuple):
    """A process whose death matters: its pidfd (owned) is in the select loop."""

    identity: ProcessId
    pidfd: int
    label: str


class Server:
    """Owns the store, the watched processes and the lock of the job; `run` returns when the job's memory has been given up.

    *Crash*: at any point: descriptors close, leases are forgotten (the agent hands living ones to the next manager), the lock is free, the
    socket file is dead and is replaced. A reservation or a blob is kept under its name or nowhere.
    """

    def __init__(self, job: str, directory: str | Path, orphan_timeout_secs: float) -> None:
        self._job = runtime.check_job_name(job)
        if not orphan_timeout_secs >= 0:
            raise UsageError(f"--orphan-timeout-secs must be at least 0, found {orphan_timeout_secs}")
        self._orphan_timeout_secs = orphan_timeout_secs
        self._directory = Path(directory)
        self._path = protocol.check_address(self._directory / runtime.SOCKET_NAME)
        self._log = Log("manager")
        self._hub = Hub(self._handle, self._log, f"job {job!r}")
        self._store = Store()
        self._started = time.monotonic()
        self._holders: dict[ProcessId, _Watched] = {}
        self._subscribers: set[Connection] = set()
        self._agent: _Watched | None = None
        self._children: list[tuple[ProcessId | None, str]] = []
        self._fence: Fence | None = None
        self._fence_report: FenceReport | None = None
        self._orphan_deadline = time.monotonic() + orphan_timeout_secs
        self._reserving = False
        self._term = False
        self._exit: str | None = None
        self._next_check = 0.0
        self._reachable = True
        self._touched = time.monotonic()
        self._socket_inode = -1
        self._lock = -1
        self._handlers: dict[str, Handler] = {
            "hello": self._op_hello,
            "reserve": self._op_reserve,
            "open": self._op_open,
            "lease": self._op_lease,
            "replace": self._op_replace,
            "discard": self._op_discard,
            "put_blob": self._op_put_blob,
            "get_blob": self._op_get_blob,
            "list": self._op_list,
            "children": self._op_children,
            "subscribe": self._op_subscribe,
            "adopt": self._op_adopt,
            "free": self._op_free,
            "status": self._op_status,
        }

    # Life of the process.

    def claim(self) -> None:
        """Takes the job's lock; `JobError` if another manager lives.

        *Crash*: the kernel drops the lock with the process.
        """
        runtime.ensure_private_dir(self._directory)
        path = self._directory / runtime.LOCK_NAME
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            if self._lock >= 0 and os.path.samestat(os.fstat(fd), os.fstat(self._lock)):
                os.close(fd)
                return
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                owner = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
                os.close(fd)
                raise JobError(
                    f"job {self._job!r} already has a state manager (process {owner}) in {self._directory}: "
                    f"attach to it with `leto run --job {self._job}`, or end it with `leto stop`"
                ) from error
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(fd)):
                    break
            os.close(fd)  # its owner freed the job and removed the file just now
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = fd

    def adopt_from(self, sock: socket.socket, timeout_secs: float = ADOPT_SECS) -> None:
        """Takes back what the agent holds, before anybody can connect; ends with the message `adopted`, or when the agent is gone."""
        deadline = time.monotonic() + timeout_secs
        while True:
            fds: list[int] = []
            try:
                message, fds = protocol.receive(sock, deadline=deadline)
                if message.get("op") == "adopted":
                    break
                reply = _finish(self._adopt(message, fds))
            except (ProtocolError, DeadlineError) as error:
                self._log(f"the agent did not finish handing over: {error}")
                break
            except LetoError as error:
                reply = protocol.error_reply(error)
            finally:
                protocol.close_fds(fds)
            with contextlib.suppress(ProtocolError, DeadlineError):
                protocol.send(sock, reply, deadline=deadline)
        self._log(f"took back {len(self._store)} pieces of memory")

    def listen(self) -> None:
        """Opens the socket to everybody; replaces a dead one."""
        sock, replaced = protocol.listen(self._path, what=f"a state manager of job {self._job!r}")
        if replaced:
            self._log(f"replaced the dead socket {self._path}: its manager is gone")
        self._socket_inode = os.stat(self._path).st_ino
        self._hub.listen(sock)

    def run(self) -> int:
        """Serves until the memory is given up; returns the exit code."""
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._hub.watch(woken.fileno(), partial(_drain, woken))
        self._log(f"keeps job {self._job!r} at {self._path}")
        self._orphan_deadline = time.monotonic() + self._orphan_timeout_secs
        while self._exit is None:
            self._hub.turn(self._wait_secs())
            self._hub.guarded(self._tick)
        self._leave()
        return 0

    def close(self) -> None:
        """Closes everything that this object owns; removes no file."""
        self._hub.close()
        for process in [*self._holders.values(), *([self._agent] if self._agent is not None else [])]:
            os.close(process.pidfd)
        self._holders.clear()
        self._agent = None
        self._store.close()
        protocol.close_fds([self._lock] if self._lock >= 0 else [])
        self._lock = -1

    def _on_term(self, number: int, frame: object) -> None:
        self._term = True

    def _wait_secs(self) -> float:
        if self._fence is not None:
            return _FENCE_LOOK_SECS
        return TICK_SECS if self._agent is not None else min(TICK_SECS, self._orphan_deadline - time.monotonic())

    def _tick(self) -> None:
        now = time.monotonic()
        if self._fence is not None:
            report = self._fence.step()
            if report is not None:
                self._fence_done(report)
        elif self._agent is None and now >= self._orphan_deadline and self._exit is None:
            self._exit = f"no agent for {self._orphan_timeout_secs:g} s"
        if self._term:
            self._term = False
            self._terminate()
        if now >= self._next_check:
            self._next_check = now + TICK_SECS
            self._stay_reachable(now)

    def _terminate(self) -> None:
        living = self._living_holders()
        if self._agent is not None and not exited(self._agent.pidfd):
            self._log(f"SIGTERM refused: the agent, process {self._agent.identity.pid}, lives; end the job with `leto stop`")
        elif living:
            self._log(f"SIGTERM refused: {_names(living)} write to the memory of this job; end them first")
        else:
            self._exit = "SIGTERM"

    def _stay_reachable(self, now: float) -> None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:  # a cleaner, or a person: without its socket nobody could ever attach again
            self._come_back()
            return
        if now - self._touched > TOUCH_SECS and found.st_ino == self._socket_inode:
            self._touched = now
            for path in (self._path, self._directory / runtime.LOCK_NAME, self._directory):
                with contextlib.suppress(OSError):
                    os.utime(path)

    def _come_back(self) -> None:
        try:
            if not self._directory.parent.exists():
                runtime.ensure_private_dir(self._directory.parent)
            self.claim()
            self.listen()
        except (OSError, LetoError) as error:
            if self._reachable:
                self._log(f"the socket {self._path} has vanished and cannot be made again (will try on): {error}")
            self._reachable = False
        else:
            self._reachable = True
            self._log(f"the socket {self._path} had vanished, made it again")

    def _leave(self) -> None:
        self._log(f"frees {len(self._store)} pieces of memory of job {self._job!r} and ends: {self._exit}")
        self._hub.drain(GOODBYE_SECS)
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._socket_inode:
                os.unlink(self._path)
                os.unlink(self._directory / runtime.LOCK_NAME)
        self.close()

    # Processes.

    def _living_holders(self) -> list[_Watched]:
        return [process for process in self._holders.values() if not exited(process.pidfd)]

    def _hold(self, name: str, identity: ProcessId, pidfd: int, label: str) -> Entry:
        """Grants a lease; `pidfd` is duplicated. Returns the entry as it was."""
        known = self._holders.get(identity)
        if known is None:
            known = _Watched(identity, os.dup(pidfd), label)
            self._hub.watch(known.pidfd, partial(self._holder_died, identity))
        self._holders[identity] = known._replace(label=label)
        return self._store.lease(name, identity)

    def _holder_died(self, identity: ProcessId) -> None:
        process = self._holders.pop(identity, None)
        if process is None:
            return
        self._hub.unwatch(process.pidfd)
        os.close(process.pidfd)
        names = self._store.orphan(identity)
        self._log(f"{process.label} is dead; kept without a writer: {', '.join(names) or 'nothing'}")
        for connection in self._listeners():
            for name in names:
                self._hub.post(connection, {"event": "orphan", "name": name, "pid": identity.pid})

    def _listeners(self) -> list[Connection]:
        self._subscribers = {connection for connection in self._subscribers if not connection.closed}
        return list(self._subscribers)

    def _tell(self, message: protocol.Message, fds: tuple[int, ...] = ()) -> Generator[float, None, None]:
        return self._hub.push(self._listeners(), message, fds)

    def _agent_died(self, identity: ProcessId) -> None:
        agent = self._agent
        if agent is None or agent.identity != identity:
            return
        self._agent = None
        self._hub.unwatch(agent.pidfd)
        os.close(agent.pidfd)
        for connection in list(self._hub.connections):
            if connection.identity == identity:
                self._hub.close_connection(connection)
        self._log(f"the agent, process {identity.pid}, is dead: killing its children, keeping {len(self._store)} pieces of memory")
        tokens = {token for _, token in self._children}
        self._fence = Fence(tokens, [child for child, _ in self._children if child is not None], FENCE_SECS)

    def _fence_done(self, report: FenceReport) -> None:
        self._fence, self._fence_report, self._children = None, report, []
        self._log(f"killed {len(report.killed)} processes of the dead agent in {report.elapsed_secs:.3f} s")
        for process in report.remaining:
            self._log(f"cannot kill process {process.pid} ({process.command}): state {process.state}, in {process.wchan}")
        self._orphan_deadline = time.monotonic() + self._orphan_timeout_secs

    # Requests.

    def _handle(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Reply | Steps:
        op = request.get("op")
        handler = self._handlers.get(op) if isinstance(op, str) else None
        if handler is None:
            raise UsageError(f"expected one of the requests {', '.join(self._handlers)}, found {op!r}")
        if connection.role is None and op != "hello":
            raise UsageError(f"expected a hello first, found {op!r}")
        return handler(connection, request, fds)

    def _op_hello(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Reply | Steps:
        role = _text(request, "role")
        if role not in ROLES:
            raise UsageError(f"a role is one of {', '.join(ROLES)}, found {role!r}")
        rank = None if request.get("rank") is None else _integer(request, "rank", 0, 1 << 30)
        incarnation = _integer(request, "incarnation", 0, 1 << 62)
        who = role if rank is None else f"{role} of rank {rank}, incarnation {incarnation}"
        connection.label = f"process {connection.peer.pid} ({who})"
        if role == "agent":
            return self._greet_agent(connection)
        connection.role = role
        return self._greeting(), ()

    def _greeting(self) -> protocol.Message:
        agent = None if self._agent is None else self._agent.identity.pid
        return {"ok": True, "job": self._job, "pid": os.getpid(), "agent": agent, "fence": _fence_message(self._fence_report)}

    def _greet_agent(self, connection: Connection) -> Steps:
        if self._agent is not None and exited(self._agent.pidfd):  # its death may not have been read from the selector yet
            self._agent_died(self._agent.identity)
        while self._fence is not None:  # two incarnations must never live at once
            yield _FENCE_LOOK_SECS
        if self._agent is not None and self._agent.identity != connection.identity:
            raise JobError(
                f"job {self._job!r} already has an agent, process {self._agent.identity.pid}: "
                "choose another name with --job, or end it with `leto stop`"
            )
        if connection.closed or exited(connection.pidfd):
            raise ProtocolError(f"{connection.label} went away while it waited")
        if self._agent is None:
            self._agent = _Watched(connection.identity, os.dup(connection.pidfd), connection.label)
            self._hub.watch(self._agent.pidfd, partial(self._agent_died, connection.identity))
            self._log(f"the agent is process {connection.peer.pid}")
        connection.role = "agent"
        return self._greeting(), ()

    def _expect_agent(self, connection: Connection, request: protocol.Message) -> None:
        if connection.role != "agent" or self._agent is None or self._agent.identity != connection.identity:
            raise JobError(f"only the agent of job {self._job!r} may ask for {request['op']!r}, this is {connection.label}")

    def _expect_member(self, connection: Connection, request: protocol.Message) -> None:
        if connection.role == "tool":
            raise JobError(f"a tool may only read, {request['op']!r} is for the processes of job {self._job!r}")

    def _op_reserve(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        self._expect_member(connection, request)
        name = check_name(_text(request, "name"))
        nbytes = _integer(request, "bytes", 1, MAX_BYTES)
        kind = check_kind(_text(request, "kind") if "kind" in request else ARENA)
        if kind == BLOB:
            raise UsageError(f"{name!r}: only memory can be reserved, a blob is put")
        return self._reserve(name, nbytes, kind)

    def _reserve(self, name: str, nbytes: int, kind: str) -> Steps:
        while self._reserving:  # one at a time: two that fit only alone must not both fail half way
            yield 0.005
        if self._store.find(name) is None:
            self._store.check_room(name)
            self._reserving = True
            try:
                gpu = gpu_of(kind)
                fd = cuda.allocate(gpu, nbytes) if gpu is not None else (yield from memory.reserve_steps(name, nbytes))
            finally:
                self._reserving = False
            made = Entry(name, kind, nbytes, fd)
            self._store.put(made)
            yield from self._tell({"event": "descriptor", **made.describe()}, (fd,))
        entry = self._store.get(name, kind)
        if entry.nbytes != nbytes:
            raise UsageError(
                f"arena {name!r} exists with {entry.nbytes} bytes, {nbytes} are asked for: the plan of this process differs from the job's"
            )
        return {"ok": True, **entry.describe()}, (entry.fd,)

    def _op_open(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        entry = self._store.get(_text(request, "name"))
        return {"ok": True, **entry.describe()}, (entry.fd,)

    def _op_get_blob(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        entry = self._store.get(_text(request, "name"), BLOB)
        return {"ok": True, **entry.describe()}, (entry.fd,)

    def _op_lease(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        self._expect_member(connection, request)
        return self._lease(connection, self._store.get_arena(_text(request, "name")).name)

    def _lease(self, connection: Connection, name: str) -> Steps:
        if self._store.get_arena(name).holder != connection.identity:
            self._expect_no_writer(name)
        if exited(connection.pidfd):
            raise ProtocolError(f"{connection.label} is dead")
        before = self._hold(name, connection.identity, connection.pidfd, connection.label)
        yield from self._tell({"event": "lease", "name": name, "holder": connection.identity._asdict()})
        return {"ok": True, "name": name, "orphaned_by": before.orphaned_by}, ()

    def _expect_no_writer(self, name: str) -> None:
        holder = self._store.get_arena(name).holder
        if holder is None:
            return
        process = self._holders[holder]
        if not exited(process.pidfd):  # its death may not have been read from the selector yet
            raise JobError(
                f"arena {name!r} is leased by {process.label}, which lives: an arena has one writer, and a lease ends with the writer's death"
            )
        self._holder_died(holder)

    def _op_discard(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        self._expect_agent(connection, request)
        name = self._store.get_arena(_text(request, "name")).name
        self._expect_no_writer(name)
        return self._discard(name)

    def _discard(self, name: str) -> Steps:
        self._store.discard(name)
        self._log(f"discarded {name}")
        yield from self._tell({"event": "gone", "name": name})
        return {"ok": True}, ()

    def _op_replace(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        self._expect_member(connection, request)
        name, by = _text(request, "name"), _text(request, "by")
        if self._store.get_arena(name).holder != connection.identity:
            raise JobError(f"only the writer of {name!r} may replace its memory, {connection.label} is not: lease it first")
        return self._replace(name, by)

    def _replace(self, name: str, by: str) -> Steps:
        entry = self._store.replace(name, by)
        yield from self._tell({"event": "descriptor", **entry.describe()}, (entry.fd,))
        yield from self._tell({"event": "gone", "name": by})
        return {"ok": True, **entry.describe()}, ()

    def _op_put_blob(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        if connection.identity not in self._holders:
            raise JobError(f"only a process with a lease may put a blob, {connection.label} has none: lease an arena first")
        name = check_name(_text(request, "name"))
        nbytes = _integer(request, "bytes", 0, MAX_BYTES)
        sha256 = check_sha256(_text(request, "sha256"))
        return self._put_blob(name, nbytes, sha256, _one_fd(request, fds))

    def _put_blob(self, name: str, nbytes: int, sha256: str, fd: int) -> Steps:
        self._store.check_blob_place(name)
        yield from _check_blob(name, nbytes, sha256, fd)
        self._store.check_blob_place(name)  # while it was hashed, others have been served
        entry = Entry(name, BLOB, nbytes, os.dup(fd), sha256)
        self._store.put(entry)
        yield from self._tell({"event": "descriptor", **entry.describe()}, (fd,))
        return {"ok": True, **entry.describe()}, ()

    def _op_list(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        after = _text(request, "after") if "after" in request else ""
        entries: list[dict[str, Any]] = []
        nbytes = 0
        for entry in self._store:
            if entry.name > after:
                described = entry.describe()
                nbytes += len(protocol.encode(described))
                if nbytes > _LIST_BYTES:
                    return {"ok": True, "entries": entries, "more": True}, ()
                entries.append(described)
        return {"ok": True, "entries": entries, "more": False}, ()

    def _op_children(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        self._expect_agent(connection, request)
        items = request.get("pids")
        if not isinstance(items, list) or len(items) > MAX_CHILDREN or not all(isinstance(item, dict) for item in items):
            raise UsageError(f"children: expected a list of at most {MAX_CHILDREN} objects with pid and token as 'pids', found {items!r}")
        known = {child.pid: child for child, _ in self._children if child is not None}
        children: list[tuple[ProcessId | None, str]] = []
        for item in items:
            token = check_token(item.get("token"))
            child = None
            if item.get("pid") is not None:
                pid = _integer({**item, "op": "children"}, "pid", 2, 1 << 30)
                # One that has died since it was first named keeps its identity: its group may live, and its number may be given out again.
                child = process_id(pid) or known.get(pid) or ProcessId(pid, -1)
            children.append((child, token))
        self._children = children
        return {"ok": True}, ()

    def _op_subscribe(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        self._expect_agent(connection, request)
        self._subscribers.add(connection)
        for entry in self._store:
            self._hub.post(connection, {"event": "descriptor", **entry.describe()}, (entry.fd,))
        return {"ok": True, "count": len(self._store)}, ()

    def _op_adopt(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        self._expect_agent(connection, request)
        return self._adopt(request, fds)

    def _adopt(self, request: protocol.Message, fds: Sequence[int]) -> Steps:
        fd = _one_fd(request, fds)
        name = check_name(_text(request, "name"))
        kind = check_kind(_text(request, "kind"))
        nbytes = _integer(request, "bytes", 0, MAX_BYTES)
        holder = _identity(request, "holder")
        sha256 = None
        self._store.check_room(name)
        if kind == BLOB:
            sha256 = check_sha256(_text(request, "sha256"))
            yield from _check_blob(name, nbytes, sha256, fd)
        elif kind == ARENA and (memory.size(fd) != nbytes or not memory.has_sealed_size(fd)):
            found = f"{memory.size(fd)} bytes with seals {memory.seals(fd):#x}"
            raise UsageError(f"arena {name!r}: expected memory of {nbytes} bytes with a sealed size, found {found}")
        known = self._store.find(name)
        if known is None:
            entry = Entry(name, kind, nbytes, os.dup(fd), sha256)
            self._store.put(entry)
            yield from self._tell({"event": "descriptor", **entry.describe()}, (fd,))
        elif known.kind != kind or (gpu_of(kind) is None and not os.path.samestat(os.fstat(known.fd), os.fstat(fd))):
            raise JobError(f"{name!r} is kept already, as {known.kind} of {known.nbytes} bytes, and is not the same memory")
        if kind != BLOB and holder is not None and self._store.get(name).holder is None:
            self._adopt_lease(name, holder)
        return {"ok": True}, ()

    def _adopt_lease(self, name: str, holder: ProcessId) -> None:
        """A writer that got its lease from the last manager keeps it, if it is still the same process and lives."""
        pidfd = -1
        try:
            with contextlib.suppress(OSError):
                pidfd = os.pidfd_open(holder.pid)
            if pidfd < 0 or is_dead(holder) or exited(pidfd) or not _is_ours(holder.pid):
                self._store.lease(name, holder)
                self._store.orphan(holder)
            else:
                self._hold(name, holder, pidfd, f"process {holder.pid} (leased from the last manager)")
        finally:
            protocol.close_fds([pidfd] if pidfd >= 0 else [])

    def _op_free(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        agent = self._agent
        if agent is not None and agent.identity != connection.identity and not exited(agent.pidfd):
            raise JobError(f"job {self._job!r} has an agent, process {agent.identity.pid}: end it with `leto stop`, not its memory alone")
        living = [process for process in self._living_holders() if process.identity != connection.identity]
        if living and request.get("force") is not True:
            raise JobError(f"cannot free the memory of job {self._job!r}: {_names(living)} still write to it; end them first")
        self._exit = f"freed by {connection.label}"
        return {"ok": True}, ()

    def _op_status(self, connection: Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        entries = list(self._store)
        budget = limits.available_bytes()
        message: protocol.Message = {
            "ok": True,
            "job": self._job,
            "pid": os.getpid(),
            "uptime_secs": time.monotonic() - self._started,
            "agent": None if self._agent is None else self._agent.identity.pid,
            "fencing": self._fence is not None,
            "fence": _fence_message(self._fence_report),
            "arenas": sum(entry.is_arena for entry in entries),
            "blobs": sum(entry.kind == BLOB for entry in entries),
            "bytes": sum(entry.nbytes for entry in entries),
            "holders": [process.identity.pid for process in self._living_holders()],
            "children": len(self._children),
            "connections": len(self._hub.connections),
            "orphan_timeout_secs": _finite(self._orphan_timeout_secs),
            "free_in_secs": None if self._agent is not None else _finite(max(self._orphan_deadline - time.monotonic(), 0.0)),
            "memory": {**budget._asdict(), "available": budget.available},
        }
        return message, ()


def _text(request: protocol.Message, key: str) -> str:
    value = request.get(key)
    if not isinstance(value, str):
        raise UsageError(f"request {request.get('op')!r}: expected a string as {key!r}, found {value!r}")
    return value


def _integer(request: protocol.Message, key: str, low: int, high: int) -> int:
    value = request.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"request {request.get('op')!r}: expected an integer from {low} to {high} as {key!r}, found {value!r}")
    return value


def _one_fd(request: protocol.Message, fds: Sequence[int]) -> int:
    if len(fds) != 1:
        raise UsageError(f"request {request.get('op')!r}: expected one descriptor, found {len(fds)}")
    return fds[0]


def _identity(request: protocol.Message, key: str) -> ProcessId | None:
    value = request.get(key)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise UsageError(f"request {request.get('op')!r}: expected pid and start as {key!r}, found {value!r}")
    named = {**value, "op": request.get("op")}
    return ProcessId(_integer(named, "pid", 2, 1 << 30), _integer(named, "start", 0, 1 << 62))


def _is_ours(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False


def _drain(sock: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        sock.recv(64)


def _finite(secs: float) -> float | None:
    return secs if secs != float("inf") else None


def _names(processes: Sequence[_Watched]) -> str:
    return ", ".join(process.label for process in processes)


def _fence_message(report: FenceReport | None) -> protocol.Message | None:
    if report is None:
        return None
    remaining = [process._asdict() for process in report.remaining[:100]]
    return {"killed": list(report.killed)[:1000], "remaining": remaining, "elapsed_secs": report.elapsed_secs}


def _check_blob(name: str, nbytes: int, sha256: str, fd: int) -> Generator[float, None, None]:
    if memory.size(fd) != nbytes:
        raise UsageError(f"blob {name!r}: expected {nbytes} bytes, found {memory.size(fd)}")
    if not memory.is_sealed(fd):
        found = f"seals {memory.seals(fd):#x}"
        raise UsageError(f"blob {name!r}: expected a memfd sealed against writing and resizing (memory.seal_blob), found {found}")
    found = yield from memory.digest_steps(fd, nbytes)
    if found != sha256:
        raise UsageError(f"blob {name!r}: expected sha256 {sha256}, found {found}: refused, what was kept before stays")


def _finish(steps: Steps) -> protocol.Message:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            reply: Reply = end.value
            return reply[0]


def _leave_terminal() -> None:
    with contextlib.suppress(OSError):
        os.setsid()  # fails for a session leader, which is what we want to be
    os.chdir("/")
    os.umask(0o077)
    with contextlib.suppress(OSError, ValueError):
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("leto-manager")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 the memory was given up, 2 it did not start (the reason is on stderr)."""
    parser = argparse.ArgumentParser(prog="leto_jax.manager.server", description="State manager of one leto job.")
    parser.add_argument("--job", required=True)
    parser.add_argument("--dir", required=True, help="private directory of the job: socket, lock and log")
    parser.add_argument("--orphan-timeout-secs", type=float, required=True, help="free the memory after this long without an agent")
    parser.add_argument("--adopt-fd", type=int, help="socket on which an agent hands back what a dead manager kept")
    options = parser.parse_args(argv)
    directory = os.path.abspath(options.dir)
    _leave_terminal()
    try:
        server = Server(options.job, directory, options.orphan_timeout_secs)
        server.claim()
        if options.adopt_fd is not None:
            with socket.socket(fileno=options.adopt_fd) as sock:
                sock.set_inheritable(False)
                server.adopt_from(sock)
        server.listen()
    except (LetoError, OSError) as error:
        print(f"leto manager: {error}", file=sys.stderr)
        return 2
    return server.run()


if __name__ == "__main__":
    sys.exit(main())
