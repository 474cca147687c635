"""The agent's socket: who is connected, and what they say. What is answered is the agent's business."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from leto_jax import errors
from leto_jax.manager import protocol, runtime

REFUSAL_SECS = 0.2


class Speaker(NamedTuple):
    """A trainer or shadow."""

    incarnation: int
    rank: int


Handler = Callable[[socket.socket, Mapping[str, Any]], None]


class Door:
    """Owns the listening socket and the connections of processes of the same user, all of them in `selector`.

    handle(socket, message): answers one request, or raises; a message that is none ends its connection with the reason.
    gone(socket): a connection has ended. Raises JobError if an agent of the job already listens.
    """

    def __init__(self, job: str, path: Path, selector: selectors.BaseSelector, handle: Handler, gone: Callable[[socket.socket], None]):
        self._job, self._path, self._selector, self._handle, self._gone = job, path, selector, handle, gone
        self._decoders: dict[socket.socket, protocol.Decoder] = {}
        self._speakers: dict[socket.socket, Speaker] = {}
        self._listener = self._listen()

    def greet(self, sock: socket.socket, speaker: Speaker) -> None:
        """Notes who speaks on a connection."""
        self._speakers[sock] = speaker

    def speaker(self, sock: socket.socket) -> Speaker | None:
        return self._speakers.get(sock)

    def socket_of(self, speaker: Speaker) -> socket.socket | None:
        return next((sock for sock, its in self._speakers.items() if its == speaker), None)

    def hear_out(self, incarnation: int) -> None:
        """Reads what all ranks of an incarnation have said until now: one of them has just died."""
        for sock in [sock for sock, speaker in self._speakers.items() if speaker.incarnation == incarnation]:
            self._read(sock)

    def stay_reachable(self, say: Callable[[str], None]) -> None:
        """Cleaners of temporary directories remove what looks unused: without its socket nobody could stop the job, and no shadow join it."""
        if self._path.exists():
            return
        old = self._listener
        try:
            runtime.ensure_job_dir(self._job)
            self._listener = self._listen()
        except (errors.LetoError, OSError) as exception:
            say(f"the agent's socket has vanished and cannot be made again: {exception}; trying on")
        else:
            self._selector.unregister(old)
            old.close()
            say("the agent's socket had vanished; made it again")

    def close(self) -> None:
        """Closes the sockets; removes no file."""
        for sock in (self._listener, *self._decoders):
            sock.close()

    def _listen(self) -> socket.socket:
        listener, _ = protocol.listen(self._path, what=f"the agent of job {self._job!r} (`leto run` is running)")
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        return listener

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if protocol.peer_of(sock).uid != os.geteuid():
                sock.close()
                return
            sock.setblocking(False)
            self._decoders[sock] = protocol.Decoder()
            self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(sock))

    def _read(self, sock: socket.socket) -> None:
        decoder = self._decoders.get(sock)
        if decoder is None:
            return
        try:
            open_ = decoder.read_from(sock)
            while (received := decoder.next_message()) is not None:
                message, fds = received
                protocol.close_fds(fds)
                self._handle(sock, message)
            if not open_:
                self._forget(sock)
        except BlockingIOError:
            pass
        except (errors.LetoError, KeyError, TypeError, ValueError) as exception:
            if not isinstance(exception, errors.LetoError):
                found = f"{type(exception).__name__}: {exception}"
                exception = errors.ProtocolError(f"agent: expected a request with all its fields, found something else ({found})")
            with contextlib.suppress(errors.LetoError):
                protocol.send(sock, protocol.error_reply(exception), deadline=time.monotonic() + REFUSAL_SECS)
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        if sock in self._decoders:
            self._decoders.pop(sock).close()
            self._speakers.pop(sock, None)
            self._gone(sock)
            self._selector.unregister(sock)
            sock.close()
