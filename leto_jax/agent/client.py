"""Talking to a running agent: status, inject, stop."""

from __future__ import annotations

import time
from typing import Any

from leto_jax import errors
from leto_jax.manager import protocol, runtime
from leto_jax.shadow.member import AGENT_SOCKET


def find_job(job: str | None) -> str:
    """The job that is meant: `job`, or the only live one. Raises JobError if there is none, or several and none was named."""
    live = runtime.live_jobs()
    if job is not None:
        if runtime.check_job_name(job) not in live:
            raise errors.JobError(f"job {job!r} is not running; " + (f"running: {', '.join(live)}" if live else "no job is running: start one with `leto run SCRIPT`"))
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
