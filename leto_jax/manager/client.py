"""The client of the state manager: for the agent, trainers, shadows and tools.

    with ManagerClient(socket_path, "trainer", rank=0, incarnation=1) as manager:
        arena = manager.reserve("rank0/device0", nbytes)   # a Descriptor: owns its fd
        manager.lease("rank0/device0")                     # the one writer, until this process is dead

Refusals of the manager are raised here as their own classes of `leto_jax.errors`, with the manager's text.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import leto_jax
from leto_jax.errors import DeadlineError, JobError, LetoError, ProtocolError, RecordError
from leto_jax.manager import memory, protocol, runtime
from leto_jax.manager.fence import TOKEN_VARIABLE, FenceReport, ProcessId, Remaining
from leto_jax.manager.store import ARENA, BLOB

REPLY_SECS = 30.0
RESERVE_SECS = 600.0
AGENT_HELLO_SECS = 30.0  # the manager first fences what the last agent left behind
_REFUSAL_SECS = 1.0
_RETRY_SECS = 0.01
_LOG_TAIL_BYTES = 2000


class Descriptor:
    """Owns one descriptor of retained memory. It stays valid when the manager dies; close it, or use it as a context manager.

    kind: "arena" or "blob". sha256: of a blob, else None. holder: the writer when the descriptor was sent, None if there was none.
    The open file is shared between processes, its offset too: use `mmap` and `pread`, not `read`.
    """

    def __init__(self, name: str, kind: str, nbytes: int, fd: int, sha256: str | None = None, holder: ProcessId | None = None) -> None:
        self.name = name
        self.kind = kind
        self.nbytes = nbytes
        self.fd = fd
        self.sha256 = sha256
        self.holder = holder

    def fileno(self) -> int:
        return self.fd

    def read(self) -> bytes:
        """A copy of the content; of a blob, checked against its digest.

        Raises:
          RecordError: the content of a blob is not what was put.
        """
        pieces = []
        offset = 0
        while offset < self.nbytes:
            piece = os.pread(self.fd, min(self.nbytes - offset, 1 << 30), offset)
            if not piece:
                raise RecordError(f"{self.kind} {self.name!r}: expected {self.nbytes} bytes, found {offset}")
            pieces.append(piece)
            offset += len(piece)
        if self.sha256 is not None and (found := memory.digest(self.fd, self.nbytes)) != self.sha256:
            raise RecordError(f"blob {self.name!r}: expected sha256 {self.sha256}, found {found}: put it again")
        return b"".join(pieces)

    def duplicate(self) -> Descriptor:
        """Another owner of the same memory."""
        return Descriptor(self.name, self.kind, self.nbytes, os.dup(self.fd), self.sha256, self.holder)

    def detach(self) -> int:
        """Gives the descriptor away: the caller closes it."""
        fd, self.fd = self.fd, -1
        return fd

    def close(self) -> None:
        fd = self.detach()
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def __repr__(self) -> str:
        return f"Descriptor({self.name!r}, {self.kind}, nbytes={self.nbytes}, fd={self.fd})"


class Kept(NamedTuple):
    """One line of `ManagerClient.list`. orphaned_by: pid of the dead writer whose state waits to be recovered."""

    name: str
    kind: str
    nbytes: int
    sha256: str | None
    holder: ProcessId | None
    orphaned_by: int | None


class Event(NamedTuple):
    """What a subscription was told: `descriptor` (new, or replaced), `lease` (pid holds the arena), `orphan` (pid died), `gone` (its memory
    has another name now, or was given up)."""

    kind: str
    name: str
    pid: int | None


def _holder_of(message: Mapping[str, Any]) -> ProcessId | None:
    holder = message.get("holder")
    return None if holder is None else ProcessId(int(holder["pid"]), int(holder["start"]))


def _kept_of(item: Mapping[str, Any]) -> Kept:
    return Kept(item["name"], item["kind"], item["bytes"], item.get("sha256"), _holder_of(item), item.get("orphaned_by"))


def _descriptor_of(message: Mapping[str, Any], fds: list[int]) -> Descriptor:
    if len(fds) != 1:
        protocol.close_fds(fds)
        raise ProtocolError(f"expected one descriptor with {message.get('name')!r}, found {len(fds)}")
    try:
        return Descriptor(
            str(message["name"]), str(message["kind"]), int(message["bytes"]), fds[0], message.get("sha256"), _holder_of(message)
        )
    except (KeyError, TypeError, ValueError) as error:
        protocol.close_fds(fds)
        raise ProtocolError(f"a descriptor comes with name, kind and bytes, found {dict(message)}") from error


class _Connection:
    """One socket with a hello; a request at a time, from any thread of the process that made it."""

    def __init__(self, path: str, hello: protocol.Message, connect_secs: float, hello_secs: float) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self.path = path
        self.sock: socket.socket | None = protocol.connect(path, deadline=time.monotonic() + connect_secs, what="the state manager")
        try:
            self.greeting, fds = self.request(hello, (), hello_secs)
            protocol.close_fds(fds)
        except BaseException:
            self.close()
            raise

    def request(self, message: protocol.Message, fds: Iterable[int], timeout_secs: float) -> tuple[protocol.Message, list[int]]:
        if os.getpid() != self._pid:
            raise ProtocolError(f"this connection belongs to process {self._pid}, process {os.getpid()} is a fork of it: open a new one")
        with self._lock:
            return self._exchange(message, tuple(fds), time.monotonic() + timeout_secs)

    def _exchange(self, message: protocol.Message, fds: tuple[int, ...], deadline: float) -> tuple[protocol.Message, list[int]]:
        if self.sock is None:
            raise ProtocolError(f"the connection to the state manager at {self.path} is closed: `reconnect` first")
        protocol.encode(message, len(fds))  # a message that breaks a limit leaves the connection as it is
        try:
            try:
                protocol.send(self.sock, message, fds, deadline=deadline)
            except ProtocolError:
                # A manager that refuses this process says why before it closes.
                reply, received = protocol.receive(self.sock, deadline=min(deadline, time.monotonic() + _REFUSAL_SECS))
            else:
                reply, received = protocol.receive(self.sock, deadline=deadline)
        except (ProtocolError, DeadlineError) as error:
            self.close()
            if isinstance(error, DeadlineError):
                raise DeadlineError(f"the state manager at {self.path} did not answer {message['op']!r} in time: {error}") from error
            raise ProtocolError(f"lost the state manager at {self.path} during {message['op']!r}: {error}") from error
        try:
            protocol.raise_error(reply)
        except LetoError:
            protocol.close_fds(received)
            raise
        return reply, received

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class Subscription:
    """The agent's duplicates of everything that the manager keeps, and what it is told from then on; a connection of its own.

    `fileno()` is for a select loop: when it is readable, call `poll`. When the manager dies, `lost` becomes true and `descriptors` stay:
    hand them to `spawn_manager(adopt=...)`. Every change arrives before the process that asked for it got its answer.
    """

    def __init__(self, connection: _Connection, timeout_secs: float = REPLY_SECS) -> None:
        assert connection.sock is not None
        self.descriptors: dict[str, Descriptor] = {}
        self.lost = False
        self._connection = connection
        self._sock = connection.sock
        self._decoder = protocol.Decoder()
        deadline = time.monotonic() + timeout_secs
        protocol.send(self._sock, {"op": "subscribe"}, deadline=deadline)
        while True:  # what exists comes first, then the reply
            message, fds = protocol.receive(self._sock, deadline=deadline)
            if "event" not in message:
                protocol.close_fds(fds)
                protocol.raise_error(message)
                return
            self._take(message, fds)

    def fileno(self) -> int:
        return self._sock.fileno()

    def poll(self) -> list[Event]:
        """Everything that has arrived; does not wait. An empty list with `lost` set means that the manager is gone.

        Raises:
          ProtocolError: the manager sent something else; treat it as lost.
        """
        events: list[Event] = []
        while not self.lost:
            try:
                if not self._decoder.read_from(self._sock):
                    self.lost = True
            except BlockingIOError:
                break
            except ProtocolError:
                self.lost = True  # cut off in the middle of a message: that one was not promised to anybody yet
            else:
                while (received := self._decoder.next_message()) is not None:
                    events.append(self._take(*received))
        return events

    def _take(self, message: protocol.Message, fds: list[int]) -> Event:
        kind, name = message.get("event"), str(message.get("name"))
        if kind == "descriptor":
            descriptor = _descriptor_of(message, fds)
            before = self.descriptors.get(name)
            self.descriptors[name] = descriptor
            if before is not None:
                before.close()
            return Event(kind, name, None)
        protocol.close_fds(fds)
        known = self.descriptors.get(name)
        if kind == "lease" and known is not None:
            known.holder = _holder_of(message)
            return Event(kind, name, known.holder.pid if known.holder is not None else None)
        if kind == "gone" and known is not None:
            self.descriptors.pop(name).close()
            return Event(kind, name, None)
        if kind == "orphan" and known is not None:
            known.holder = None
            return Event(kind, name, int(message["pid"]))
        raise ProtocolError(f"expected an event descriptor, lease, orphan or gone of a known name, found {message}")

    def close(self, descriptors: bool = True) -> None:
        """Ends the subscription; keeps the duplicates open if `descriptors` is false (they are the caller's then)."""
        self._connection.close()
        self._decoder.close()
        if descriptors:
            for descriptor in self.descriptors.values():
                descriptor.close()
            self.descriptors.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


class ManagerClient:
    """A connection of one process to its job's state manager.

    Args:
      path: the manager's socket (`runtime.job_dir(job) / "manager.sock"`; trainers find it in `LETO_SOCKET`).
      role: "agent", "trainer", "shadow" or "tool" (a tool reads, and frees a job that has no agent).
      rank, incarnation: whose process this is; for messages to people.
      connect_timeout_secs: for the connection and the hello; an agent's hello waits longer, until what a dead agent left is killed.

    Raises:
      JobError: no such job, a dead socket, another user's job, or (role agent) a job that already has an agent.
      DeadlineError: the manager does not answer.

    Threads may share a client. A forked process may not, and is told so; descriptors and sockets are close-on-exec.
    """

    def __init__(
        self, path: str | Path, role: str, rank: int | None = None, incarnation: int = 0, connect_timeout_secs: float = 5.0
    ) -> None:
        self._path = str(path)
        self._hello: protocol.Message = {"op": "hello", "role": role, "rank": rank, "incarnation": incarnation}
        self._connect_secs = connect_timeout_secs
        self._connection = self._connect()

    def _connect(self) -> _Connection:
        hello_secs = max(self._connect_secs, AGENT_HELLO_SECS) if self._hello["role"] == "agent" else self._connect_secs
        return _Connection(self._path, self._hello, self._connect_secs, hello_secs)

    @property
    def job(self) -> str:
        return str(self._connection.greeting["job"])

    @property
    def manager_pid(self) -> int:
        return int(self._connection.greeting["pid"])

    @property
    def last_fence(self) -> FenceReport | None:
        """What the manager did, before it greeted this process, when the last agent died; None if none has."""
        return _fence_of(self._connection.greeting.get("fence"))

    def reconnect(self, timeout_secs: float | None = None) -> None:
        """Connects to whoever listens on the same path; waits up to `timeout_secs` (default: `connect_timeout_secs`) for somebody.

        Descriptors stay valid. Leases were handed to the new manager by the agent; asking for them again is harmless.
        """
        deadline = time.monotonic() + (self._connect_secs if timeout_secs is None else timeout_secs)
        self._connection.close()
        while True:
            try:
                self._connection = self._connect()
                return
            except (JobError, ProtocolError) as error:
                replaced_soon = isinstance(error, ProtocolError) or isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError)
                if not replaced_soon or time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_SECS)

    def become(self, role: str, rank: int | None, incarnation: int) -> None:
        """Changes what this process is, on the same connection: a promoted shadow becomes a trainer."""
        hello: protocol.Message = {"op": "hello", "role": role, "rank": rank, "incarnation": incarnation}
        self._connection.greeting = self._request(hello)
        self._hello = hello

    def _request(self, message: protocol.Message, fds: Iterable[int] = (), timeout_secs: float = REPLY_SECS) -> protocol.Message:
        reply, received = self._connection.request(message, fds, timeout_secs)
        protocol.close_fds(received)
        return reply

    def _request_descriptor(self, message: protocol.Message, timeout_secs: float = REPLY_SECS) -> Descriptor:
        return _descriptor_of(*self._connection.request(message, (), timeout_secs))

    def reserve(self, name: str, nbytes: int, kind: str = ARENA, timeout_secs: float = RESERVE_SECS) -> Descriptor:
        """New zeroed memory with real pages, or the memory that has this name if its size is equal. kind: ARENA, or `store.gpu_kind(n)`.

        Raises:
          MemoryBudgetError: it does not fit into the machine or its cgroup; with the numbers.
          UsageError: the name exists with another size (both are named) or kind.

        *Crash*: of the caller: the memory is kept under its name. Of the manager: the agent has a duplicate if the caller has.
        *Cost*: about 0.5 s per GiB of new host memory, 1 ms per GiB of a GPU's (which is not zeroed).
        """
        return self._request_descriptor({"op": "reserve", "name": name, "bytes": nbytes, "kind": kind}, timeout_secs)

    def open(self, name: str) -> Descriptor:
        """The memory that has this name; `JobError` with the existing names if there is none."""
        return self._request_descriptor({"op": "open", "name": name})

    def lease(self, name: str) -> int | None:
        """Makes this process the one writer of an arena until it is dead; again is harmless.

        Returns:
          The pid of the dead writer whose state is in the arena; None if the last lease ended in another way or was this process's.

        Raises:
          JobError: another process holds the lease and lives; the message names it.

        *Crash*: the arena becomes an orphan with its content, for the next lease.
        """
        orphaned_by = self._request({"op": "lease", "name": name})["orphaned_by"]
        return None if orphaned_by is None else int(orphaned_by)

    def replace(self, name: str, by: str) -> None:
        """Puts the memory of arena `by` in the place of `name`'s, under its name and lease. For its writer; both are of one kind and size.

        *Crash*: the old memory has the name, or the new one; nobody is left with neither.
        """
        self._request({"op": "replace", "name": name, "by": by})

    def discard(self, name: str) -> None:
        """Gives the memory of one arena up, for good. For the agent; nobody may write to it any more.

        Raises JobError while its writer lives.
        """
        self._request({"op": "discard", "name": name})

    def put_blob(self, name: str, data: bytes | bytearray | memoryview) -> str:
        """Keeps a copy of `data` under `name`, replacing what was there at once; returns its SHA-256.

        Raises:
          JobError: this process holds no lease.

        *Crash*: the old blob or the new one, never a part.
        """
        fd, sha256 = memory.make_blob(name, data)
        try:
            self.put_blob_fd(name, fd, len(memoryview(data).cast("B")), sha256)
        finally:
            os.close(fd)
        return sha256

    def put_blob_fd(self, name: str, fd: int, nbytes: int, sha256: str) -> None:
        """`put_blob` for a sealed memfd that the caller has made (`memory.seal_blob`) and keeps."""
        self._request({"op": "put_blob", "name": name, "bytes": nbytes, "sha256": sha256}, (fd,), RESERVE_SECS)

    def get_blob(self, name: str) -> Descriptor:
        """The blob; `Descriptor.read` checks its digest."""
        return self._request_descriptor({"op": "get_blob", "name": name})

    def list(self) -> tuple[Kept, ...]:
        """Everything that is kept, sorted by name."""
        found: list[Kept] = []
        while True:
            reply = self._request({"op": "list", "after": found[-1].name if found else ""})
            found.extend(_kept_of(item) for item in reply["entries"])
            if not reply["more"]:
                return tuple(found)

    def children(self, pids: Iterable[tuple[int | None, str]]) -> None:
        """Agent: which processes die when this one does, as (pid, token); replaces the list that was given before.

        Register a token with pid None *before* the first process that carries it starts: then there is no moment at which the death of the
        agent leaves it behind.
        """
        self._request({"op": "children", "pids": [{"pid": pid, "token": token} for pid, token in pids]})

    def subscribe(self) -> Subscription:
        """Agent: duplicates of everything, now and from now on."""
        connection = self._connect()
        try:
            return Subscription(connection)
        except BaseException:
            connection.close()
            raise

    def adopt(self, descriptor: Descriptor) -> None:
        """Agent: gives a duplicate back to a manager that lacks it, with its lease if the holder lives; the caller keeps its own."""
        self._request(_adopt_message(descriptor), (descriptor.fd,), RESERVE_SECS)

    def free(self, force: bool = False) -> None:
        """Drops everything and ends the manager. The memory is free when the last other descriptor and mapping is closed, too.

        Raises:
          JobError: a process with a lease lives (unless `force`), or the job has an agent and this is not it.
        """
        self._request({"op": "free", "force": force})
        self.close()

    def status(self) -> dict[str, Any]:
        """Numbers for people: pid, uptime_secs, agent, arenas, blobs, bytes, holders, free_in_secs (without an agent), fence, memory."""
        reply = self._request({"op": "status"})
        reply.pop("ok")
        return reply

    def close(self) -> None:
        """Ends the connection; leases and descriptors stay."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _fence_of(message: Mapping[str, Any] | None) -> FenceReport | None:
    if message is None:
        return None
    remaining = tuple(Remaining(**item) for item in message["remaining"])
    return FenceReport(tuple(message["killed"]), remaining, float(message["elapsed_secs"]))


def _adopt_message(descriptor: Descriptor) -> protocol.Message:
    message: protocol.Message = {"op": "adopt", "name": descriptor.name, "kind": descriptor.kind, "bytes": descriptor.nbytes}
    if descriptor.sha256 is not None:
        message["sha256"] = descriptor.sha256
    if descriptor.holder is not None:
        message["holder"] = {"pid": descriptor.holder.pid, "start": descriptor.holder.start}
    return message


class ManagerProcess(NamedTuple):
    """A manager that this process has started and must reap (`process.wait`) once it ends. It outlives this process."""

    path: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid


def spawn_manager(
    job: str,
    runtime_dir: str | Path,
    orphan_timeout_secs: float,
    adopt: Iterable[Descriptor] = (),
    timeout_secs: float = 20.0,
) -> ManagerProcess:
    """Starts a state manager in a session of its own and waits until it answers on `runtime_dir/manager.sock`.

    Its output goes to `runtime_dir/manager.log`. With `adopt`, the new manager has taken these back before anybody can connect to it.

    Raises:
      JobError: it refused to start (another manager lives, the directory is not private, ...), with its own words.
      DeadlineError: it does not answer in time; it was killed.

    *Crash*: of this process: before the hello of an agent the manager frees itself after `orphan_timeout_secs`.
    """
    directory = runtime.ensure_private_dir(runtime_dir)
    path = protocol.check_address(directory / runtime.SOCKET_NAME)
    deadline = time.monotonic() + timeout_secs
    descriptors = list(adopt)
    command = [sys.executable, "-m", "leto_jax.manager.server", "--job", runtime.check_job_name(job), "--dir", str(directory)]
    command += ["--orphan-timeout-secs", repr(float(orphan_timeout_secs))]
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}  # a fence must not find the manager
    package_root = str(Path(next(iter(leto_jax.__path__))).parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, environment.get("PYTHONPATH")]))
    log = os.open(directory / runtime.LOG_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        try:
            log_start = os.fstat(log).st_size
            if descriptors:
                command += ["--adopt-fd", str(theirs.fileno())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env=environment,
                start_new_session=True,
                pass_fds=(theirs.fileno(),) if descriptors else (),
            )
        finally:
            os.close(log)
        theirs.close()
        manager = ManagerProcess(path, process)
        try:
            if descriptors:
                _hand_over(ours, descriptors, deadline)
            while (greeting := runtime.probe(path)) is None or greeting.get("pid") != process.pid:
                if process.poll() is not None:
                    raise JobError(f"the state manager of job {job!r} did not start: {_log_tail(directory, log_start)}")
                if time.monotonic() >= deadline:
                    raise DeadlineError(f"the state manager of job {job!r} does not answer at {path}: {_log_tail(directory, log_start)}")
                time.sleep(_RETRY_SECS)
        except BaseException as error:
            process.kill()
            process.wait()
            if isinstance(error, ProtocolError):  # it ended during the hand-over
                raise JobError(f"the state manager of job {job!r} did not start: {_log_tail(directory, log_start)}") from error
            raise
    return manager


def _hand_over(sock: socket.socket, descriptors: list[Descriptor], deadline: float) -> None:
    for descriptor in descriptors:
        protocol.send(sock, _adopt_message(descriptor), (descriptor.fd,), deadline=deadline)
        reply, fds = protocol.receive(sock, deadline=deadline)
        protocol.close_fds(fds)
        protocol.raise_error(reply)
    protocol.send(sock, {"op": "adopted"}, deadline=deadline)


def _log_tail(directory: Path, start: int) -> str:
    with contextlib.suppress(OSError):
        text = (directory / runtime.LOG_NAME).read_bytes()[start:][-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
        if text:
            return text
    return f"it said nothing (see {directory / runtime.LOG_NAME})"


__all__ = ["ARENA", "BLOB", "Descriptor", "Event", "Kept", "ManagerClient", "ManagerProcess", "Subscription", "spawn_manager"]
