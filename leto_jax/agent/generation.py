"""A generation: the processes of one incarnation, which start, are promoted and end together."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import selectors
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from leto_jax.agent import policy
from leto_jax.agent.coordinator import Coordinator
from leto_jax.agent.output import Relay, Terminal
from leto_jax.agent.policy import Kind
from leto_jax.agent.processes import LOW, Child, new_token, set_priority, spawn
from leto_jax.config import Process
from leto_jax.manager import fence

REAP_SECS = 0.5
# Lines, not blocks, so that those of a process that is killed are known; and what JAX sets itself, but here jaxlib is there before it.
OF_SEVERAL = {"PYTHONUNBUFFERED": "1", "TF_CPP_MIN_LOG_LEVEL": "1"}
LAST_WORDS_SECS = 0.1  # for the last lines of dead processes to come before what is said of their death; a slow terminal gets them later


class Program(NamedTuple):
    """What every process of a job runs. command: the script and its arguments."""

    command: Sequence[str]
    environ: Mapping[str, str]
    stdin: int | None


class Generation:
    """One process for each rank, and if there are several, the coordinator where they meet. Owns all of them, and what they write.

    `role` changes when they are promoted. gpus: which each rank drives, of those that CUDA shows; none where there is only one. started: the ranks have been spawned. died(generation, child): one of them has ended.
    alone(generation, reason): the coordinator is gone.
    """

    def __init__(
        self,
        process: Process,
        gpus: Sequence[int],
        program: Program,
        selector: selectors.BaseSelector,
        terminal: Terminal,
        started: Callable[[Generation], None],
        died: Callable[[Generation, Child], None],
        alone: Callable[[Generation, str], None],
    ):
        self._process, self._gpus, self._program, self._selector, self._terminal = process, gpus, program, selector, terminal
        self._started, self._died, self._alone = started, died, alone
        self.token = new_token(process.job)
        self.role = process.role
        self.children: tuple[Child, ...] = ()
        self.began = time.monotonic()  # as what it is now
        self.stepped: set[int] = set()  # ranks that have trained a step
        self.back: dict[int, Mapping[str, Any]] = {}  # what they said when they were where the last trainers had been
        self.done: set[int] = set()  # ranks that have trained to the end
        self.first_exit: float | None = None  # when the first rank ended well, by time.monotonic
        self.coordinator: Coordinator | None = None
        self._relay: Relay | None = None
        self._closed = False

    @property
    def incarnation(self) -> int:
        return self._process.incarnation

    @property
    def ranks(self) -> int:
        return self._process.ranks

    def start(self) -> None:
        """Starts the ranks; several of them once their coordinator listens, which takes about a second."""
        if self.ranks == 1:
            self._spawn("")
        else:
            self.coordinator = Coordinator(
                self.ranks, self.token, self._program.environ, self._selector, self._spawn, lambda reason: self._alone(self, reason)
            )

    def _spawn(self, coordinator: str) -> None:
        environ = self._program.environ
        ends: Sequence[tuple[int | None, int | None]] = [(None, None)]
        if self.ranks > 1:
            self._relay = self._terminal.relay(self.ranks)
            ends = self._relay.ends
            environ = {**OF_SEVERAL, **environ}
        children = []
        for rank, output in enumerate(ends):
            gpu = self._gpus[rank] if self._gpus else None
            process = dataclasses.replace(self._process, rank=rank, coordinator=coordinator, gpu=gpu)
            children.append(spawn(process, self.token, self._program.command, environ, self._program.stdin, output))
        if self._relay is not None:
            self._relay.start()
        self.children, self.began = tuple(children), time.monotonic()
        for child in children:
            self._selector.register(child.pidfd, selectors.EVENT_READ, lambda child=child: self._ended(child))
        self._started(self)

    def _ended(self, child: Child) -> None:
        if self._closed or child.pidfd < 0:  # it was fenced in this turn of the loop
            return
        self._forget(child)
        self._died(self, child)

    # What it is -------------------------------------------------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        """Whether every rank is ready to be promoted."""
        return bool(self.children) and all(child.ready for child in self.children)

    @property
    def level(self) -> int:
        """At which all ranks are, or were, ready."""
        return min((child.level for child in self.children), default=0)

    @property
    def stages(self) -> str:
        """What shadows that are not ready are at."""
        return ", ".join(self.named(child.rank, child.stage) for child in self.children if not child.ready)

    @property
    def running(self) -> list[Child]:
        return [child for child in self.children if child.returncode is None]

    @property
    def absent(self) -> list[int]:
        """Ranks that have not come to their session."""
        return [child.rank for child in self.children if not child.greeted]

    @property
    def refused(self) -> str:
        """Why the first rank that says so cannot take part; '' if none does."""
        return next((self.named(child.rank, child.refused) for child in self.children if child.refused), "")

    @property
    def lost(self) -> bool:
        """Whether a rank has found what is retained beyond repair."""
        return any(child.lost for child in self.children)

    def named(self, rank: int, reason: str) -> str:
        """`reason` with the rank that it is of, if there are several and it does not name one."""
        return reason if self.ranks == 1 or reason.startswith("rank ") else f"rank {rank}: {reason}"

    @property
    def pids(self) -> list[int]:
        return [*(child.pid for child in self.children), *([self.coordinator.pid] if self.coordinator else [])]

    @property
    def entries(self) -> list[tuple[int | None, str]]:
        """For the state manager: what must end with the agent. The token counts before there is a process that carries it."""
        return [(pid, self.token) for pid in (None, *self.pids)]

    # What happens to it -----------------------------------------------------------------------------------------------------------

    def root_cause(self, first: Child, injected: int | None, secs: float) -> tuple[Child, Kind, str]:
        """Of which rank the generation died, and how. first: the one seen first. injected: the rank that was told to fail, if any.

        Survivors of a broken collective exit within milliseconds of a peer's death, and may be seen before it: so a rank that was killed is
        waited for, up to `secs`.
        """
        until = time.monotonic() + secs
        while True:
            dead = [first, *(child for child in self.children if child is not first and child.returncode)]
            found = [(child, *policy.classify(child.returncode or 0)) for child in dead]
            cause = found[policy.root_cause([(child.rank, kind, detail) for child, kind, detail in found], injected)]
            certain = cause[0].rank == injected if injected is not None else cause[1] is Kind.SIGNAL or policy.gave_up(*cause[1:])
            left = until - time.monotonic()
            if certain or left <= 0 or not self.running:
                return cause
            poller = select.poll()
            for child in self.running:
                poller.register(child.pidfd, select.POLLIN)
            poller.poll(left * 1000)

    def promoted(self) -> None:
        """The shadows are the trainers from here on."""
        self.role, self.began = "trainer", time.monotonic()

    def rising(self) -> None:
        """The shadows go on to a higher level: they are ready again when they say so."""
        for child in self.children:
            child.ready = False
        self.began = time.monotonic()
        self.set_priority(LOW)

    def set_priority(self, nice: int) -> None:
        for child in self.children:
            set_priority(child.pid, nice)

    def fence(self, deadline_secs: float) -> fence.FenceReport:
        """Kills every process of it and everything that descends from them, and then reaps: nobody's death is waited for before all are killed.

        What the dead have written is passed on, as a rule before this returns.
        """
        identities = [child.identity for child in self.children]
        if self.coordinator is not None:
            identities.append(self.coordinator.identity)
        report = fence.fence(self.token, identities, deadline_secs)
        for child in self.children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.popen.wait(REAP_SECS)
            self._forget(child)
        self._closed = True
        if self.coordinator is not None:
            self.coordinator.close()
            self.coordinator.reap(REAP_SECS)
        if self._relay is not None:
            self._relay.join(LAST_WORDS_SECS)
        return report

    def _forget(self, child: Child) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(child.pidfd)
        child.close()
