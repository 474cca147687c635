"""Entry of every trainer and shadow: `python -m leto_jax.shadow.child SCRIPT ARGS...` runs the user's script as `__main__`, guarded.

The guardian thread sees the sockets of manager and agent. One of them may die and come back; when both are gone, nobody is left to
end this process and its descendants, so it does that itself.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from leto_jax import errors
from leto_jax.config import Process
from leto_jax.manager import fence, protocol
from leto_jax.shadow.member import AGENT_SOCKET

_PR_SET_PDEATHSIG = 1
RETURN_SECS = 10.0  # for a manager or agent to be there again, or for the manager to end us


def main() -> None:
    process = Process.from_environ()
    if process is None or len(sys.argv) < 2:
        raise errors.UsageError("leto_jax.shadow.child is started by `leto run`, found no job in the environment or no script")
    os.register_at_fork(after_in_child=_die_with_parent)
    if process.role != "plan":
        Guardian(process).start()
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _die_with_parent() -> None:
    """In a forked child (a data worker): it must not outlive the trainer, nor write what the trainer's successor owns."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Guardian(threading.Thread):
    """Watches both sockets from connections of its own."""

    def __init__(self, process: Process):
        super().__init__(name="leto-guardian", daemon=True)
        self._paths = [process.socket, process.socket.parent / AGENT_SOCKET]
        self._token = os.environ.get(fence.TOKEN_VARIABLE)

    def run(self) -> None:
        sockets: list[socket.socket | None] = [None, None]
        gone_since: list[float | None] = [None, None]
        while True:
            for side, path in enumerate(self._paths):
                if sockets[side] is None:
                    try:
                        sockets[side] = protocol.connect(path, deadline=time.monotonic() + 1.0)
                        gone_since[side] = None
                    except (errors.JobError, errors.DeadlineError, OSError):
                        gone_since[side] = gone_since[side] or time.monotonic()
            if all(sock is None for sock in sockets):
                self._end()
            # An agent does not come back for its children: a new one starts new ones. The manager kills us; this is for when it cannot.
            if gone_since[1] is not None and time.monotonic() - gone_since[1] > RETURN_SECS:
                self._end()
            live = [sock for sock in sockets if sock is not None]
            readable, _, _ = select.select(live, [], [], 0.2 if len(live) < 2 else 5.0)
            for sock in readable:
                try:
                    closed = not sock.recv(4096)
                except BlockingIOError:
                    closed = False
                except OSError:
                    closed = True
                if closed:
                    sock.close()
                    sockets[sockets.index(sock)] = None

    def _end(self) -> None:
        print("leto: state manager and agent are both gone; this process ends", file=sys.stderr, flush=True)
        if self._token:
            fence.fence(self._token, [], deadline_secs=5.0)
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
