"""Messages between the processes of a job: one JSON object and a few descriptors per frame, over AF_UNIX stream sockets.

    offset  size  field
    0       4     magic b"LETO"
    4       2     version, little-endian
    6       2     number of descriptors that travel with this message, little-endian
    8       4     length of the body in bytes, little-endian
    12      ...   the body: one JSON object, UTF-8

Lengths and counts are bounded before anything is allocated, nothing is ever unpickled, descriptors arrive close-on-exec and are closed
when their message is refused. The descriptors of a message ride on its first byte (SCM_RIGHTS), and the kernel ends a read behind them: so
they arrive in the order of their messages, and the count in the header says whose they are.

A `deadline` is a value of `time.monotonic()`. After `DeadlineError` or `ProtocolError` the place in the stream is lost: close the socket.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import math
import os
import select
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

from leto_jax import errors
from leto_jax.errors import DeadlineError, JobError, LetoError, ProtocolError, UsageError

MAGIC = b"LETO"
VERSION = 1
HEADER = struct.Struct("<4sHHI")
MAX_BODY_BYTES = 64 * 1024
MAX_FDS = 8
MAX_OUTBOX_BYTES = 8 * 1024 * 1024
READ_BYTES = 64 * 1024

_ADDRESS_BYTES = 108  # sizeof(sun_path), the final NUL included
_FD_BYTES = array.array("i").itemsize
_SO_PEERPIDFD = 77  # Linux 6.5; the socket module has no name for it
_RETRY_SECS = 0.005

Message = dict[str, Any]


def close_fds(fds: Iterable[int]) -> None:
    """Closes every descriptor of `fds`; one that is closed already is no error."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def encode(message: Message, fd_count: int = 0) -> bytes:
    """The bytes of one frame.

    Raises:
      ProtocolError: the message is not a JSON object, its body is longer than `MAX_BODY_BYTES`, or more than `MAX_FDS` descriptors.
    """
    if not isinstance(message, dict):
        raise ProtocolError(f"a message is a JSON object (dict), found {type(message).__name__}")
    if fd_count > MAX_FDS:
        raise ProtocolError(f"a message carries at most {MAX_FDS} descriptors, found {fd_count}: send several messages")
    try:
        body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a message must be plain JSON (finite numbers, strings, lists, dicts): {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise ProtocolError(f"a message body is at most {MAX_BODY_BYTES} bytes, found {len(body)}: pass large data as a descriptor")
    return HEADER.pack(MAGIC, VERSION, fd_count, len(body)) + body


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not JSON")


def _decode_body(body: bytes) -> Message:
    try:
        message = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"message body of {len(body)} bytes is not JSON: {error}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"message body must be a JSON object, found {type(message).__name__}")
    return message


class Decoder:
    """Turns the bytes and descriptors of one connection into messages; the only parser of frames, for blocking callers and select loops.

    Owns the descriptors that it was fed until `next_message` hands them out. After a `ProtocolError` it has closed them all and refuses
    to go on. Holds at most one read beyond a frame: take all messages out before feeding again.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._fds: deque[int] = deque()
        self._failed: str | None = None

    @property
    def partial(self) -> bool:
        """Whether a message has begun and is not complete (or not taken out yet)."""
        return bool(self._buffer or self._fds)

    def wants(self) -> int:
        """How many bytes are missing until the next header, or the next body, is complete; never reaches into the following frame."""
        if len(self._buffer) < HEADER.size:
            return HEADER.size - len(self._buffer)
        return max(HEADER.size + self._header()[1] - len(self._buffer), 0)

    def feed(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Takes bytes and descriptors in the order in which they came; takes ownership of the descriptors even when it raises."""
        self._fds.extend(fds)
        if self._failed is not None:
            self._fail(self._failed)
        self._buffer += data
        if len(self._fds) > 2 * MAX_FDS:
            self._fail(f"too many descriptors: {len(self._fds)} are waiting for their message, at most {2 * MAX_FDS} may")

    def read_from(self, sock: socket.socket, nbytes: int = READ_BYTES) -> bool:
        """One non-blocking read of at most `nbytes`; False at the end of the stream.

        Raises:
          BlockingIOError: nothing to read now.
          ProtocolError: more descriptors than fit, a reset connection, or an end in the middle of a message.
        """
        try:
            data, ancillary, flags, _ = sock.recvmsg(nbytes, socket.CMSG_SPACE(MAX_FDS * _FD_BYTES), socket.MSG_CMSG_CLOEXEC)
        except (BlockingIOError, InterruptedError):
            raise
        except OSError as error:
            self._fail(f"cannot read from the peer: {error.strerror}")
        fds = array.array("i")
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
        self.feed(data, fds)
        if flags & socket.MSG_CTRUNC:
            self._fail(f"descriptors were cut off: more than {MAX_FDS} in one message, or this process has none left (RLIMIT_NOFILE)")
        if not data:
            self.end()
            return False
        return True

    def next_message(self) -> tuple[Message, list[int]] | None:
        """The next complete message with its descriptors, which then belong to the caller; None if more bytes are needed."""
        if self._failed is not None:
            self._fail(self._failed)
        if not MAGIC.startswith(self._buffer[: len(MAGIC)]):
            self._fail(f"not a message of leto_jax: expected magic {MAGIC!r}, found {bytes(self._buffer[:4])!r}")
        if len(self._buffer) < HEADER.size:
            if not self._buffer and self._fds:
                self._fail(f"{len(self._fds)} descriptors came without a message")
            return None
        fd_count, length = self._header()
        if len(self._buffer) < HEADER.size + length:
            return None
        if len(self._fds) < fd_count:
            self._fail(f"a message announces {fd_count} descriptors, {len(self._fds)} came")
        body = bytes(self._buffer[HEADER.size : HEADER.size + length])
        try:
            message = _decode_body(body)
        except ProtocolError as error:
            self._fail(str(error), error)
        del self._buffer[: HEADER.size + length]
        return message, [self._fds.popleft() for _ in range(fd_count)]

    def end(self) -> None:
        """The stream has ended: raises `ProtocolError` when that is in the middle of a message."""
        if not self._buffer:
            self.close()
            return
        expected = f"{HEADER.size} of header"
        if len(self._buffer) >= HEADER.size:
            expected = f"{HEADER.size + self._header()[1]}"
        self._fail(f"message cut off: the peer closed the connection after {len(self._buffer)} bytes, expected {expected}")

    def close(self) -> None:
        """Closes the descriptors that no message has claimed."""
        close_fds(self._fds)
        self._fds.clear()

    def _header(self) -> tuple[int, int]:
        magic, version, fd_count, length = HEADER.unpack_from(self._buffer)
        if magic != MAGIC:
            self._fail(f"not a message of leto_jax: expected magic {MAGIC!r}, found {magic!r}")
        if version != VERSION:
            self._fail(f"protocol version {version}, this process speaks {VERSION}: the two run different versions of leto_jax")
        if fd_count > MAX_FDS:
            self._fail(f"a message announces {fd_count} descriptors, at most {MAX_FDS} are allowed")
        if length > MAX_BODY_BYTES:
            self._fail(f"oversized message: a body of {length} bytes is announced, at most {MAX_BODY_BYTES} are allowed")
        return fd_count, length

    def _fail(self, reason: str, cause: BaseException | None = None) -> NoReturn:
        self.close()
        self._buffer.clear()
        self._failed = reason
        raise ProtocolError(reason) from cause


class Outbox:
    """Messages that wait until the kernel takes them, for select loops; keeps its own duplicates of their descriptors.

    `sent` counts the messages that are entirely in the peer's socket buffer. There they survive the death of this process.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._queue: deque[tuple[bytes, tuple[int, ...]]] = deque()
        self._offset = 0
        self._queued_bytes = 0
        self.sent = 0

    @property
    def pending(self) -> bool:
        return bool(self._queue)

    def put(self, message: Message, fds: Sequence[int] = ()) -> int:
        """Queues a message; returns the value that `sent` reaches when the kernel has it. The caller keeps its descriptors."""
        frame = encode(message, len(fds))
        if self._queued_bytes + len(frame) > MAX_OUTBOX_BYTES:
            raise ProtocolError(f"the peer does not read: {self._queued_bytes} bytes are waiting for it")
        self._queue.append((frame, tuple(os.dup(fd) for fd in fds)))
        self._queued_bytes += len(frame)
        return self.sent + len(self._queue)

    def flush(self) -> None:
        """Sends what the kernel takes now, without blocking.

        Raises:
          ProtocolError: the peer has gone away.
        """
        while self._queue:
            frame, fds = self._queue[0]
            try:
                count = _send_some(self._sock, memoryview(frame)[self._offset :], fds)
            except BlockingIOError:
                return
            if fds:
                close_fds(fds)
                self._queue[0] = (frame, ())
            self._offset += count
            if self._offset == len(frame):
                self._queue.popleft()
                self._offset = 0
                self._queued_bytes -= len(frame)
                self.sent += 1

    def close(self) -> None:
        for _, fds in self._queue:
            close_fds(fds)
        self._queue.clear()


def _send_some(sock: socket.socket, view: memoryview, fds: Sequence[int]) -> int:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        return sock.sendmsg([view], rights, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno == errno.ETOOMANYREFS:
            raise ProtocolError("too many descriptors are in flight for this user (RLIMIT_NOFILE): the peer does not read them") from error
        if error.errno == errno.EBADF and sock.fileno() >= 0:
            raise ProtocolError(f"cannot send: one of the descriptors {list(fds)} is not open") from error
        raise ProtocolError(f"the peer has closed the connection ({error.strerror})") from error


def _wait(sock: socket.socket, events: int, deadline: float, doing: str) -> None:
    poller = select.poll()
    poller.register(sock, events)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"{doing} did not end before its deadline: the peer is alive but does not answer (stopped, or busy)")
        if poller.poll(math.ceil(min(left, 3600.0) * 1000)):
            return


def send(sock: socket.socket, message: Message, fds: Sequence[int] = (), *, deadline: float) -> None:
    """Sends one message; the descriptors stay the caller's. Puts the socket into non-blocking mode.

    Raises:
      ProtocolError: the message breaks a limit (then nothing was sent), or the peer has gone away.
      DeadlineError: the peer does not read.
    """
    view = memoryview(encode(message, len(fds)))
    sock.setblocking(False)
    while view:
        try:
            count = _send_some(sock, view, fds)
        except BlockingIOError:
            _wait(sock, select.POLLOUT, deadline, "sending a message")
            continue
        view, fds = view[count:], ()


def receive(sock: socket.socket, *, deadline: float) -> tuple[Message, list[int]]:
    """Receives exactly one message; its descriptors (close-on-exec) belong to the caller. Puts the socket into non-blocking mode.

    Raises:
      ProtocolError: garbage, oversized, cut off, too many descriptors, or the connection is closed. No descriptor stays open.
      DeadlineError: no complete message in time.
    """
    sock.setblocking(False)
    decoder = Decoder()
    try:
        while True:
            received = decoder.next_message()
            if received is not None:
                return received
            try:
                if not decoder.read_from(sock, decoder.wants()):
                    raise ProtocolError("the peer has closed the connection")
            except BlockingIOError:
                _wait(sock, select.POLLIN, deadline, "receiving a message")
    finally:
        decoder.close()


class Peer(NamedTuple):
    """Who is at the other end (SO_PEERCRED): the process that connected, even if a fork of it now uses the socket."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    return Peer(*struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))))


def peer_pidfd(sock: socket.socket) -> int:
    """A pidfd of the peer, close-on-exec, owned by the caller.

    From the socket itself where the kernel can (6.5); before that by number, which may name another process if the peer died just now.

    Raises:
      ProtocolError: the peer is dead already, or not visible from this PID namespace.
    """
    pid = peer_of(sock).pid
    if pid <= 0:
        raise ProtocolError("the peer runs in a PID namespace that is not visible from here: run the whole job in one container")
    try:
        fd = int(struct.unpack("i", sock.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4))[0])
        os.set_inheritable(fd, False)
        return fd
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EOPNOTSUPP):
            raise ProtocolError(f"the peer, process {pid}, is dead ({error.strerror})") from error
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise ProtocolError(f"the peer, process {pid}, is dead ({error.strerror})") from error


