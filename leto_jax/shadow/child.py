"""Entry of every trainer and shadow: `python -m leto_jax.shadow.child SCRIPT ARGS...` runs the user's script as `__main__`, guarded.

The guardian thread sees the sockets of manager and agent close. When nobody is left to end this process and its descendants, it does that
itself.
"""

from __future__ import annotations

import importlib
import os
import runpy
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from leto_jax import distributed, errors
from leto_jax.config import Level, Process
from leto_jax.manager import fence, protocol
from leto_jax.shadow.member import AGENT_SOCKET, member_of

LIBRARIES = ("jax", "optax", "flax.nnx", "leto_jax.train.session")  # what scripts import; none of them opens a device
MEET_SECS = 120.0  # for all ranks to start
RETURN_SECS = 10.0  # for the manager to end us when the agent is dead
FENCE_SECS = 5.0
END_SECS = RETURN_SECS + FENCE_SECS + 5.0


def main() -> None:
    process = Process.from_environ()
    if process is None or len(sys.argv) < 2:
        raise errors.UsageError("leto_jax.shadow.child is started by `leto run`, found no job in the environment or no script")
    guardian = Guardian(process) if process.role != "plan" else None
    if guardian is not None:
        guardian.start()
    if process.ranks > 1:
        distributed.join(process.coordinator, process.rank, process.ranks, MEET_SECS)
    if process.gpu is not None:
        distributed.drive(process.gpu)
    if process.role == "shadow" and process.shadow_level == str(Level.PROCESS.value):
        for library in LIBRARIES:
            importlib.import_module(library)
        member_of(process).wait_at(Level.PROCESS)
    script = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        runpy.run_path(script, run_name="__main__")
        if process.role == "plan":
            raise errors.UsageError(f"{script} ended without entering a session: there is nothing to plan; use `with leto.session(...)`")
    except errors.LetoError as exception:
        if process.role != "plan":
            raise
        print(f"leto: {exception}", file=sys.stderr, flush=True)
        raise SystemExit(2) from exception
    except Exception as exception:
        if process.ranks == 1 or not distributed.peer_is_gone(exception):
            raise
        reason = str(exception).splitlines()[0]
        print(f"leto: a peer is gone, this rank ends and is taken over from: {reason}", file=sys.stderr, flush=True)
        raise SystemExit(1) from exception  # not a failure of its own: without the traceback of one
    finally:
        if guardian is not None and guardian.is_alone():  # nobody will look for what this process has started: it does
            guardian.join(END_SECS)


class Guardian(threading.Thread):
    """Watches manager and agent from connections of its own.

    A manager may die and be replaced. An agent's death is final, also where another one answers at its place soon: that one starts processes
    of its own, and before it does, the manager has ended us. So without an agent this is for when the manager cannot, or is gone too.
    """

    def __init__(self, process: Process):
        super().__init__(name="leto-guardian", daemon=True)
        self._manager_path = process.socket
        self._agent_path = process.socket.parent / AGENT_SOCKET
        self._token = os.environ.get(fence.TOKEN_VARIABLE)
        self._agent = _connect(self._agent_path)

    def is_alone(self) -> bool:
        """Whether the agent is dead: then `run` ends this process soon."""
        agent = self._agent
        return agent is None or _is_closed(agent)

    def run(self) -> None:
        agent, manager = self._agent, _connect(self._manager_path)
        while agent is not None:  # ends with a break when it is dead
            if manager is None:
                manager = _connect(self._manager_path)
            closed = _closed([agent] if manager is None else [agent, manager], 0.2 if manager is None else 5.0)
            if manager is not None and manager in closed:
                manager.close()
                manager = None
            if agent in closed:
                break
        if manager is not None:
            _closed([manager], RETURN_SECS)
        print("leto: agent and state manager are gone; this process ends", file=sys.stderr, flush=True)
        if self._token:
            fence.fence(self._token, [], FENCE_SECS)
        os.kill(os.getpid(), signal.SIGKILL)


def _connect(path: Path) -> socket.socket | None:
    try:
        return protocol.connect(path, deadline=time.monotonic() + 1.0)
    except (errors.JobError, errors.DeadlineError):
        return None


def _closed(sockets: list[socket.socket], secs: float) -> list[socket.socket]:
    """Those of `sockets` whose peer is gone; waits until there is one, at most `secs`."""
    until = time.monotonic() + secs
    poller = select.poll()
    for sock in sockets:
        poller.register(sock, select.POLLIN)
    while True:
        ready = {fd for fd, _ in poller.poll(max(until - time.monotonic(), 0.0) * 1000)}
        closed = [sock for sock in sockets if sock.fileno() in ready and _is_closed(sock)]
        if closed or time.monotonic() >= until:
            return closed


def _is_closed(sock: socket.socket) -> bool:
    try:
        return not sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


if __name__ == "__main__":
    main()
