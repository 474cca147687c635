"""The journal of a job: append-only JSON lines, one event each.

Every line has `time` (seconds since the epoch), `ns` (CLOCK_MONOTONIC, comparable within one boot) and `event`; the other keys are the
event's own, always the same for one kind of event (see `EVENTS`). `rank` is the rank that an event is about; of a failure and what follows from it,
which is about all ranks, the one that failed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leto_jax import errors

EVENTS: dict[str, tuple[str, ...]] = {
    "start": ("job", "script", "arguments", "attached"),
    "spawn": ("role", "rank", "incarnation", "pid", "path"),
    "ready": ("rank", "incarnation", "level", "note", "stages"),
    "level": ("level", "reason", "free_bytes"),
    "released": ("incarnation", "reason"),
    "refused": ("rank", "incarnation", "reason"),
    "published": ("rank", "incarnation", "nbytes"),
    "attached": ("rank", "incarnation", "commit", "action", "reason", "stages"),
    "first_step": ("rank", "incarnation", "commit", "secs"),
    "inject": ("rank", "kind", "phase", "step", "chunk", "when_ready"),
    "failure": ("rank", "incarnation", "kind", "phase", "step", "reason", "failed_ns", "detect_secs", "lost_step_secs"),
    "fence": ("rank", "incarnation", "killed", "remaining", "secs"),
    "damage": ("rank", "kind", "offset", "nbytes"),
    "operability": ("operable", "reason"),
    "decision": ("action", "reason", "path", "epoch"),
    "back_off": ("step", "secs"),
    "takeover": ("rank", "incarnation", "kind", "phase", "step", "commit", "takeover_secs", "detect_secs", "stages", "lost_steps", "compiles", "plan", "path", "level", "plain_step_secs", "repaired_pages", "ranks"),
    "retried": ("rank", "incarnation", "step", "action", "reason", "secs"),
    "progress": ("rank", "incarnation", "commit", "steps", "step_secs", "stale_secs", "peer_stale_secs"),
    "ended": ("rank", "incarnation", "steps", "step_secs", "stale_secs", "peer_stale_secs", "alive_secs"),
    "manager": ("pid", "reason"),
    "coordinator": ("role", "incarnation", "pid", "reason"),
    "checkpoint": ("rank", "incarnation", "commit", "path", "secs", "error"),
    "saved": ("rank", "incarnation", "tier", "commit", "stall_secs", "secs", "error"),
    "stopped": ("rank", "incarnation", "reason"),
    "done": ("rank", "incarnation", "commit", "loss", "digest"),
    "finish": ("code", "reason"),
}  # fmt: skip


class Journal:
    """Writes events; one writer, the agent."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 (lives as long as the agent)
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)  # a line that the last agent did not finish
        self._full = False
        self._listeners: list[Callable[[dict[str, Any]], None]] = []

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Has every event from now on told to `listener` too."""
        self._listeners.append(listener)

    def write(self, event: str, **fields: Any) -> dict[str, Any]:
        """Appends one event, as one write.

        Raises UsageError if the fields are not the event's own. Crash: the last line may be torn; `read` leaves it out.
        """
        expected = EVENTS.get(event)
        if expected is None or set(fields) != set(expected):
            raise errors.UsageError(f"journal: event {event!r}: expected the fields {expected}, found {tuple(fields)}")
        line = {"time": time.time(), "ns": time.monotonic_ns(), "event": event, **fields}
        self._append(json.dumps(line, default=str).encode() + b"\n")
        for listener in self._listeners:
            listener(line)
        return line

    def _append(self, data: bytes) -> None:
        """One line, whole or not at all. A full disk must not end the job: it is said once, and later lines are tried again."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(data) == len(data):
                self._full = False
                return
            problem = "no space left"
            self._file.truncate(size)
        except OSError as exception:
            problem = str(exception)
        if not self._full:
            print(
                f"leto: the journal cannot be written ({problem}); the job goes on, the report will lack events",
                file=sys.stderr,
                flush=True,
            )
        self._full = True

    def close(self) -> None:
        self._file.close()


def whole_lines(content: bytes) -> list[bytes]:
    """The lines of a file that is appended to, without one that is still torn."""
    return content[: content.rfind(b"\n") + 1].splitlines()


def read(path: Path) -> list[dict[str, Any]]:
    """All whole events of a journal, oldest first. Raises JobError if there is no such journal."""
    try:
        content = path.read_bytes()
    except OSError as exception:
        raise errors.JobError(
            f"journal: expected one at {path}, found {exception.strerror or exception}; `leto ls --all` lists jobs with a journal"
        ) from exception
    events = []
    for number, line in enumerate(whole_lines(content)):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError as exception:
            raise errors.RecordError(f"journal {path}, line {number + 1}: expected a JSON object, found {line[:60]!r}") from exception
    return events
