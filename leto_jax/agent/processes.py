"""Processes of a job as the agent sees them: starting one, its state letter, its priority, its end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from leto_jax.config import PARKED, Process, compile_cache
from leto_jax.manager import fence

_PR_SET_CHILD_SUBREAPER = 36
CACHE = "xla_cache"  # in the job's state directory, for as long as the job lives
LOW = 5  # a quarter of a core beside a trainer that uses them all: a shadow is ready in tens of seconds, and costs little until then


class Child:
    """One trainer or shadow: a rank of its generation. Owns its pidfd. `ready` changes when it says so."""

    def __init__(self, popen: subprocess.Popen, process: Process, token: str):
        self.popen, self.process, self.token = popen, process, token
        self.pid = popen.pid
        self.identity = fence.process_id(popen.pid) or fence.ProcessId(popen.pid, -1)  # its number may be somebody else's once it is reaped
        self.pidfd = os.pidfd_open(popen.pid)
        self.ready = False
        self.greeted = False
        self.stage = "start"  # of a shadow's way to being ready
        self.level = 0  # `config.Level` at which it is, or was last, ready
        self.parked = False  # its GPU state is in host memory
        self.refused = ""
        self.lost = False  # it found what is retained beyond repair

    @property
    def rank(self) -> int:
        return self.process.rank

    @property
    def returncode(self) -> int | None:
        """How it ended (negative: signal), None while it lives."""
        return self.popen.poll()

    @property
    def shown_level(self) -> int | str:
        """For people and the journal."""
        return PARKED if self.parked else self.level

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def new_token(job: str) -> str:
    """A word that marks every process of one incarnation in its environment, so that none can hide from the fence."""
    return f"{job}-{uuid.uuid4().hex}"


def environment(environ: Mapping[str, str], job_dir: Path) -> dict[str, str]:
    """`environ` with what a job adds for JAX, where the user has not chosen otherwise.

    A persistent compilation cache for what the script jits itself, small programs too. And XLA must not take the GPU's memory in advance:
    arenas and a shadow need theirs.
    """
    cache = {} if "JAX_COMPILATION_CACHE_DIR" in environ else compile_cache(job_dir / CACHE)
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **environ, **cache}


def spawn(
    process: Process,
    token: str,
    command: Sequence[str],
    environ: Mapping[str, str],
    stdin: int | None,
    output: tuple[int | None, int | None] = (None, None),
) -> Child:
    """Starts a trainer or shadow in a session of its own. output: stdout and stderr; by default they go where ours go, byte for byte."""
    variables = {**environ, **process.environ(), fence.TOKEN_VARIABLE: token}
    popen = subprocess.Popen(
        [sys.executable, "-m", "leto_jax.shadow.child", *command],
        env=variables,
        stdin=stdin,
        stdout=output[0],
        stderr=output[1],
        start_new_session=True,
    )
    return Child(popen, process, token)


def become_subreaper() -> None:
    """Orphans of our trainers become our children, so that they can be waited for."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(known: set[int]) -> None:
    """Waits for dead children that are not among `known`, so that none stays a zombie."""
    for entry in _children():
        if entry not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(entry, os.WNOHANG)


def _children() -> list[int]:
    try:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def state_letter(pid: int) -> str:
    """The state in /proc/PID/stat: R, S, D, T (stopped), t (traced), Z (dead); '' if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text[text.rfind(")") + 2]


def set_priority(pid: int, nice: int) -> None:
    """Nice value of all threads of a process, and of its autogroup. Raising the priority again needs privileges; without them it stays low,
    which costs nothing once the trainer it yielded to is dead."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(task), nice)
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(str(nice))
