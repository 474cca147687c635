"""Where the ranks of a generation meet: `python -m leto_jax.agent.coordinator HOST:PORT RANKS` hosts JAX's coordination service.

A process of its own, with jaxlib and without jax: so that no rank is special, and that a fatal error in it does not take the agent along. It
writes one byte to its stdout once it listens, and lives until its stdin ends: with the agent, at the latest. Its ranks abort when it dies.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping

from leto_jax import distributed, errors
from leto_jax.agent.policy import classify
from leto_jax.manager import fence

HOST = "127.0.0.1"
TRIES = 5
TAKEN = 98  # exit code: somebody else has the port
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}  # ranks that die are news to its log


def free_port() -> int:
    """A port of this machine that nobody has, for a moment."""
    with socket.socket() as sock:
        sock.bind((HOST, 0))
        return int(sock.getsockname()[1])


def claim(address: str) -> socket.socket:
    """Holds a port against all but this process. Raises DeviceError if it is taken.

    gRPC shares ports with other processes of the same user (SO_REUSEPORT), and jaxlib crashes on one that it cannot have: so it is asked for
    alone first, and shared only then.
    """
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    try:
        sock.bind((host, int(port)))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as exception:
        sock.close()
        raise errors.DeviceError(f"coordinator: cannot listen at {address}: {exception.strerror}; name another port") from exception
    return sock


def main() -> None:
    if len(sys.argv) != 3 or not sys.argv[2].isdecimal():
        raise SystemExit(f"leto: coordinator: expected HOST:PORT RANKS, found {' '.join(sys.argv[1:])!r}")
    try:
        held = claim(sys.argv[1])
    except errors.DeviceError as exception:
        print(f"leto: {exception}", file=sys.stderr, flush=True)
        raise SystemExit(TAKEN) from exception
    with held:
        try:
            _service = distributed.serve(sys.argv[1], int(sys.argv[2]))
        except errors.LetoError as exception:
            raise SystemExit(f"leto: {exception}") from exception
        os.write(1, b".")
        while os.read(0, 1):  # ends with the agent
            pass
        os._exit(0)  # the end of the service would wait for ranks


class Coordinator:
    """The coordinator of one generation, as the agent has it: starts it, on another port where one is taken. Owns its process and pipes.

    listening(address): it does. ended(reason): it is gone, before or after that.
    """

    def __init__(
        self,
        ranks: int,
        token: str,
        environ: Mapping[str, str],
        selector: selectors.BaseSelector,
        listening: Callable[[str], None],
        ended: Callable[[str], None],
    ):
        self._ranks, self._selector = ranks, selector
        self._environ = {**environ, **QUIET, fence.TOKEN_VARIABLE: token}
        self._listening, self._ended = listening, ended
        self._tries = 0
        self._start()

    def _start(self) -> None:
        self._tries += 1
        self._address = f"{HOST}:{free_port()}"
        command = [sys.executable, "-m", "leto_jax.agent.coordinator", self._address, str(self._ranks)]
        self._heard = False
        self._popen = subprocess.Popen(command, env=self._environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self.pid = self._popen.pid
        self.identity = fence.process_id(self.pid) or fence.ProcessId(self.pid, -1)
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._pipes = (self._popen.stdin, self._popen.stdout)
        self._selector.register(self._popen.stdout, selectors.EVENT_READ, self._spoke)

    def _spoke(self) -> None:
        """The byte that says that it listens, or its end."""
        if self._pipes[1].closed:
            return
        if os.read(self._pipes[1].fileno(), 1):
            self._heard = True
            self._listening(self._address)
            return
        self.close()
        code = self._popen.wait()
        if code == TAKEN and self._tries < TRIES:
            self._start()
            return
        how = classify(code)[1]
        self._ended(how if self._heard else f"it did not listen at {self._address}: {how}")

    def close(self) -> None:
        """Lets go of its pipes: it ends with them, if it has not before."""
        if self._pipes[1].closed:
            return
        self._selector.unregister(self._pipes[1])
        for pipe in self._pipes:
            pipe.close()

    def reap(self, secs: float) -> None:
        """Waits for its end, at most so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(secs)


if __name__ == "__main__":
    main()
