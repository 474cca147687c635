"""Checkpoints on request: one at a time is asked of the trainer, and whoever waits is answered once it is written."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leto_jax import errors
from leto_jax.agent import client
from leto_jax.arena.control import Control, Word
from leto_jax.config import Deadlines, state_root
from leto_jax.goodput import journal
from leto_jax.manager import protocol, runtime
from leto_jax.manager.client import ManagerClient
from leto_jax.shadow.member import CHECKPOINT_FILE, IDENTITY

REPLY_SECS = 2.0


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
    from leto_jax.agent.agent import Agent, Settings

    path = state_root() / job / "journal.jsonl"
    begun = [event for event in journal.read(path) if event["event"] == "start"]
    if not begun:
        raise errors.JobError(f"job {job!r}: its journal {path} does not say which script it runs")
    deadlines = dataclasses.replace(Deadlines(), init=timeout_secs)
    script, arguments = begun[-1]["script"], tuple(begun[-1]["arguments"])
    settings = Settings(job, script, arguments, state_root() / job, shadow=False, deadlines=deadlines, only_checkpoint=directory)
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


class Saving:
    """The checkpoint that is under way, if any. Writes the agent's control word for it."""

    def __init__(self, control: Control, directory: Path):
        self._control, self._file = control, directory / CHECKPOINT_FILE
        self._sock: socket.socket | None = None
        self._deadline = 0.0
        control[Word.CHECKPOINT_ASKED] = control[Word.CHECKPOINT_TAKEN]  # what an earlier agent asked for is void

    @property
    def waiting(self) -> bool:
        return self._deadline > 0

    def ask(self, directory: str, deadline_secs: float, sock: socket.socket | None = None, last: bool = False) -> None:
        """Asks whoever trains, now or next, for a checkpoint in `directory`. last: it does nothing any more after that, and is ended.

        Raises JobError while another one is under way.
        """
        if self.waiting:
            raise errors.JobError("checkpoint: another one is being written; try again when it is done")
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps({"directory": directory, "last": last}))
        temporary.replace(self._file)
        self._sock, self._deadline = sock, time.monotonic() + deadline_secs
        self._control[Word.CHECKPOINT_ASKED] = self._control[Word.CHECKPOINT_ASKED] + 1

    def late(self) -> bool:
        """Gives up on a checkpoint that was not written in time; whether that was so."""
        if not self.waiting or time.monotonic() < self._deadline:
            return False
        self._control[Word.CHECKPOINT_TAKEN] = self._control[Word.CHECKPOINT_ASKED]
        self._answer(protocol.error_reply(errors.DeadlineError("checkpoint: the trainer has not written it in time")))
        return True

    def done(self, message: Mapping[str, Any]) -> None:
        """The trainer has written it, or says why not."""
        if problem := str(message["error"]):
            self._answer(protocol.error_reply(errors.CheckpointError(problem)))
        else:
            self._answer({"ok": True, "step": message["commit"], "path": message["path"], "secs": message["secs"]})

    def refuse(self, error: errors.LetoError) -> None:
        """Answers whoever waits with an error."""
        if self.waiting:
            self._answer(protocol.error_reply(error))

    def gone(self, sock: socket.socket) -> None:
        """Whoever asked has hung up; the checkpoint is written all the same."""
        if self._sock is sock:
            self._sock = None

    def _answer(self, reply: Mapping[str, Any]) -> None:
        sock, self._sock, self._deadline = self._sock, None, 0.0
        self._file.unlink(missing_ok=True)
        if sock is not None:
            with contextlib.suppress(errors.LetoError, OSError):
                protocol.send(sock, dict(reply), deadline=time.monotonic() + REPLY_SECS)
