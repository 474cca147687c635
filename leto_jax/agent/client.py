"""Talking to a running agent: status, inject, stop; and what is left of a job in the runtime directory."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from leto_jax import errors
from leto_jax.manager import protocol, runtime
from leto_jax.shadow.member import AGENT_SOCKET, CHECKPOINT_FILE

RUN_FILE = "run.json"
JOB_FILES = (RUN_FILE, AGENT_SOCKET, CHECKPOINT_FILE, runtime.LOG_NAME, runtime.SOCKET_NAME, runtime.LOCK_NAME)
_RETRY_SECS = 0.02


def find_job(job: str | None) -> str:
    """The job that is meant: `job`, or the only live one. Raises JobError if there is none, or several and none was named."""
    live = runtime.live_jobs()
    if job is not None:
        if runtime.check_job_name(job) not in live:
            raise errors.JobError(
                f"job {job!r} is not running; "
                + (f"running: {', '.join(live)}" if live else "no job is running: start one with `leto run SCRIPT`")
            )
        return job
    if not live:
        raise errors.JobError("no job is running; start one with `leto run SCRIPT`")
    if len(live) > 1:
        raise errors.JobError(f"expected one running job, found {len(live)}: {', '.join(live)}; choose one with --job")
    return live[0]


def ask(job: str, message: dict[str, Any], timeout_secs: float = 5.0) -> dict[str, Any]:
    """Sends one request to the job's agent and returns its reply without `ok`. Raises what the agent raised, JobError if there is no agent."""
    deadline = time.monotonic() + timeout_secs
    sock = protocol.connect(runtime.job_dir(job) / AGENT_SOCKET, deadline=deadline, what=f"the agent of job {job!r}")
    with sock:
        protocol.send(sock, message, deadline=deadline)
        reply, fds = protocol.receive(sock, deadline=deadline)
        protocol.close_fds(fds)
    protocol.raise_error(reply)
    reply.pop("ok", None)
    return reply


def read_run_file(directory: Path) -> dict[str, Any]:
    """What the last agent noted about its job: `job`, `state` (running, kept, ended), `step`, `incarnation`, `tokens`; empty if there is nothing to read."""
    try:
        found = json.loads((directory / RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remove_job_dir(directory: Path, files: Iterable[str] = JOB_FILES) -> None:
    """Removes what a job whose processes are gone has left in the runtime directory, and that directory if nothing else is in it."""
    for name in files:
        with contextlib.suppress(OSError):
            (directory / name).unlink()
    with contextlib.suppress(OSError):
        directory.rmdir()


def wait_for_end(job: str, timeout_secs: float) -> None:
    """Returns when neither agent nor state manager of `job` answers any more. Raises DeadlineError."""
    directory, deadline = runtime.job_dir(job), time.monotonic() + timeout_secs
    for name in (AGENT_SOCKET, runtime.SOCKET_NAME):
        while True:
            try:
                protocol.connect(directory / name, deadline=deadline, what=f"job {job!r}").close()
            except errors.JobError:
                break
            if time.monotonic() >= deadline:
                raise errors.DeadlineError(f"job {job!r} has not ended within {timeout_secs:g} s; see `leto status --job {job}`")
            time.sleep(_RETRY_SECS)
