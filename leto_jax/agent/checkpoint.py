"""`leto checkpoint`: has a job's retained state written, by its trainer if it has an agent, else by one that attaches for it."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from leto_jax import errors
from leto_jax.agent import client
from leto_jax.agent.saving import REPLY_SECS
from leto_jax.config import Deadlines, state_root
from leto_jax.goodput import journal
from leto_jax.manager import runtime
from leto_jax.manager.client import ManagerClient
from leto_jax.shadow.member import IDENTITY


def checkpoint(job: str, directory: str, timeout_secs: float) -> dict[str, Any]:
    """Has the retained state of `job` written to `directory`, by its trainer if it has an agent, else by one that attaches for it.

    Returns `job`, `step`, `path`. Raises what the agent raises, JobError where there is nothing to write.
    """
    try:
        found = client.ask(job, {"op": "checkpoint", "directory": directory, "deadline_secs": timeout_secs}, timeout_secs + REPLY_SECS)
        return {"job": job, "step": found["step"], "path": found["path"]}
    except errors.JobError:
        if _has_agent(job):
            raise
    ranks = int(client.read_run_file(runtime.job_dir(job)).get("ranks", 1))
    from leto_jax.agent.agent import Agent, Settings

    path = state_root() / job / "journal.jsonl"
    begun = [event for event in journal.read(path) if event["event"] == "start"]
    if not begun:
        raise errors.JobError(f"job {job!r}: its journal {path} does not say which script it runs")
    deadlines = dataclasses.replace(Deadlines(), init=timeout_secs)
    script, arguments = begun[-1]["script"], tuple(begun[-1]["arguments"])
    settings = Settings(job, script, arguments, state_root() / job, ranks, shadow=False, deadlines=deadlines, only_checkpoint=directory)
    Agent(settings, {**os.environ, **_flags(job)}).run()
    written = [event for event in journal.read(path) if event["event"] in ("start", "checkpoint")][-1]
    if written["event"] == "start":
        raise errors.JobError(f"job {job!r}: no checkpoint was written; its journal {path} says why")
    if written["error"]:
        raise errors.CheckpointError(written["error"])
    return {"job": job, "step": written["commit"], "path": written["path"]}


def _flags(job: str) -> dict[str, str]:
    """What a process must have in its environment to run the programs of a job."""
    with ManagerClient(runtime.job_dir(job) / runtime.SOCKET_NAME, "tool") as manager, manager.get_blob(IDENTITY) as identity:
        found = dict(json.loads(identity.read())["environment"])
    return {"XLA_FLAGS": found["XLA_FLAGS"]} if found["XLA_FLAGS"] else {}


def _has_agent(job: str) -> bool:
    try:
        client.ask(job, {"op": "status"})
    except errors.JobError:
        return False
    return True
