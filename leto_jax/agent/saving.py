"""Checkpoints on request: one at a time is asked of the trainer, and whoever waits is answered once it is written."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leto_jax import errors
from leto_jax.arena.control import Control, Word
from leto_jax.manager import protocol
from leto_jax.shadow.member import CHECKPOINT_FILE

REPLY_SECS = 2.0


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
