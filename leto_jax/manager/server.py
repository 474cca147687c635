"""The state manager process: `python -m leto_jax.manager.server --job NAME --dir RUNTIME_DIR --orphan-timeout-secs S`.

It owns all retained memory of one job and does nothing else, so that nothing else can take that memory with it: no JAX, no CUDA context, a
session of its own, SIGINT and SIGHUP ignored. What it promises:

    whoever dies                 what it does
    the writer of an arena       the lease ends with the process (pidfd), not with its socket; the arena is an orphan with all its content
    the agent                    kills the agent's children (`fence`), keeps the memory, greets the next agent after that; without one it frees
                                 everything after --orphan-timeout-secs
    itself                       agent and writers hold duplicates: a new manager takes them back (--adopt-fd) before it listens

    SIGTERM                      refused while an agent or a writer lives, else everything is freed

One thread, one select loop. A request that takes long (reserving, hashing, waiting for a fence) is a generator that the loop resumes between
others; its connection is not read meanwhile. A change is in the agent's socket buffer before the process that asked for it is answered.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from leto_jax.errors import DeadlineError, JobError, LetoError, ProtocolError, UsageError
from leto_jax.manager import limits, memory, protocol, runtime
from leto_jax.manager.fence import Fence, FenceReport, ProcessId, check_token, is_dead, process_id
from leto_jax.manager.store import ARENA, BLOB, KINDS, Entry, Store, check_name, check_sha256

VERSION = 1
ROLES = ("agent", "trainer", "shadow", "tool")
MAX_CONNECTIONS = 1024
MAX_CHILDREN = 1024
MAX_BYTES = 1 << 62
FENCE_SECS = 10.0
PUSH_SECS = 10.0
PARTIAL_SECS = 10.0
ADOPT_SECS = 600.0
GOODBYE_SECS = 1.0
TICK_SECS = 1.0
TOUCH_SECS = 3600.0  # cleaners of /tmp and of XDG_RUNTIME_DIR remove what looks unused
_LIST_BYTES = protocol.MAX_BODY_BYTES // 2
_LOG_LINES_PER_MINUTE = 200

Reply = tuple[protocol.Message, tuple[int, ...]]
Steps = Generator[float, None, Reply]  # yields how many seconds it can wait


class _Log:
    """One line per event on stderr (manager.log), bounded per minute."""

    def __init__(self) -> None:
        self._minute = 0
        self._lines = 0

    def __call__(self, text: str) -> None:
        minute = int(time.monotonic() // 60)
        if minute != self._minute:
            self._minute, self._lines = minute, 0
        self._lines += 1
        if self._lines > _LOG_LINES_PER_MINUTE:
            return
        if self._lines == _LOG_LINES_PER_MINUTE:
            text = "too many lines, silent for the rest of this minute"
        with contextlib.suppress(OSError, ValueError):
            print(time.strftime("%Y-%m-%d %H:%M:%S"), f"manager {os.getpid()}:", text, file=sys.stderr, flush=True)


class _Process:
    """A process that is watched: its identity and a pidfd, which becomes readable when it is dead."""

    def __init__(self, identity: ProcessId, pidfd: int, label: str) -> None:
        self.identity = identity
        self.pidfd = pidfd
        self.label = label

    @property
    def pid(self) -> int:
        return self.identity.pid


class _Connection:
    def __init__(self, sock: socket.socket, peer: protocol.Peer, identity: ProcessId, pidfd: int) -> None:
        self.sock = sock
        self.peer = peer
        self.identity = identity
        self.pidfd = pidfd
        self.decoder = protocol.Decoder()
        self.outbox = protocol.Outbox(sock)
        self.role: str | None = None
        self.label = f"process {peer.pid}"
        self.subscribed = False
        self.busy = False  # a request is being worked on: nothing is read
        self.closing = False  # close when the outbox is empty
        self.closed = False
        self.events = 0  # what the selector watches
        self.partial_since: float | None = None


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


def _identity_in(request: protocol.Message, key: str) -> ProcessId | None:
    value = request.get(key)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise UsageError(f"request {request.get('op')!r}: expected pid and start as {key!r}, found {value!r}")
    return ProcessId(_integer({"op": request.get("op"), **value}, "pid", 2, 1 << 30), _integer({**value}, "start", 0, 1 << 62))


class Server:
    """Owns the sockets, the watched processes and the store; `run` returns when the job's memory has been given up.

    *Crash*: at any point: descriptors close, leases are forgotten (agents hand living ones to the next manager), the lock is free, the socket
    file is dead and is replaced. No request is half done for anybody but its asker: a reservation is kept under its name or nowhere.
    """

    def __init__(self, job: str, directory: str | Path, orphan_timeout_secs: float) -> None:
        self._job = runtime.check_job_name(job)
        if not orphan_timeout_secs >= 0:
            raise UsageError(f"--orphan-timeout-secs must be at least 0, found {orphan_timeout_secs}")
        self._orphan_timeout_secs = orphan_timeout_secs
        self._directory = Path(directory)
        self._path = protocol.check_address(self._directory / runtime.SOCKET_NAME)
        self._log = _Log()
        self._selector = selectors.DefaultSelector()
        self._store = Store()
        self._started = time.monotonic()
        self._identity = process_id(os.getpid()) or ProcessId(os.getpid(), 0)
        self._connections: set[_Connection] = set()
        self._tasks: list[tuple[_Connection, Steps, float]] = []
        self._holders: dict[ProcessId, _Process] = {}
        self._agent: _Process | None = None
        self._children: list[tuple[ProcessId | None, str]] = []
        self._fence: Fence | None = None
        self._fence_report: FenceReport | None = None
        self._orphan_deadline = time.monotonic() + orphan_timeout_secs
        self._reserving = False
        self._exit: str | None = None
        self._touched = time.monotonic()
        self._listener: socket.socket | None = None
        self._listener_inode = -1
        self._lock = -1
        self._accept_again = 0.0
        self._handlers: dict[str, Callable[[_Connection, protocol.Message, Sequence[int]], Reply | Steps]] = {
            "hello": self._op_hello,
            "reserve": self._op_reserve,
            "open": self._op_open,
            "lease": self._op_lease,
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
                if os.stat(path).st_ino == os.fstat(fd).st_ino:
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
        count = 0
        while True:
            fds: list[int] = []
            try:
                message, fds = protocol.receive(sock, deadline=deadline)
                if message.get("op") == "adopted":
                    break
                reply = _finish(self._adopt(message, fds))
                count += 1
            except (ProtocolError, DeadlineError) as error:
                self._log(f"the agent did not finish handing over: {error}")
                break
            except LetoError as error:
                reply = protocol.error_reply(error)
            finally:
                protocol.close_fds(fds)
            with contextlib.suppress(ProtocolError, DeadlineError):
                protocol.send(sock, reply, deadline=deadline)
        self._log(f"took back {count} descriptors")

    def listen(self) -> None:
        """Opens the socket to everybody; replaces a dead one."""
        sock, replaced = protocol.listen(self._path, what=f"a state manager of job {self._job!r}")
        if replaced:
            self._log(f"replaced the dead socket {self._path}: its manager is gone")
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
        self._listener = sock
        self._listener_inode = os.stat(self._path).st_ino
        self._selector.register(sock, selectors.EVENT_READ, self._accept)

    def run(self) -> int:
        """Serves until the memory is given up; returns the exit code."""
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self._selector.register(woken, selectors.EVENT_READ, partial(self._drain, woken))
        self._log(f"keeps job {self._job!r} at {self._path}")
        while self._exit is None:
            for key, _ in self._selector.select(self._wait_secs()):
                self._guarded(key.data)
            self._run_tasks()
            self._guarded(self._tick)
        self._leave()
        return 0

    def _guarded(self, call: Callable[[], None]) -> None:
        """A mistake of ours must not take the memory with it: it is logged, and the loop goes on."""
        try:
            call()
        except Exception:
            self._log("internal error\n" + traceback.format_exc())

    def _drain(self, sock: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            sock.recv(64)

    def _on_term(self, number: int, frame: object) -> None:
        living = self._living_holders()
        if self._agent is not None and not _exited(self._agent.pidfd):
            self._log(f"SIGTERM refused: the agent, process {self._agent.pid}, lives; end the job with `leto stop`")
        elif living:
            self._log(f"SIGTERM refused: {_names(living)} write to the memory of this job; end them first")
        else:
            self._exit = "SIGTERM"

    def _wait_secs(self) -> float:
        now = time.monotonic()
        wait = TICK_SECS
        for _, _, due in self._tasks:
            wait = min(wait, due - now)
        if self._fence is not None:
            wait = min(wait, 0.01)
        elif self._agent is None:
            wait = min(wait, self._orphan_deadline - now)
        return max(wait, 0.0)

    def _tick(self) -> None:
        now = time.monotonic()
        if self._fence is not None:
            report = self._fence.step()
            if report is not None:
                self._fence_done(report)
        elif self._agent is None and now >= self._orphan_deadline and self._exit is None:
            self._exit = f"no agent for {self._orphan_timeout_secs:g} s"
        for connection in list(self._connections):
            if connection.partial_since is not None and now - connection.partial_since > PARTIAL_SECS:
                self._refuse(connection, ProtocolError(f"no complete message within {PARTIAL_SECS:g} s"))
        if self._listener is not None and now >= self._accept_again > 0:
            self._accept_again = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._stay_reachable(now)

    def _stay_reachable(self, now: float) -> None:
        try:
            found = os.stat(self._path)
        except FileNotFoundError:  # a cleaner, or a person: without its socket nobody could ever attach
            with contextlib.suppress(OSError, LetoError):
                self.claim()
                self.listen()
                self._log(f"the socket {self._path} had vanished, made it again")
            return
        if now - self._touched > TOUCH_SECS and found.st_ino == self._listener_inode:
            self._touched = now
            for path in (self._path, self._directory / runtime.LOCK_NAME, self._directory):
                with contextlib.suppress(OSError):
                    os.utime(path)

    def _leave(self) -> None:
        self._log(f"frees {len(self._store)} pieces of memory of job {self._job!r} and ends: {self._exit}")
        until = time.monotonic() + GOODBYE_SECS
        while time.monotonic() < until and any(connection.outbox.pending for connection in self._connections):
            for connection in list(self._connections):
                self._flush(connection)
            time.sleep(0.005)
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._listener_inode:
                os.unlink(self._path)
                os.unlink(self._directory / runtime.LOCK_NAME)
        self.close()

    def close(self) -> None:
        """Closes everything that this object owns; removes no file."""
        self._tasks.clear()
        for connection in list(self._connections):
            self._close(connection)
        for process in [*self._holders.values(), *([self._agent] if self._agent is not None else [])]:
            os.close(process.pidfd)
        self._holders.clear()
        self._agent = None
        self._store.close()
        if self._listener is not None:
            self._listener.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
        self._selector.close()

    # Connections.

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            self._log(f"cannot accept a connection: {error.strerror}")
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._selector.unregister(self._listener)  # it would stay readable: try again a little later
                self._accept_again = time.monotonic() + 0.2
            return
        sock.setblocking(False)
        peer = protocol.peer_of(sock)
        refusal: LetoError | None = None
        pidfd = -1
        identity: ProcessId | None = None
        try:
            if peer.uid != os.geteuid():
                raise JobError(f"job {self._job!r} belongs to uid {os.geteuid()}; process {peer.pid} has uid {peer.uid}")
            if len(self._connections) >= MAX_CONNECTIONS:
                raise JobError(f"{MAX_CONNECTIONS} connections are open already, refused process {peer.pid}")
            pidfd = protocol.peer_pidfd(sock)
            identity = process_id(peer.pid)
            if identity is None or _exited(pidfd):
                raise ProtocolError(f"the peer, process {peer.pid}, is dead")
        except LetoError as error:
            refusal = error
        if refusal is not None or identity is None:
            self._log(f"refused a connection: {refusal}")
            with contextlib.suppress(OSError):
                sock.send(protocol.encode(protocol.error_reply(refusal or JobError("refused"))))
            if pidfd >= 0:
                os.close(pidfd)
            sock.close()
            return
        connection = _Connection(sock, peer, identity, pidfd)
        self._connections.add(connection)
        self._update(connection)

    def _update(self, connection: _Connection) -> None:
        """Watches a connection for what it can go on with: reading unless it is busy, writing if something waits."""
        if connection.closed:
            return
        events = 0 if connection.busy or connection.closing else selectors.EVENT_READ
        if connection.outbox.pending:
            events |= selectors.EVENT_WRITE
        if events == connection.events:
            return
        if connection.events == 0:
            self._selector.register(connection.sock, events, partial(self._serve, connection))
        elif events == 0:
            self._selector.unregister(connection.sock)
        else:
            self._selector.modify(connection.sock, events, partial(self._serve, connection))
        connection.events = events

    def _close(self, connection: _Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        self._connections.discard(connection)
        if connection.events:
            self._selector.unregister(connection.sock)
        connection.decoder.close()
        connection.outbox.close()
        connection.sock.close()
        os.close(connection.pidfd)

    def _flush(self, connection: _Connection) -> None:
        if connection.closed:
            return
        try:
            connection.outbox.flush()
        except ProtocolError:
            self._close(connection)
            return
        if connection.closing and not connection.outbox.pending:
            self._close(connection)
        else:
            self._update(connection)

    def _refuse(self, connection: _Connection, error: LetoError) -> None:
        """What came is not a message: says so and closes, since the place in the stream is lost."""
        self._log(f"closed the connection of {connection.label}: {error}")
        connection.closing = True
        connection.partial_since = None
        with contextlib.suppress(ProtocolError):
            connection.outbox.put(protocol.error_reply(error))
        self._flush(connection)

    def _serve(self, connection: _Connection) -> None:
        try:
            if connection.outbox.pending:
                self._flush(connection)
            if connection.closed or connection.busy or connection.closing:
                return
            try:
                open_ = connection.decoder.read_from(connection.sock)
            except BlockingIOError:
                return
            if not open_:
                self._close(connection)
                return
            self._next_request(connection)
        except ProtocolError as error:
            self._refuse(connection, error)
        except Exception as error:
            self._log(f"internal error while serving {connection.label}\n" + traceback.format_exc())
            self._refuse(connection, ProtocolError(f"internal error of the state manager: {error}"))

    def _next_request(self, connection: _Connection) -> None:
        while not (connection.busy or connection.closing or connection.closed):
            received = connection.decoder.next_message()
            if received is None:
                if not connection.decoder.partial:
                    connection.partial_since = None
                elif connection.partial_since is None:
                    connection.partial_since = time.monotonic()
                return
            connection.partial_since = None
            self._handle(connection, *received)

    def _handle(self, connection: _Connection, request: protocol.Message, fds: list[int]) -> None:
        op = request.get("op")
        result: Reply | Steps
        try:
            handler = self._handlers.get(op) if isinstance(op, str) else None
            if handler is None:
                raise UsageError(f"expected one of the requests {', '.join(self._handlers)}, found {op!r}")
            if connection.role is None and op != "hello":
                raise UsageError(f"expected a hello first, found {op!r}")
            result = handler(connection, request, fds)
        except Exception as error:
            protocol.close_fds(fds)
            self._answer(connection, self._failure(connection, op, error))
            return
        if isinstance(result, tuple):
            protocol.close_fds(fds)
            self._answer(connection, result)
            return
        connection.busy = True
        self._tasks.append((connection, _closing(result, fds), 0.0))
        self._update(connection)

    def _failure(self, connection: _Connection, op: object, error: Exception) -> Reply:
        if not isinstance(error, LetoError):
            self._log(f"internal error in {op!r} of {connection.label}\n" + "".join(traceback.format_exception(error)))
        return protocol.error_reply(error), ()

    def _answer(self, connection: _Connection, reply: Reply) -> None:
        if connection.closed:
            return
        message, fds = reply
        try:
            connection.outbox.put(message, fds)
        except (ProtocolError, OSError) as error:
            self._refuse(connection, ProtocolError(f"cannot answer: {error}"))
            return
        self._flush(connection)

    def _run_tasks(self) -> None:
        now = time.monotonic()
        tasks, self._tasks = self._tasks, []
        for connection, steps, due in tasks:
            if due > now:
                self._tasks.append((connection, steps, due))
                continue
            try:
                wait = next(steps)
            except StopIteration as end:
                reply: Reply = end.value
            except Exception as error:
                reply = self._failure(connection, "a request", error)
            else:
                self._tasks.append((connection, steps, time.monotonic() + wait if wait else 0.0))
                continue
            connection.busy = False
            self._answer(connection, reply)
            self._resume(connection)

    def _resume(self, connection: _Connection) -> None:
        """Goes on with requests that were read behind the one that took long."""
        if connection.closed:
            return
        try:
            self._next_request(connection)
        except ProtocolError as error:
            self._refuse(connection, error)
        self._update(connection)

    def _push(self, message: protocol.Message, fds: tuple[int, ...] = ()) -> Generator[float, None, None]:
        """Tells the agent, and waits until the kernel has it: then the agent has it even if this process dies now.

        An agent that does not read is cut off after a while (it subscribes again and gets everything): its stop must not stop the trainers.
        """
        until = time.monotonic() + PUSH_SECS
        waiting: list[tuple[_Connection, int]] = []
        for connection in [connection for connection in self._connections if connection.subscribed]:
            try:
                waiting.append((connection, connection.outbox.put(message, fds)))
            except ProtocolError as error:
                self._log(f"dropped the subscription of {connection.label}: {error}")
                self._close(connection)
                continue
            self._flush(connection)
        while waiting := [(c, ticket) for c, ticket in waiting if not c.closed and c.outbox.sent < ticket]:
            if time.monotonic() >= until:
                for connection, _ in waiting:
                    self._log(f"dropped the subscription of {connection.label}: it did not read for {PUSH_SECS:g} s")
                    self._close(connection)
                return
            yield 0.005

    # Processes.

    def _watch(self, identity: ProcessId, pidfd: int, label: str, on_death: Callable[[], None]) -> _Process:
        process = _Process(identity, pidfd, label)
        self._selector.register(pidfd, selectors.EVENT_READ, on_death)
        return process

    def _unwatch(self, process: _Process) -> None:
        self._selector.unregister(process.pidfd)
        os.close(process.pidfd)

    def _living_holders(self) -> list[_Process]:
        return [process for process in self._holders.values() if not _exited(process.pidfd)]

    def _hold(self, name: str, identity: ProcessId, pidfd: int, label: str) -> Entry:
        """Grants a lease; `pidfd` is duplicated. Returns the entry as it was."""
        if identity not in self._holders:
            self._holders[identity] = self._watch(identity, os.dup(pidfd), label, partial(self._holder_died, identity))
        self._holders[identity].label = label
        return self._store.lease(name, identity)

    def _holder_died(self, identity: ProcessId) -> None:
        process = self._holders.pop(identity, None)
        if process is None:
            return
        self._unwatch(process)
        names = self._store.orphan(identity)
        self._log(f"{process.label} is dead; kept without a writer: {', '.join(names) or 'nothing'}")
        for connection in [connection for connection in self._connections if connection.subscribed]:
            for name in names:
                with contextlib.suppress(ProtocolError):
                    connection.outbox.put({"event": "orphan", "name": name, "pid": identity.pid})
            self._flush(connection)

    def _agent_died(self) -> None:
        if self._agent is None:
            return
        self._unwatch(self._agent)
        agent, self._agent = self._agent, None
        for connection in list(self._connections):
            if connection.identity == agent.identity:
                self._close(connection)
        self._orphan_deadline = time.monotonic() + self._orphan_timeout_secs
        self._log(f"the agent, process {agent.pid}, is dead: killing its children, keeping {len(self._store)} pieces of memory")
        tokens = {token for _, token in self._children}
        self._fence = Fence(tokens, [identity for identity, _ in self._children if identity is not None], FENCE_SECS)

    def _fence_done(self, report: FenceReport) -> None:
        self._fence, self._fence_report, self._children = None, report, []
        self._log(f"killed {len(report.killed)} processes of the dead agent in {report.elapsed_secs:.3f} s")
        for process in report.remaining:
            self._log(f"cannot kill process {process.pid} ({process.command}): state {process.state}, in {process.wchan}")
        self._orphan_deadline = time.monotonic() + self._orphan_timeout_secs

    # Requests.

    def _op_hello(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Reply | Steps:
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
        return {
            "ok": True,
            "job": self._job,
            "pid": os.getpid(),
            "version": VERSION,
            "agent": None if self._agent is None else self._agent.pid,
            "fence": _fence_message(self._fence_report),
        }

    def _greet_agent(self, connection: _Connection) -> Steps:
        if self._agent is not None and _exited(self._agent.pidfd):
            self._agent_died()
        while self._fence is not None:  # two incarnations must never live at once
            yield 0.01
        if self._agent is not None and self._agent.identity != connection.identity:
            raise JobError(
                f"job {self._job!r} already has an agent, process {self._agent.pid}: choose another --job, or end it with `leto stop`"
            )
        if connection.closed:
            raise ProtocolError("the connection closed while it waited")
        if self._agent is None:
            self._agent = self._watch(connection.identity, os.dup(connection.pidfd), connection.label, self._agent_died)
            self._log(f"the agent is process {connection.peer.pid}")
        connection.role = "agent"
        return self._greeting(), ()

    def _expect_agent(self, connection: _Connection, request: protocol.Message) -> None:
        if connection.role != "agent" or self._agent is None or self._agent.identity != connection.identity:
            raise JobError(f"only the agent of job {self._job!r} may ask for {request['op']!r}, this is {connection.label}")

    def _expect_member(self, connection: _Connection, request: protocol.Message) -> None:
        if connection.role == "tool":
            raise JobError(f"a tool may only read, {request['op']!r} is for the processes of job {self._job!r}")

    def _op_reserve(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        self._expect_member(connection, request)
        name = check_name(_text(request, "name"))
        nbytes = _integer(request, "bytes", 1, MAX_BYTES)
        kind = request.get("kind", ARENA)
        if kind != ARENA:
            raise UsageError(f"only host memory can be reserved (kind {ARENA!r}), found {kind!r}")
        return self._reserve(name, nbytes)

    def _reserve(self, name: str, nbytes: int) -> Steps:
        while self._reserving:  # one at a time: two that fit only alone must not fail both, half way
            yield 0.005
        entry = self._store.find(name)
        if entry is None:
            self._store.check_room(name)
            self._reserving = True
            try:
                steps = memory.reserve_steps(name, nbytes)
                while True:
                    try:
                        next(steps)
                    except StopIteration as end:
                        fd: int = end.value
                        break
                    yield 0.0
            finally:
                self._reserving = False
            entry = Entry(name, ARENA, nbytes, fd)
            self._store.put(entry)
            yield from self._push({"event": "descriptor", **entry.describe()}, (entry.fd,))
        entry = self._store.get(name, ARENA)
        if entry.nbytes != nbytes:
            raise UsageError(
                f"arena {name!r} exists with {entry.nbytes} bytes, {nbytes} are asked for: the plan of this process differs from the job's"
            )
        return {"ok": True, **entry.describe()}, (entry.fd,)

    def _op_open(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        entry = self._store.get(_text(request, "name"))
        return {"ok": True, **entry.describe()}, (entry.fd,)

    def _op_get_blob(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        entry = self._store.get(_text(request, "name"), BLOB)
        return {"ok": True, **entry.describe()}, (entry.fd,)

    def _op_lease(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        self._expect_member(connection, request)
        return self._lease(connection, self._store.get(_text(request, "name"), ARENA).name)

    def _lease(self, connection: _Connection, name: str) -> Steps:
        holder = self._store.get(name, ARENA).holder
        if holder is not None and holder != connection.identity:
            process = self._holders[holder]
            if not _exited(process.pidfd):  # its death may not have been read from the selector yet
                raise JobError(
                    f"arena {name!r} is leased by {process.label}, which lives: one writer per arena, and a lease ends with the writer's death"
                )
            self._holder_died(holder)
        if _exited(connection.pidfd):
            raise ProtocolError(f"{connection.label} is dead")
        before = self._hold(name, connection.identity, connection.pidfd, connection.label)
        entry = self._store.get(name, ARENA)
        yield from self._push({"event": "lease", "name": name, "holder": entry.describe()["holder"]})
        return {"ok": True, "name": name, "orphaned_by": before.orphaned_by}, ()

    def _op_put_blob(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        if connection.identity not in self._holders:
            raise JobError(f"only a process with a lease may put a blob, {connection.label} has none: lease an arena first")
        name = check_name(_text(request, "name"))
        nbytes = _integer(request, "bytes", 0, MAX_BYTES)
        sha256 = check_sha256(_text(request, "sha256"))
        return self._put_blob(name, nbytes, sha256, _one_fd(request, fds))

    def _put_blob(self, name: str, nbytes: int, sha256: str, fd: int) -> Steps:
        self._check_blob_place(name)
        yield from _check_blob(name, nbytes, sha256, fd)
        self._check_blob_place(name)  # while it was hashed others have been served
        entry = Entry(name, BLOB, nbytes, os.dup(fd), sha256)
        self._store.put(entry)
        yield from self._push({"event": "descriptor", **entry.describe()}, (fd,))
        return {"ok": True, **entry.describe()}, ()

    def _check_blob_place(self, name: str) -> None:
        self._store.check_room(name)
        if self._store.find(name) is not None:
            self._store.get(name, BLOB)

    def _op_list(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
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

    def _op_children(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        self._expect_agent(connection, request)
        items = request.get("pids")
        if not isinstance(items, list) or len(items) > MAX_CHILDREN or not all(isinstance(item, dict) for item in items):
            raise UsageError(f"children: expected a list of at most {MAX_CHILDREN} objects with pid and token as 'pids', found {items!r}")
        known = {identity.pid: identity for identity, _ in self._children if identity is not None}
        children: list[tuple[ProcessId | None, str]] = []
        for item in items:
            token = check_token(item.get("token"))
            if item.get("pid") is None:
                children.append((None, token))
                continue
            pid = _integer({"op": "children", **item}, "pid", 2, 1 << 30)
            # A process that has died since it was first named keeps its identity: its group may live, and its number may be given out again.
            identity = known.get(pid)
            current = process_id(pid)
            if identity is None or (current is not None and current != identity):
                identity = current or ProcessId(pid, -1)
            children.append((identity, token))
        self._children = children
        return {"ok": True}, ()

    def _op_subscribe(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        self._expect_agent(connection, request)
        return self._subscribe(connection)

    def _subscribe(self, connection: _Connection) -> Steps:
        connection.subscribed = True
        for entry in self._store:
            connection.outbox.put({"event": "descriptor", **entry.describe()}, (entry.fd,))
            if len(self._store) > 64:
                self._flush(connection)
        return {"ok": True, "count": len(self._store)}, ()
        yield 0.0

    def _op_adopt(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Steps:
        self._expect_agent(connection, request)
        return self._adopt(request, fds)

    def _adopt(self, request: protocol.Message, fds: Sequence[int]) -> Steps:
        fd = _one_fd(request, fds)
        name = check_name(_text(request, "name"))
        kind = _text(request, "kind")
        nbytes = _integer(request, "bytes", 0, MAX_BYTES)
        holder = _identity_in(request, "holder")
        sha256 = None
        if kind not in KINDS:
            raise UsageError(f"{name!r}: expected a kind out of {', '.join(KINDS)}, found {kind!r}")
        self._store.check_room(name)
        if kind == BLOB:
            sha256 = check_sha256(_text(request, "sha256"))
            yield from _check_blob(name, nbytes, sha256, fd)
        elif memory.size(fd) != nbytes or not memory.has_sealed_size(fd):
            raise UsageError(
                f"arena {name!r}: expected memory of {nbytes} bytes with a sealed size, found {memory.size(fd)} bytes, seals {memory.seals(fd):#x}"
            )
        known = self._store.find(name)
        if known is None:
            entry = Entry(name, kind, nbytes, os.dup(fd), sha256)
            self._store.put(entry)
            yield from self._push({"event": "descriptor", **entry.describe()}, (fd,))
        elif not os.path.samestat(os.fstat(known.fd), os.fstat(fd)):
            raise JobError(f"{name!r} is kept already, as {known.kind} of {known.nbytes} bytes, and is not the same memory")
        if kind == ARENA and holder is not None and self._store.get(name).holder is None:
            self._adopt_lease(name, holder)
        return {"ok": True}, ()

    def _adopt_lease(self, name: str, holder: ProcessId) -> None:
        """A writer that got its lease from the last manager keeps it, if it is still the same process and lives."""
        try:
            pidfd = os.pidfd_open(holder.pid)
        except OSError:
            pidfd = -1
        try:
            if pidfd >= 0 and not is_dead(holder) and not _exited(pidfd) and os.stat(f"/proc/{holder.pid}").st_uid == os.geteuid():
                self._hold(name, holder, pidfd, f"process {holder.pid} (leased from the last manager)")
            else:
                self._store.lease(name, holder)
                self._store.orphan(holder)
        except OSError:
            self._store.orphan(holder)
        finally:
            if pidfd >= 0:
                os.close(pidfd)

    def _op_free(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        if self._agent is not None and self._agent.identity != connection.identity and not _exited(self._agent.pidfd):
            raise JobError(f"job {self._job!r} has an agent, process {self._agent.pid}: end it with `leto stop`, not its memory alone")
        living = [process for process in self._living_holders() if process.identity != connection.identity]
        if living and request.get("force") is not True:
            raise JobError(f"cannot free the memory of job {self._job!r}: {_names(living)} still write to it; end them first")
        self._exit = f"freed by {connection.label}"
        return {"ok": True}, ()

    def _op_status(self, connection: _Connection, request: protocol.Message, fds: Sequence[int]) -> Reply:
        entries = list(self._store)
        budget = limits.available_bytes()
        message: protocol.Message = {
            "ok": True,
            "job": self._job,
            "pid": os.getpid(),
            "uptime_secs": time.monotonic() - self._started,
            "agent": None if self._agent is None else self._agent.pid,
            "fencing": self._fence is not None,
            "fence": _fence_message(self._fence_report),
            "arenas": sum(entry.kind == ARENA for entry in entries),
            "blobs": sum(entry.kind == BLOB for entry in entries),
            "bytes": sum(entry.nbytes for entry in entries),
            "holders": [process.pid for process in self._living_holders()],
            "children": len(self._children),
            "connections": len(self._connections),
            "orphan_timeout_secs": _finite(self._orphan_timeout_secs),
            "free_in_secs": None if self._agent is not None else _finite(max(self._orphan_deadline - time.monotonic(), 0.0)),
            "memory": {**budget._asdict(), "available": budget.available},
        }
        return message, ()


def _finite(secs: float) -> float | None:
    return secs if secs != float("inf") else None


def _exited(pidfd: int) -> bool:
    with selectors.PollSelector() as selector:
        selector.register(pidfd, selectors.EVENT_READ)
        return bool(selector.select(0))


def _names(processes: Sequence[_Process]) -> str:
    return ", ".join(process.label for process in processes)


def _fence_message(report: FenceReport | None) -> protocol.Message | None:
    if report is None:
        return None
    return {
        "killed": list(report.killed)[:1000],
        "remaining": [process._asdict() for process in report.remaining[:100]],
        "elapsed_secs": report.elapsed_secs,
    }


def _check_blob(name: str, nbytes: int, sha256: str, fd: int) -> Generator[float, None, None]:
    if memory.size(fd) != nbytes:
        raise UsageError(f"blob {name!r}: expected {nbytes} bytes, found {memory.size(fd)}")
    if not memory.is_sealed(fd):
        raise UsageError(
            f"blob {name!r}: expected a memfd sealed against writing and resizing (memory.seal_blob), found seals {memory.seals(fd):#x}"
        )
    steps = memory.digest_steps(fd, nbytes)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found = end.value
            break
        yield 0.0
    if found != sha256:
        raise UsageError(f"blob {name!r}: expected sha256 {sha256}, found {found}: refused, what was kept before stays")


def _closing(steps: Steps, fds: Sequence[int]) -> Steps:
    """Closes the request's descriptors when its work ends, however it ends."""
    try:
        return (yield from steps)
    finally:
        protocol.close_fds(fds)


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
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("leto-manager")


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 the memory was given up, 2 it did not start (the reason is on stderr)."""
    parser = argparse.ArgumentParser(prog="leto_jax.manager.server", description="State manager of one leto job.")
    parser.add_argument("--job", required=True)
    parser.add_argument("--dir", required=True, help="private directory of the job: socket, lock and log")
    parser.add_argument("--orphan-timeout-secs", type=float, required=True, help="free the memory after this long without an agent (inf: never)")
    parser.add_argument("--adopt-fd", type=int, help="socket on which an agent hands back what a dead manager kept")
    options = parser.parse_args(argv)
    _leave_terminal()
    try:
        server = Server(options.job, options.dir, options.orphan_timeout_secs)
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
