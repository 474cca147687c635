"""Failures on request (`leto inject`): one at a time waits for its moment, is placed in the control words, and is answered once it has fired."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from leto_jax import errors
from leto_jax.arena.control import PHASES, Control, Word
from leto_jax.config import Deadlines
from leto_jax.faults import Phase
from leto_jax.goodput.journal import Journal
from leto_jax.manager import protocol
from leto_jax.shadow.inject import ANY, GPU_ONLY, KINDS, FailureKind

REPLY_SECS = 2.0
DAMAGE = (FailureKind.PAGE_LOSS, FailureKind.PAGE_CORRUPTION)


@dataclasses.dataclass
class _Request:
    """What was asked for, and who waits for the answer."""

    rank: int
    kind: FailureKind
    phase: Phase
    step: int
    chunk: int
    when_ready: bool
    times: int
    deadline: float
    reply_to: socket.socket | None
    placed: bool = False


class Fired(NamedTuple):
    """An injected failure. ns: CLOCK_MONOTONIC when the trainer carried it out."""

    rank: int
    kind: FailureKind
    ns: int


class Injection:
    """The injection that waits, if any. Writes the agent's control words of the rank that it is for."""

    def __init__(self, controls: Sequence[Control], journal: Journal, deadlines: Deadlines):
        self._controls, self._journal, self._deadlines = controls, journal, deadlines
        self._request: _Request | None = None
        self._fired: Fired | None = None
        for control in controls:
            control[Word.INJECT_TAKEN] = control[Word.INJECT_SEQUENCE]  # what an earlier agent was asked for is void

    def ask(self, sock: socket.socket, message: Mapping[str, Any], on_gpu: bool) -> None:
        """Takes a request over. Raises JobError while another one waits, UsageError for a rank or a kind that this job cannot have,
        ValueError or KeyError for a request that is none."""
        kind = FailureKind(message["kind"])
        if kind in GPU_ONLY and not on_gpu:
            raise errors.UsageError(f"--kind {kind.value}: needs a GPU, this job runs on the CPU")
        if self._request is not None:
            raise errors.JobError("inject: another injection is still waiting for its moment; try again when it has fired")
        rank, step = int(message.get("rank", 0)), int(message.get("step", ANY))
        if not 0 <= rank < len(self._controls):
            raise errors.UsageError(f"--rank {rank}: expected 0 to {len(self._controls) - 1}, the ranks of this job")
        first, last = self._controls[rank][Word.COMMIT] + 1, self._controls[rank][Word.STEPS]
        if step != ANY and last and not first <= step <= last:
            raise errors.UsageError(f"--step {step}: expected a step that comes yet, {first} to {last}")
        self._request = request = _Request(
            rank,
            kind,
            Phase(message["phase"]),
            step,
            int(message.get("chunk", ANY)),
            bool(message.get("when_ready", False)),
            int(message.get("times", 1)),
            time.monotonic() + float(message.get("deadline_secs", self._deadlines.inject_wait)),
            sock,
        )
        self._journal.write(
            "inject",
            rank=rank,
            kind=request.kind.value,
            phase=request.phase.value,
            step=request.step,
            chunk=request.chunk,
            when_ready=request.when_ready,
        )

    def serve(self, in_loop: Collection[int], shadow_ready: bool) -> None:
        """Places a waiting request once its rank is in its loop (and a shadow ready, if asked for); gives up at its deadline."""
        request = self._request
        if request is None or self._fired is not None:  # what has fired is still to be noticed
            return
        control = self._controls[request.rank]
        if not request.placed and (
            request.phase is Phase.TAKEOVER or (request.rank in in_loop and (shadow_ready or not request.when_ready))
        ):
            control[Word.INJECT_KIND] = KINDS.index(request.kind)
            control[Word.INJECT_PHASE] = PHASES.index(request.phase)
            control[Word.INJECT_STEP] = request.step
            control[Word.INJECT_CHUNK] = request.chunk
            control[Word.INJECT_TIMES] = request.times
            control[Word.INJECT_FIRED_NS] = 0
            control[Word.INJECT_SEQUENCE] = control[Word.INJECT_SEQUENCE] + 1
            request.placed = True
        elif time.monotonic() > request.deadline and request.placed and control[Word.INJECT_FIRED_NS]:
            self._note(request)  # a hang may take longer to be noticed than anybody wants to wait for the answer
        elif time.monotonic() > request.deadline:
            control[Word.INJECT_TAKEN] = control[Word.INJECT_SEQUENCE]
            wanted = "a ready shadow" if request.when_ready else "the first step"
            if request.placed:
                wanted = f"phase {request.phase.value}"
            self.refuse(errors.DeadlineError(f"inject: the job did not come to {wanted} in time; nothing was injected"))

    def fired(self) -> Fired | None:
        """What the failure that has just happened was, if it was the one asked for; answers whoever asked."""
        request = self._request
        if self._fired is None and request is not None and request.placed and self._controls[request.rank][Word.INJECT_FIRED_NS]:
            self._note(request)
        fired, self._fired = self._fired, None
        return fired

    def survived(self) -> None:
        """The trainer goes on after what it was asked for, if anything was; whoever asked is answered once it has fired for the last time."""
        request = self._request
        if (
            request is not None
            and request.placed
            and self._controls[request.rank][Word.INJECT_TAKEN] == self._controls[request.rank][Word.INJECT_SEQUENCE]
        ):
            self.fired()

    def firing(self) -> int | None:
        """The rank that has been told to fail and has begun to, before anybody has noticed; None if there is none."""
        if self._fired is not None:
            return self._fired.rank
        request = self._request
        return request.rank if request is not None and request.placed and self._controls[request.rank][Word.INJECT_FIRED_NS] else None

    def _note(self, request: _Request) -> None:
        control = self._controls[request.rank]
        self._fired = Fired(request.rank, request.kind, control[Word.INJECT_FIRED_NS])
        self._reply({"ok": True, "fired_step": control[Word.INJECT_FIRED_STEP], "kind": request.kind.value})

    def refuse(self, error: errors.LetoError) -> None:
        """Answers whoever waits with an error."""
        self._reply(protocol.error_reply(error))

    def gone(self, sock: socket.socket) -> None:
        """Whoever asked has hung up: the request stays, nobody is answered."""
        if self._request is not None and self._request.reply_to is sock:
            self._request.reply_to = None

    def _reply(self, reply: Mapping[str, Any]) -> None:
        if self._request is not None and self._request.reply_to is not None:
            with contextlib.suppress(errors.LetoError, OSError):
                protocol.send(self._request.reply_to, dict(reply), deadline=time.monotonic() + REPLY_SECS)
        self._request = None