def check_address(path: str | os.PathLike[str]) -> str:
    """The path as a string, if it fits into a socket address; `UsageError` with both lengths otherwise."""
    text = os.fspath(path)
    length = len(os.fsencode(text))
    if length >= _ADDRESS_BYTES:
        raise UsageError(
            f"socket path {text} is {length} bytes long, the limit of AF_UNIX is {_ADDRESS_BYTES - 1}: "
            "use a shorter job name, or set XDG_RUNTIME_DIR to a shorter directory"
        )
    return text


def connect(path: str | os.PathLike[str], *, deadline: float, what: str = "the peer") -> socket.socket:
    """A connected, non-blocking, close-on-exec socket.

    Raises:
      JobError: nothing there, a socket whose process is gone, or one that belongs to another user.
      DeadlineError: its queue of connections stays full (the process is stopped or stuck).
    """
    address = check_address(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        while True:
            try:
                sock.connect(address)
                return sock
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise DeadlineError(f"{what} at {address} takes no connection: it is stopped or stuck") from error
                time.sleep(_RETRY_SECS)
    except BaseException as error:
        sock.close()
        if isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise JobError(f"{what} is not running: there is no socket at {address}; `leto ls` lists the jobs that are") from error
        if isinstance(error, ConnectionRefusedError):
            raise JobError(f"{what} is gone: nobody answers at the dead socket {address}; `leto run --job NAME` replaces it") from error
        if isinstance(error, PermissionError):
            found = f"{_owner(address)}, this process is uid {os.geteuid()}"
            raise JobError(f"{what} at {address} belongs to another user: {found}") from error
        if isinstance(error, OSError) and not isinstance(error, LetoError):
            raise JobError(f"cannot connect to {what} at {address}: {error.strerror}") from error
        raise


def _owner(path: str) -> str:
    for candidate in (path, os.path.dirname(path)):
        with contextlib.suppress(OSError):
            return f"owner uid {os.stat(candidate).st_uid}"
    return "its directory cannot be searched"


def listen(path: str | os.PathLike[str], *, what: str = "a process", backlog: int = 128) -> tuple[socket.socket, bool]:
    """A listening, non-blocking socket with mode 0600 at `path`, and whether a dead socket was replaced there.

    The caller guards `path` against a second caller at the same time (a private directory and a lock in it).

    Raises:
      JobError: somebody answers at `path`, or something that is not a socket lies there.

    *Crash*: a dead socket file stays, which the next call replaces.
    """
    address = check_address(path)
    replaced = False
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(address)
        if not stat.S_ISSOCK(found.st_mode):
            raise JobError(f"expected a socket or nothing at {address}, found {stat.filemode(found.st_mode)}: move it away")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as probe:
            try:
                probe.connect(address)
            except ConnectionRefusedError:
                os.unlink(address)
                replaced = True
            except BlockingIOError as error:  # a full queue has an owner
                raise JobError(f"{what} already listens at {address}, but is stopped or stuck") from error
            else:
                raise JobError(f"{what} already answers at {address} (process {peer_of(probe).pid})")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        sock.bind(address)
        os.chmod(address, 0o600)  # before listen(): until then nobody can connect
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock, replaced


_ERRORS = {name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, LetoError)}


def error_reply(error: BaseException) -> Message:
    """The reply that makes the asking process raise `error`; anything that is not a `LetoError` travels as a plain one."""
    kind = type(error).__name__ if isinstance(error, LetoError) else LetoError.__name__
    text = str(error) if isinstance(error, LetoError) else f"internal error: {type(error).__name__}: {error}"
    return {"error": {"type": kind, "message": text[: MAX_BODY_BYTES // 16]}}


def raise_error(reply: Message) -> None:
    """Raises the error that a reply carries, as its own class; returns if it carries none."""
    error = reply.get("error")
    if error is None:
        return
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        raise ProtocolError(f"a reply with an error must name type and message, found {error!r}")
    raise _ERRORS.get(str(error.get("type")), LetoError)(error["message"])
