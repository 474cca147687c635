"""What the ranks of a generation write, passed on line by line with the rank before it: `[1] step 7 loss 0.25`.

A job of one rank does without: its processes have the agent's own descriptors.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time

MAX_LINE_BYTES = 1 << 16  # what is longer is broken
READ_BYTES = 1 << 16
DRAIN_SECS = 5.0


class Terminal:
    """The agent's own stdout and stderr, for several writers. Bytes of one call stay together."""

    def __init__(self, out: int = 1, err: int = 2):
        self._fds = (out, err)
        self._lock = threading.Lock()
        self._relays: list[Relay] = []

    def relay(self, count: int) -> Relay:
        """One more writer, for `count` processes. It is not started yet."""
        self._relays = [relay for relay in self._relays if relay.is_alive()]
        self._relays.append(Relay(count, self))
        return self._relays[-1]

    def drain(self) -> None:
        """Waits until all that dead processes have written is passed on, unless the terminal is stopped."""
        until = time.monotonic() + DRAIN_SECS
        for relay in filter(Relay.is_alive, self._relays):
            relay.join(max(0.0, until - time.monotonic()))

    def write(self, stream: int, data: bytes) -> None:
        """Writes all of `data`. stream: 0 stdout, 1 stderr. Blocks while the terminal does; one that is closed loses it, and ends nothing."""
        fd = self._fds[stream]
        with self._lock, contextlib.suppress(OSError):
            while data:
                try:
                    data = data[os.write(fd, data) :]
                except BlockingIOError:
                    select.select([], [fd], [])


class Lines:
    """Cuts a stream into lines and puts a prefix before each."""

    def __init__(self, prefix: bytes):
        self._prefix, self._rest = prefix, b""

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes, each with its prefix."""
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > MAX_LINE_BYTES:
            lines.append(rest[:MAX_LINE_BYTES])
            rest = rest[MAX_LINE_BYTES:]
        self._rest = rest
        return b"".join(self._prefix + line + b"\n" for line in lines)

    def end(self) -> bytes:
        """What is left of a last line that has no end."""
        return self.feed(b"\n") if self._rest else b""


class Relay(threading.Thread):
    """Reads stdout and stderr of `count` processes until all of them, and whatever they have started, are gone.

    A thread of its own: a slow terminal holds up those who write, as without us, and never the agent.
    """

    def __init__(self, count: int, terminal: Terminal):
        super().__init__(name="leto-relay", daemon=True)
        self._terminal = terminal
        self._sources: dict[int, tuple[int, Lines]] = {}  # read end: (stream, lines)
        self.ends: list[tuple[int, int]] = []  # write ends of each rank: (stdout, stderr)
        for rank in range(count):
            pipes = [os.pipe() for _ in range(2)]
            for stream, (source, _) in enumerate(pipes):
                self._sources[source] = (stream, Lines(b"[%d] " % rank))
            self.ends.append((pipes[0][1], pipes[1][1]))

    def start(self) -> None:
        """From here on the write ends are the processes' alone."""
        for end in (end for pair in self.ends for end in pair):
            os.close(end)
        super().start()

    def run(self) -> None:
        poller = select.poll()
        for source in self._sources:
            poller.register(source, select.POLLIN)
        while self._sources:
            for source, _ in poller.poll():
                stream, lines = self._sources[source]
                data = os.read(source, READ_BYTES)
                if found := lines.feed(data) if data else lines.end():
                    self._terminal.write(stream, found)
                if not data:
                    poller.unregister(source)
                    os.close(source)
                    del self._sources[source]
