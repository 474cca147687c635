"""A select loop that serves framed requests to processes of the same user: one thread, one reply per request, in order.

What is asked is the owner's business: a handler gets (connection, request, descriptors) and returns the reply, or a generator for work that
takes long. The loop resumes generators between other requests; their connection is not read meanwhile. Errors become error replies, and no
mistake of a handler or of a peer ends the loop. Knows nothing of retained memory.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import socket
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from leto_jax.errors import JobError, LetoError, ProtocolError
from leto_jax.manager import protocol
from leto_jax.manager.fence import ProcessId, process_id

MAX_CONNECTIONS = 1024
PARTIAL_SECS = 10.0
PUSH_SECS = 10.0
_ACCEPT_PAUSE_SECS = 0.2
_LOG_LINES_PER_MINUTE = 200

Reply = tuple[protocol.Message, tuple[int, ...]]  # the descriptors stay the handler's
Steps = Generator[float, None, Reply]  # yields for how many seconds it need not be resumed


class Log:
    """One line per event on stderr, bounded per minute so that no peer can fill the disk."""

    def __init__(self, name: str) -> None:
        self._name = name
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
            print(time.strftime("%Y-%m-%d %H:%M:%S"), f"{self._name} {os.getpid()}:", text, file=sys.stderr, flush=True)


def exited(pidfd: int) -> bool:
    """Whether the process behind a pidfd is dead (a zombie is: all its threads have given up their memory)."""
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    return bool(poller.poll(0))


class Connection:
    """One peer. `identity` and `pidfd` are of the process that connected; `label` is how log and errors call it."""

    def __init__(self, sock: socket.socket, peer: protocol.Peer, identity: ProcessId, pidfd: int) -> None:
        self.sock = sock
        self.peer = peer
        self.identity = identity
        self.pidfd = pidfd
        self.role: str | None = None
        self.label = f"process {peer.pid}"
        self.decoder = protocol.Decoder()
        self.outbox = protocol.Outbox(sock)
        self.busy = False  # a request is being worked on: nothing is read
        self.closing = False  # closes when the outbox is empty
        self.closed = False
        self.events = 0  # what the selector watches
        self.waits_since: float | None = None  # for the rest of a message, or for the peer to read its refusal


class _Task(NamedTuple):
    """A request that takes long: its generator, its descriptors, and when to resume it."""

    connection: Connection
    steps: Steps
    fds: list[int]
    due: float


Handler = Callable[[Connection, protocol.Message, Sequence[int]], Reply | Steps]


class Hub:
    """Owns the listening socket, the connections and the work in progress.

    Args:
      handle: answers one request, or raises; descriptors of the request are closed when it is answered (`os.dup` what is kept).
      what: what a stranger of another user is told that it may not use.
    """

    def __init__(self, handle: Handler, log: Log, what: str) -> None:
        self._handle_request = handle
        self._log = log
        self._what = what
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = None
        self._accept_again: float | None = None
        self._tasks: list[_Task] = []
        self.connections: set[Connection] = set()

    def listen(self, sock: socket.socket) -> None:
        """Accepts connections on `sock` from now on, instead of on the one before; owns it."""
        if self._listener is not None:
            if self._accept_again is None:
                self._selector.unregister(self._listener)
            self._listener.close()
        self._listener = sock
        self._accept_again = None
        self._selector.register(sock, selectors.EVENT_READ, self._accept)

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Calls `call` whenever `fd` is readable (a pidfd: when its process is dead)."""
        self._selector.register(fd, selectors.EVENT_READ, call)

    def unwatch(self, fd: int) -> None:
        self._selector.unregister(fd)

    def turn(self, wait_secs: float) -> None:
        """One turn of the loop: waits at most so long, less if work is due; never raises."""
        now = time.monotonic()
        for task in self._tasks:
            wait_secs = min(wait_secs, task.due - now)
        for key, _ in self._selector.select(max(wait_secs, 0.0)):
            self.guarded(key.data)
        self._run_tasks()
        self.guarded(self._tick)

    def guarded(self, call: Callable[[], None]) -> None:
        """A mistake of ours must not end the process: it is logged, and the loop goes on."""
        try:
            call()
        except Exception:
            self._log("internal error\n" + traceback.format_exc())

    def push(self, targets: Iterable[Connection], message: protocol.Message, fds: tuple[int, ...] = ()) -> Generator[float, None, None]:
        """Sends `message` unasked, and waits until the kernel has it for every target: then they have it even if this process dies now.

        A target that does not read for `PUSH_SECS` is cut off: its stop must not stop the others.
        """
        until = time.monotonic() + PUSH_SECS
        waiting = [(connection, ticket) for connection in targets if (ticket := self.post(connection, message, fds)) is not None]
        while waiting := [(c, ticket) for c, ticket in waiting if not c.closed and c.outbox.sent < ticket]:
            if time.monotonic() >= until:
                for connection, _ in waiting:
                    self._log(f"cut off {connection.label}: it did not read for {PUSH_SECS:g} s")
                    self.close_connection(connection)
                return
            yield 0.005

    def post(self, connection: Connection, message: protocol.Message, fds: tuple[int, ...] = ()) -> int | None:
        """Queues a message; returns the ticket that `connection.outbox.sent` reaches, None if the connection had to be closed."""
        if connection.closed:
            return None
        try:
            ticket = connection.outbox.put(message, fds)
        except (ProtocolError, OSError) as error:
            self._log(f"cut off {connection.label}: {error}")
            self.close_connection(connection)
            return None
        self._flush(connection)
        return ticket

    def drain(self, timeout_secs: float) -> None:
        """Sends what waits in the outboxes, for at most so long."""
        until = time.monotonic() + timeout_secs
        while any(connection.outbox.pending for connection in self.connections) and time.monotonic() < until:
            for connection in list(self.connections):
                self._flush(connection)
            time.sleep(0.005)

    def close(self) -> None:
        """Closes everything that it owns; unfinished work is dropped."""
        for task in self._tasks:
            with contextlib.suppress(Exception):
                task.steps.close()
            protocol.close_fds(task.fds)
        self._tasks.clear()
        for connection in list(self.connections):
            self.close_connection(connection)
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self._selector.close()

    def close_connection(self, connection: Connection) -> None:
        if connection.closed:
            return
        connection.closed = True
        self.connections.discard(connection)
        if connection.events:
            self._selector.unregister(connection.sock)
        connection.decoder.close()
        connection.outbox.close()
        connection.sock.close()
        os.close(connection.pidfd)

    def _tick(self) -> None:
        now = time.monotonic()
        for connection in list(self.connections):
            if connection.waits_since is not None and now - connection.waits_since > PARTIAL_SECS:
                if connection.closing:
                    self.close_connection(connection)
                else:
                    self._refuse(connection, ProtocolError(f"no complete message within {PARTIAL_SECS:g} s"))
        if self._listener is not None and self._accept_again is not None and now >= self._accept_again:
            self._accept_again = None
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

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
                self._accept_again = time.monotonic() + _ACCEPT_PAUSE_SECS
            return
        sock.setblocking(False)
        pidfd = -1
        try:
            peer = protocol.peer_of(sock)
            if peer.uid != os.geteuid():
                raise JobError(f"{self._what} belongs to uid {os.geteuid()}; process {peer.pid} has uid {peer.uid}")
            if len(self.connections) >= MAX_CONNECTIONS:
                raise JobError(f"{MAX_CONNECTIONS} connections are open already, refused process {peer.pid}")
            pidfd = protocol.peer_pidfd(sock)
            identity = process_id(peer.pid)
            if identity is None or exited(pidfd):
                raise ProtocolError(f"the peer, process {peer.pid}, is dead")
        except (LetoError, OSError) as error:
            self._log(f"refused a connection: {error}")
            with contextlib.suppress(OSError):
                sock.send(protocol.encode(protocol.error_reply(error)))
            protocol.close_fds([pidfd] if pidfd >= 0 else [])
            sock.close()
            return
        connection = Connection(sock, peer, identity, pidfd)
        self.connections.add(connection)
        self._update(connection)

    def _update(self, connection: Connection) -> None:
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

    def _flush(self, connection: Connection) -> None:
        if connection.closed:
            return
        try:
            connection.outbox.flush()
        except ProtocolError:
            self.close_connection(connection)
            return
        if connection.closing and not connection.outbox.pending:
            self.close_connection(connection)
        else:
            self._update(connection)

    def _refuse(self, connection: Connection, error: LetoError) -> None:
        """What came is not a message: says so and closes, since the place in the stream is lost."""
        if connection.closed:
            return
        self._log(f"closes the connection of {connection.label}: {error}")
        connection.closing = True
        connection.waits_since = time.monotonic()
        with contextlib.suppress(ProtocolError):
            connection.outbox.put(protocol.error_reply(error))
        self._flush(connection)

    def _serve(self, connection: Connection) -> None:
        try:
            if connection.outbox.pending:
                self._flush(connection)
            if connection.closed or connection.busy or connection.closing:
                return
            try:
                goes_on = connection.decoder.read_from(connection.sock)
            except BlockingIOError:
                return
            if goes_on:
                self._next_requests(connection)
            else:
                self.close_connection(connection)
        except ProtocolError as error:
            self._refuse(connection, error)
        except Exception:
            self.close_connection(connection)  # what made it fail would come again with the next turn
            raise

    def _next_requests(self, connection: Connection) -> None:
        while not (connection.busy or connection.closing or connection.closed):
            received = connection.decoder.next_message()
            if received is None:
                if not connection.decoder.partial:
                    connection.waits_since = None
                elif connection.waits_since is None:
                    connection.waits_since = time.monotonic()
                return
            connection.waits_since = None
            self._begin(connection, *received)

    def _begin(self, connection: Connection, request: protocol.Message, fds: list[int]) -> None:
        try:
            result = self._handle_request(connection, request, fds)
        except Exception as error:
            result = self._failure(connection, request.get("op"), error)
        if isinstance(result, tuple):
            self._answer(connection, result)
            protocol.close_fds(fds)
            return
        connection.busy = True
        self._tasks.append(_Task(connection, result, fds, 0.0))
        self._update(connection)

    def _failure(self, connection: Connection, op: object, error: Exception) -> Reply:
        if not isinstance(error, LetoError):
            self._log(f"internal error in {op!r} of {connection.label}\n" + "".join(traceback.format_exception(error)))
        return protocol.error_reply(error), ()

    def _answer(self, connection: Connection, reply: Reply) -> None:
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
        for task in tasks:
            if task.due > now:
                self._tasks.append(task)
                continue
            connection = task.connection
            try:
                wait_secs = next(task.steps)
            except StopIteration as end:
                reply: Reply = end.value
            except Exception as error:
                reply = self._failure(connection, "a request", error)
            else:
                self._tasks.append(task._replace(due=now + wait_secs))
                continue
            connection.busy = False
            self._answer(connection, reply)
            protocol.close_fds(task.fds)
            try:
                self._next_requests(connection)  # what was read behind the request that took long
            except ProtocolError as error:
                self._refuse(connection, error)
            self._update(connection)
