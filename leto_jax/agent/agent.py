"""The agent of a job: one event loop over pidfds, sockets and control words, and what happens after a failure.

    start -> trainers -> (programs published) -> shadows ... ready
    a trainer fails: detect -> fence all -> operability -> decide -> promote | wait for loading shadows | cold attach | stop
    takeover done: the next shadows start at low priority

Trainers and shadows are one process for each rank, a generation (`generation.py`). If the agent dies, the state manager ends all of its
processes and keeps the memory; `leto run --job NAME` attaches again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leto_jax import errors
from leto_jax.agent import client, operability, policy
from leto_jax.agent.books import Books, Pending
from leto_jax.agent.door import Door, Speaker
from leto_jax.agent.generation import Generation, Program
from leto_jax.agent.injection import DAMAGE, Injection
from leto_jax.agent.leveller import Leveller
from leto_jax.agent.link import Link
from leto_jax.agent.output import Terminal
from leto_jax.agent.policy import Action, Failure, Kind, Limits
from leto_jax.agent.processes import CACHE, LOW, Child, become_subreaper, environment, reap_orphans, set_priority
from leto_jax.agent.ranks import Ranks
from leto_jax.agent.saving import Saving
from leto_jax.agent.spares import Spares
from leto_jax.agent.watch import Symptom, Watch
from leto_jax.arena.control import Word
from leto_jax.config import AUTO, HOST_TIER, IN_PLACE, METRICS_FILE, PARKED, SPARES, Deadlines, Level, Process, Tiers
from leto_jax.faults import Phase
from leto_jax.goodput import live
from leto_jax.goodput.journal import Journal
from leto_jax.manager import fence, protocol, runtime
from leto_jax.manager.store import gpu_of
from leto_jax.shadow.inject import FailureKind
from leto_jax.shadow.member import AGENT_SOCKET

TICK_SECS = 0.02
REPLY_SECS = 2.0
LOOK_SECS = 1.0
SETTLE_SECS = 0.1  # after the exit of one rank of several: until it is known whether another one was killed
MAX_SHADOW_EXITS = 3  # without one that got ready
MAX_SHADOW_DELAY_SECS = 300.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `leto run` was asked to do."""

    job: str
    script: str
    arguments: tuple[str, ...]
    job_dir: Path
    ranks: int = 1
    shadow: bool = True
    shadow_level: str = AUTO  # one of SHADOW_LEVELS
    limits: Limits = dataclasses.field(default_factory=Limits)
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    debug: bool = False
    resume: str = ""  # directory of checkpoints that a fresh state comes from
    recovery: str = IN_PLACE
    tiers: Tiers = dataclasses.field(default_factory=Tiers)
    spares: int = 0
    wait_for_parity: bool = False
    metrics_port: int | None = None
    tensorboard: Path | None = None
    only_checkpoint: str = ""  # attach, write the retained state here, and leave it kept


class Agent:
    """Runs one job to its end. `run` returns the exit code."""

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ, say=None):
        self.settings = settings
        stdin = None if settings.debug else subprocess.DEVNULL
        self._program = Program([settings.script, *settings.arguments], environment(environ, settings.job_dir), stdin)
        self._say = say or _say
        self._selector = selectors.DefaultSelector()
        self._terminal = Terminal()
        self._trainers: Generation | None = None
        self._shadows: Generation | None = None
        self._incarnation = 0
        self._history: list[Failure] = []
        self._pending: Pending | None = None
        self._exit: tuple[int, str] | None = None
        self._started = time.monotonic()
        self._shadow_refused = ""
        self._shadow_due = math.inf  # when the next ones may start, by time.monotonic
        self._shadow_deaths = 0  # since the last promotion
        self._cold_due = math.inf  # when new trainers start, by time.monotonic
        self._cold_starts = (-1, 0)  # (step, how many after failures there)
        self._interrupts = 0
        self._preempted = self._preempt_asked = False
        self._door: Door | None = None
        self._link: Link | None = None
        self._look_at = 0.0
        self._begun = False  # a step of the job was trained
        self._spares = Spares(settings.spares, settings.ranks)
        self._copied: set[int] = set()  # ranks of whose state a copy was taken
        self._inoperable: operability.Verdict | None = None  # if a device was declared so
        self._operability = operability.Operability(settings.job_dir, [])
        self._gpus: list[int] = []  # that are watched
        self._prometheus: live.Prometheus | None = None
        self._tensorboard: live.TensorBoard | None = None

    # Life of the job --------------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """From attach to the end of the job. Leaves nothing behind unless the state is kept on purpose."""
        try:
            self._open()
        except BaseException:
            if self._link is not None:
                self._link.kill()
            if self._door is not None:
                self._door.close()
                client.remove_job_dir(self._directory, [AGENT_SOCKET])
            raise
        try:
            if self.settings.only_checkpoint:
                if not self._retained:
                    raise errors.JobError(f"job {self.settings.job!r} has no retained state: there is nothing to write")
                self._saving.ask(self.settings.only_checkpoint, self.settings.deadlines.init, last=True)
            self._start_trainers("first" if not self._attached else "attach")
            while self._exit is None:
                self._turn()
            return self._close()
        except BaseException as exception:
            # A mistake of ours, or of the machine: what was trained is kept, as if the agent had been killed.
            self._exit = (policy.GAVE_UP if self._retained else 1, f"the agent failed: {exception!r}")
            code = self._exit[0]
            with contextlib.suppress(Exception):
                code = self._close()
            if code != policy.GAVE_UP or not isinstance(exception, Exception):
                raise
            traceback.print_exception(exception)
            return code

    def _open(self) -> None:
        job, deadlines = self.settings.job, self.settings.deadlines
        if self.settings.metrics_port is not None:
            self._prometheus = live.Prometheus(self.settings.metrics_port, job)
        if self.settings.tensorboard is not None:
            self._tensorboard = live.TensorBoard(self.settings.tensorboard, self.settings.job_dir / METRICS_FILE)
        directory = runtime.ensure_job_dir(job)
        self._directory = directory
        self._door = Door(job, directory / AGENT_SOCKET, self._selector, self._handle, self._hung_up)
        self.journal = Journal(self.settings.job_dir / "journal.jsonl")  # not before the door is ours: another agent may be writing to it
        for listener in (self._prometheus, self._tensorboard):
            if listener is not None:
                self.journal.listen(listener.observe)
        become_subreaper()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupted)
        before = client.read_run_file(directory)
        found = runtime.probe(directory / runtime.SOCKET_NAME) is not None
        if not found:
            self._clear_away(before)
        self._link = Link(job, directory, not found, deadlines.orphan_timeout, self._selector, self._say)
        self._ranks = Ranks(self._link.client, self.settings.ranks)
        self._attached = found and self._ranks.filled
        if self._attached:
            self._say(f"attached to job {job!r}: retained state found")
        self._incarnation = max(self._ranks.incarnation, int(before.get("incarnation", 0)), 0)
        for control in self._ranks.controls:
            control[Word.STEPS_DONE] = 0
            control[Word.PID] = 0
        self._books = Books(self._ranks.controls, self.journal)
        self._watchdog = Watch(self._ranks.controls, deadlines)
        self._injection = Injection(self._ranks.controls, self.journal, deadlines)
        self._saving = Saving(self._ranks.controls[0], directory)
        self._leveller = Leveller(self.settings.shadow_level, self.settings.ranks, self.journal, self._say, self._tell)
        self._watch_gpus()
        self._write_run_file("running")
        self.journal.write("start", job=job, script=self.settings.script, arguments=list(self.settings.arguments), attached=self._attached)

    def _clear_away(self, before: Mapping[str, Any]) -> None:
        """The last state manager of this job is gone. before: the note of its last agent."""
        if tokens := [str(token) for token in before.get("tokens", ())]:  # they end themselves, unless they are stopped or stuck
            fence.fence(tokens, [], self.settings.deadlines.reap)
        if (state := before.get("state")) in ("running", "kept"):
            cause = "state manager and agent both died" if state == "running" else "its state manager died, or its time was over"
            self._say(
                f"the retained state of job {self.settings.job!r} is gone ({cause} after step {before.get('step', 0)}); starting from step 0, as no checkpoint was asked for"
            )

    def _turn(self) -> None:
        """One round: what became readable, then what became late."""
        for key, _ in self._selector.select(TICK_SECS):
            key.data()
        self._sample()
        self._watch()
        if self._trainers is not None and self._exit is None:
            self._release(self._leveller.poll(self._shadows))
        self._injection.serve(self._in_loop, self._shadows is not None and self._shadows.ready)
        if self._preempted and not self._preempt_asked:
            self._preempt_asked = True
            self._say(f"SIGTERM: finishing the step, then a checkpoint in {self.settings.tiers.directory}")
            self._saving.refuse(errors.JobError("checkpoint: the job was told to end"))
            self._saving.ask(self.settings.tiers.directory, self.settings.deadlines.preempt, last=True)
        if self._saving.late() and (self._preempted or self.settings.only_checkpoint):
            self._finish(policy.GAVE_UP, "the checkpoint was not written in time")
        now = time.monotonic()
        if now >= self._cold_due and self._exit is None:
            self._start_trainers("cold")
        if now >= self._shadow_due:
            self._start_shadows()
        if self._open_link.due:
            self._replace_manager()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECS
            self._open_door.stay_reachable(self._say)
            self._operability.poll()
            self._tell_others()
        reap_orphans({pid for generation in self._generations for pid in generation.pids} | self._open_link.pids)

    def _sample(self) -> None:
        """Takes in what the trainers have committed."""
        shadows = self._shadows
        if self._trainers is not None and self._books.sample(self._trainers, shadows is not None and not shadows.ready):
            self._write_run_file("running")

    def _watch_gpus(self) -> None:
        """Begins to watch the GPUs that the job keeps its state on, once it does."""
        gpus = sorted({gpu for item in self._open_link.descriptors.values() if (gpu := gpu_of(item.kind)) is not None})
        if gpus == self._gpus:
            return
        self._operability.close()
        if self.settings.shadow:
            self._leveller.watch(gpus, self._program.environ)
        self._gpus, self._operability = gpus, operability.Operability(self.settings.job_dir, gpus, self._program.environ)
        verdict = self._operability.start()
        if not verdict.operable:
            self._say(f"a failure will not be recovered in place: {verdict.reason}")

    def _tell_others(self) -> None:
        """Brings the metrics that others look at up to date."""
        if self._prometheus is not None:
            ready = self._shadows is not None and self._shadows.ready
            self._prometheus.sample(self._ranks.commit, self._books.median_step_secs, ready)
        if self._tensorboard is not None:
            self._tensorboard.poll()

    def _close(self) -> int:
        """Ends every process, frees the memory unless the state is kept, and removes the sockets."""
        assert self._exit is not None
        code, reason = self._exit
        keep = code == policy.GAVE_UP and (self._in_place or bool(self.settings.tiers.copies_every))
        if keep and self._open_link.lost:
            self._replace_manager()
        if self._trainers is not None:
            self._books.ended(self._trainers)
        for generation in reversed(self._generations):
            generation.fence(self.settings.deadlines.reap)
        self._injection.refuse(errors.JobError(f"the job ended: {reason}"))
        self._saving.refuse(errors.JobError(f"the job ended: {reason}"))
        self.journal.write("finish", code=code, reason=reason)
        self._write_run_file("kept" if keep else "ended")
        if not keep:
            shutil.rmtree(self.settings.job_dir / CACHE, ignore_errors=True)
        self._open_link.close(keep)
        self._operability.close()
        self._leveller.close()
        self._terminal.drain()
        for teller in (self._prometheus, self._tensorboard):
            if teller is not None:
                teller.close()
        self._open_door.close()
        client.remove_job_dir(self._directory, [AGENT_SOCKET] if keep else client.JOB_FILES)
        self.journal.close()
        if keep:
            self._say(
                f"the state is kept: `leto run --job {self.settings.job} ...` goes on from step {self._ranks.commit}, `leto stop --job {self.settings.job}` frees it"
            )
        return code

    def _finish(self, code: int, reason: str) -> None:
        if self._exit is None:
            self._exit = (code, reason)

    def _give_up(self, reason: str) -> None:
        """Ends the job; what was retained is kept."""
        self._say(f"stopped: {reason}")
        self._finish(policy.GAVE_UP if self._retained else policy.USAGE, reason)

    def _interrupted(self, number: int, frame: Any) -> None:
        self._interrupts += 1
        if number == signal.SIGINT and self.settings.debug and self._interrupts == 1 and self._trainers is not None:
            for child in self._trainers.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child.pid, signal.SIGINT)  # the terminal is the script's; a second Ctrl-C ends the job
            return
        if number == signal.SIGTERM and self.settings.tiers.directory and not self._preempted and self._trainers is not None:
            self._preempted = True
            return
        self._finish(128 + number, f"{signal.Signals(number).name}")
        if self._interrupts == 1:
            self._say(f"{signal.Signals(number).name}: stopping")

    # What there is ----------------------------------------------------------------------------------------------------------------

    @property
    def _generations(self) -> list[Generation]:
        return [generation for generation in (self._trainers, self._shadows) if generation is not None]

    @property
    def _open_door(self) -> Door:
        assert self._door is not None
        return self._door

    @property
    def _open_link(self) -> Link:
        assert self._link is not None
        return self._link

    @property
    def _in_loop(self) -> set[int]:
        """Ranks whose trainer has trained a step."""
        controls = self._ranks.controls
        children = self._trainers.children if self._trainers is not None else ()
        return {c.rank for c in children if controls[c.rank][Word.PID] == c.pid and controls[c.rank][Word.STEPS_DONE] > 0}

    @property
    def _retained(self) -> bool:
        """Whether there is a state worth keeping: one that was completely filled, or copies of one."""
        return self._begun if self._has_copies or not self._in_place else self._ranks.live

    @property
    def _has_copies(self) -> bool:
        """Whether copies of the state of every rank were taken."""
        return len(self._copied) == self.settings.ranks

    @property
    def _in_place(self) -> bool:
        """Whether the state outlives the trainers."""
        return self.settings.recovery == IN_PLACE

    # Starting ---------------------------------------------------------------------------------------------------------------------

    def _generation(self, role: str, path: str) -> Generation:
        """The next incarnation. Its processes are not started yet."""
        self._incarnation += 1
        settings = self.settings
        process = Process(
            settings.job,
            role,
            0,
            self._directory / runtime.SOCKET_NAME,
            self._incarnation,
            settings.job_dir,
            settings.resume,
            str(int(self._leveller.top.level)) if role == "shadow" else settings.shadow_level,
            settings.recovery,
            settings.tiers,
            settings.ranks,
            wait_for_parity=settings.wait_for_parity,
        )
        return Generation(
            process,
            tuple(self._spares.gpus) if settings.ranks > 1 or settings.spares else (),
            self._program,
            self._selector,
            self._terminal,
            lambda generation: self._spawned(generation, path),
            self._died,
            self._coordinator_ended,
        )

    def _launch(self, generation: Generation) -> None:
        """Registered before it exists: there is no moment at which the agent's death leaves it behind."""
        self._register()
        self._write_run_file("running")
        generation.start()
        if generation.coordinator is not None:
            self._note_coordinator(generation, "started")

    def _spawned(self, generation: Generation, path: str) -> None:
        for child in generation.children:
            if generation is self._shadows and self._trainers is not None:
                set_priority(child.pid, LOW)
            self.journal.write("spawn", role=generation.role, rank=child.rank, incarnation=generation.incarnation, pid=child.pid, path=path)
        self._register()

    def _register(self) -> None:
        self._open_link.register([entry for generation in self._generations for entry in generation.entries])

    def _start_trainers(self, path: str) -> None:
        self._ranks.raise_epoch()
        self._cold_due = math.inf
        self._shadow_refused = ""  # a script that was changed back may have shadows again
        self._ranks.begin(Phase.INIT)
        self._trainers = self._generation("trainer", path)
        self._launch(self._trainers)

    def _start_shadows(self) -> None:
        """Starts shadows if some are wanted now: beside trainers that are in their loop."""
        self._shadow_due = math.inf
        wanted = self.settings.shadow and self.settings.recovery in SPARES and self._leveller.top.level > Level.NONE
        if not wanted or self._shadows is not None or self._trainers is None or self._shadow_refused or self._exit is not None:
            return
        self._shadows = self._generation("shadow", "shadow")
        self._launch(self._shadows)

    def _release(self, reason: str) -> None:
        """Ends the shadows; the next ones start at the level that is right now. reason: '' if there is none to do so."""
        if not reason or self._shadows is None:
            return
        self._end_shadows(reason)
        self._shadow_due = time.monotonic()
        self._say(f"{reason}: the next shadow waits at level {self._leveller.top.shown}")

    def _end_shadows(self, reason: str) -> None:
        shadows, self._shadows = self._shadows, None
        if shadows is not None:
            shadows.fence(self.settings.deadlines.reap)
            self.journal.write("released", incarnation=shadows.incarnation, reason=reason)

    def _tell(self, generation: Generation, message: protocol.Message) -> None:
        """To all ranks. Raises before any of them is told if one cannot be: then all are as they were."""
        socks = [self._open_door.socket_of(Speaker(generation.incarnation, rank)) for rank in range(generation.ranks)]
        for rank, sock in enumerate(socks):
            if sock is None:
                raise errors.ProtocolError(generation.named(rank, "its connection is gone"))
        for sock in socks:
            assert sock is not None
            protocol.send(sock, message, deadline=time.monotonic() + REPLY_SECS)

    def _reclaim(self, sock: socket.socket, step: int) -> None:
        """The trainer has run out of memory: it has what the shadows had, and a new epoch to go on with, as a process that takes over."""
        if self._trainers is None or not any(generation is self._trainers for generation, _ in self._found(self._open_door.speaker(sock))):
            raise errors.JobError("reclaim: expected the trainer of this job, found another process")
        self._injection.survived()
        self._end_shadows(f"the trainer ran out of memory in step {step}")
        self._shadow_due = math.inf  # until that step is done
        self._leveller.reclaimed()
        protocol.send(sock, {"ok": True, "epoch": self._ranks.raise_epoch()}, deadline=time.monotonic() + REPLY_SECS)

    def _note_coordinator(self, generation: Generation, reason: str) -> None:
        assert generation.coordinator is not None
        pid = generation.coordinator.pid
        self.journal.write("coordinator", role=generation.role, incarnation=generation.incarnation, pid=pid, reason=reason)

    # Ends -------------------------------------------------------------------------------------------------------------------------

    def _died(self, generation: Generation, child: Child) -> None:
        """A process has ended. What it said before comes first."""
        seen_ns = time.monotonic_ns()
        self._open_door.hear_out(generation.incarnation)
        if generation is self._trainers and child.popen.wait() == 0 and not self._left_early(generation, child):
            self._ended_well(generation, child)
            return
        if self._exit is not None:  # on our way out: whatever it died of, nobody takes over
            return
        settle = SETTLE_SECS if generation.ranks > 1 else 0.0
        culprit, kind, detail = generation.root_cause(child, self._injection.firing(), settle)
        self._open_door.hear_out(generation.incarnation)
        if generation is self._shadows:
            self._shadows_ended(generation, culprit.rank, kind, detail)
            return
        if culprit.returncode == 0:
            detail = f"exit code 0 before step {self._ranks.controls[culprit.rank][Word.STEPS]}"
        if generation.refused:
            kind, detail = Kind.REFUSED, generation.refused
        elif kind is Kind.EXIT and not self._retained:
            where = "before its state was in place" if culprit.greeted else "before its session"
            kind, detail = Kind.REFUSED, generation.named(culprit.rank, f"{self.settings.script} failed {where} ({detail})")
        self._failed(generation, Symptom(culprit.rank, kind, detail, None), seen_ns)

    def _left_early(self, trainers: Generation, child: Child) -> bool:
        """Whether a rank has trained, and not to the end."""
        control = self._ranks.controls[child.rank]
        return child.rank not in trainers.done and control[Word.STEPS_DONE] > 0 and control[Word.COMMIT] < control[Word.STEPS]

    def _ended_well(self, trainers: Generation, child: Child) -> None:
        """A rank has ended as it should; the job has, when all have."""
        trainers.first_exit = trainers.first_exit or time.monotonic()
        if child.greeted and any(peer.returncode != 0 for peer in trainers.children):
            return
        self._books.ended(trainers)
        if len(trainers.done) == trainers.ranks:
            self._finish(0, "done")
        elif child.greeted:
            self._finish(0, "the script ended")
        else:
            ended = trainers.named(child.rank, f"{self.settings.script} ended without entering a session")
            self._say(f"{ended}: nothing was trained; use `with leto.session(...)`")
            self._finish(policy.USAGE, "the script never reached a session")
        self._trainers = None
        trainers.fence(self.settings.deadlines.reap)

    def _shadows_ended(self, shadows: Generation, rank: int, kind: Kind, detail: str) -> None:
        """One of them has, and so all do. The next ones start soon, later each time, unless the script itself does not let them."""
        self._shadows = None
        shadows.fence(self.settings.deadlines.reap)
        if self._exit is not None:
            return
        self._shadow_deaths += 1
        detail = shadows.named(rank, detail)
        if not self._shadow_refused and kind is Kind.EXIT and not shadows.ready and self._shadow_deaths >= MAX_SHADOW_EXITS:
            self._shadow_refused = f"the shadow ended ({detail}) {self._shadow_deaths} times before it was ready"
            self._say(f"{self._shadow_refused}; training goes on without one, a failure means a cold attach")
        if not self._shadow_refused:
            delay = min(2.0**self._shadow_deaths - 2.0, MAX_SHADOW_DELAY_SECS)
            self._shadow_due = time.monotonic() + delay
            self._say(f"the shadow ended ({detail}); the next one starts" + (f" in {delay:.0f} s" if delay else ""))
        if not shadows.refused:
            reason = self._shadow_refused or f"the shadow ended ({detail})"
            self.journal.write("refused", rank=rank, incarnation=shadows.incarnation, reason=reason)
        if self._pending is not None and self._trainers is None:
            self._recover()

    def _coordinator_ended(self, generation: Generation, reason: str) -> None:
        """Trainers that have met are noticed when they end of it; shadows are started again, and so are trainers that have not begun."""
        if self._exit is not None:
            return
        self._note_coordinator(generation, reason)
        if generation is self._shadows:
            kind = Kind.SIGNAL if generation.children else Kind.EXIT
            self._shadows_ended(generation, 0, kind, f"its coordinator: {reason}")
        elif not generation.children:
            self._trainers = None
            generation.fence(self.settings.deadlines.reap)
            if self._retained and self._cold_starts[1] <= self.settings.limits.without_progress:
                self._say(f"the coordinator, where the ranks meet: {reason}")
                self._start_cold(self._ranks.commit)
            else:
                self._give_up(f"the coordinator, where the ranks meet: {reason}")

    # Failures ---------------------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """The watchdog: is anybody overdue?"""
        trainers, shadows, deadlines = self._trainers, self._shadows, self.settings.deadlines
        if self._exit is not None or self.settings.debug:
            return
        for generation in self._generations:
            if not generation.children and time.monotonic() - generation.began > deadlines.coordinator:
                self._coordinator_ended(generation, f"it did not listen within {deadlines.coordinator:g} s")
                return
        if shadows is not None and trainers is not None and not shadows.ready and time.monotonic() - shadows.began > deadlines.init:
            self._shadows_ended(shadows, 0, Kind.HANG, f"it was not ready within {deadlines.init:g} s ({shadows.stages})")
            return
        if trainers is None:
            if shadows is not None and self._pending is not None and time.monotonic() - self._pending.since > deadlines.init:
                self._say(f"the shadow was not ready within {deadlines.init:g} s ({shadows.stages})")
                self._end_shadows(f"it was not ready within {deadlines.init:g} s")
                self._recover()
            return
        promoted = self._pending is not None and self._pending.path == "shadow" and trainers.level == Level.LOADED
        symptom = self._watchdog.look(trainers, promoted, self._books.median_step_secs, self._injection.firing())
        if symptom is None:
            return
        if symptom.absent:
            limit = deadlines.takeover if promoted else deadlines.init
            script = trainers.named(trainers.absent[0], self.settings.script)
            self._say(
                f"{script} has not entered a session within {limit:g} s; use `with leto.session(...)`, and keep what is before it short"
            )
            self._finish(policy.GAVE_UP if self._retained else policy.USAGE, "the script never reached a session")
        else:
            self._failed(trainers, symptom, time.monotonic_ns())

    def _failed(self, trainers: Generation, symptom: Symptom, detected_ns: int) -> None:
        """A trainer failed, and so all have: fence them, look at the machine, decide."""
        if self._exit is not None:  # on our way out: whatever it died of, nobody takes over
            return
        self._sample()
        self._books.ended(trainers)
        injected = self._injection.fired()
        if injected is not None and injected.kind is FailureKind.INOPERABLE:
            gpus = (self._spares.gpus[injected.rank],) if self._gpus else ()
            self._inoperable = operability.Verdict(False, "declared inoperable by leto inject", gpus=gpus)
        pending = self._books.failure(trainers, symptom, injected, detected_ns)
        began = time.monotonic()
        self._trainers = None
        report = trainers.fence(self.settings.deadlines.reap)
        pending.stages["fence"] = time.monotonic() - began
        self.journal.write(
            "fence",
            rank=pending.rank,
            incarnation=trainers.incarnation,
            killed=len(report.killed),
            remaining=[item._asdict() for item in report.remaining],
            secs=pending.stages["fence"],
        )
        if pending.failure.kind is not Kind.REFUSED:
            self._say(f"the trainer{'s' * (trainers.ranks > 1)} failed ({pending.failure.describe()})")
        self._pending = pending if self._pending is None else pending.after(self._pending)
        if report.remaining:
            stuck = report.remaining[0]
            self._give_up(
                f"process {stuck.pid} ({stuck.command}) cannot be killed (state {stuck.state}, in {stuck.wchan}): its memory may still change"
            )
            return
        if injected is not None and injected.kind in DAMAGE:
            phase, kept = pending.failure.phase, self._open_link.descriptors
            offset, nbytes = self._ranks.damage(pending.rank, injected.kind, phase, self._incarnation, kept)
            self.journal.write("damage", rank=pending.rank, kind=injected.kind.value, offset=offset, nbytes=nbytes)
        self._recover()

    def _recover(self) -> None:
        """Decides on the pending failure and carries the decision out."""
        assert self._pending is not None
        failure = self._pending.failure
        # By the name of the signal where it was one: some are of a driver that has found something.
        verdict = self._inoperable or self._operability.check(failure.detail if self._pending.kind == Kind.SIGNAL else self._pending.kind)
        operable = verdict.operable, verdict.reason
        self.journal.write("operability", operable=operable[0], reason=operable[1])
        shadow = "none" if self._shadows is None else "ready" if self._shadows.ready else "loading"
        first = self._pending.path == ""
        earlier = self._history if first else self._history[:-1]
        spare = (False, "") if verdict.operable and not failure.lost else self._spare(verdict.gpus)
        decision = policy.decide(failure, earlier, self.settings.limits, operable, shadow, spare)
        if first:
            self._history.append(failure)
        action = decision.action
        if action is Action.SPARE:
            self._say(decision.reason)
            action = policy.successor("none" if self._move(verdict.gpus) else shadow).action
        on_spare = decision.action is Action.SPARE or (self._pending.path == "spare" and action is not Action.STOP)
        path = {Action.PROMOTE: "shadow", Action.WAIT: "late_shadow", Action.COLD: "cold", Action.STOP: "stop"}[action]
        self._pending.path = "spare" if on_spare else path
        epoch = self._ranks.epoch
        if action is Action.PROMOTE:
            epoch = self._promote()
        elif action is Action.WAIT:
            assert self._shadows is not None
            self._shadows.set_priority(0)
            self._say("no shadow is ready yet: waiting for the one that is loading")
        elif action is Action.COLD:
            self._start_cold(failure.step)
        else:
            self._give_up(decision.reason)
        self.journal.write("decision", action=decision.action.value, reason=decision.reason, path=self._pending.path, epoch=epoch)

    def _start_cold(self, step: int) -> None:
        """Starts new trainers, later each time that this leads to a failure at the same step again."""
        starts = self._cold_starts[1] if self._cold_starts[0] == step else 0
        self._cold_starts = (step, starts + 1)
        self._say("no shadow: a new trainer attaches to the retained state" if self._in_place else "a new trainer starts")
        if delay := policy.cold_delay(starts):
            self._cold_due = time.monotonic() + delay
            self.journal.write("back_off", step=step, secs=delay)
            self._say(f"the last {starts} of these have failed after commit {step}, too: in {delay:g} s")
        else:
            self._start_trainers("cold")

    def _spare(self, bad: Sequence[int]) -> tuple[bool, str]:
        """Whether a spare can take over, and how, or why not. bad: GPUs that cannot go on."""
        if problem := self._spares.can_move(bad, self._operability.visible_gpus):
            return False, problem
        if not self._has_copies:
            return True, "a spare begins anew, as no copy of the state has been taken yet"
        return True, "a spare goes on from the newest copy"

    def _move(self, bad: Sequence[int]) -> bool:
        """To a spare: the memory of these devices is given up; whoever comes next fills other memory from the newest copy. Returns whether a rank
        has another GPU now, which no shadow has opened."""
        moved = self._spares.move(bad, self._operability.visible_gpus)
        self._inoperable = None
        if self._in_place:
            self._ranks.empty(self._open_link.client, self._open_link.descriptors)
        if moved:
            self._end_shadows("a rank goes on with another GPU")
            self._say(", ".join(f"rank {rank} goes on with GPU {self._spares.gpus[rank]}" for rank in moved))
        return bool(moved)

    def _promote(self) -> int:
        """Makes the ready shadows the trainers. Returns the new epoch."""
        shadows = self._shadows
        assert shadows is not None
        assert self._pending is not None
        epoch = self._ranks.promote(shadows.incarnation)
        self._trainers, self._shadows, self._shadow_deaths = shadows, None, 0
        self._pending.level = shadows.children[0].shown_level
        shadows.promoted()
        began = time.monotonic()
        try:
            self._leveller.bring_back(shadows)
            if self._pending.level == PARKED:
                self._pending.stages["unpark"] = time.monotonic() - began
            self._tell(shadows, {"op": "promote", "epoch": epoch})
        except errors.LetoError as exception:
            self._say(f"the shadow cannot be promoted ({exception}); a new trainer attaches")
            shadows.fence(self.settings.deadlines.reap)
            self._trainers, self._pending.path, self._pending.level = None, "cold", 0
            self._start_trainers("cold")
            return self._ranks.epoch
        shadows.set_priority(0)
        self._register()
        return epoch

    def _replace_manager(self) -> None:
        pid = self._open_link.replace()
        if pid is not None:
            self._register()
            self.journal.write("manager", pid=pid, reason="the last one died")

    # What processes and people say --------------------------------------------------------------------------------------------------

    def _handle(self, sock: socket.socket, message: Mapping[str, Any]) -> None:
        op = message.get("op")
        if op == "hello":
            speaker = Speaker(int(message["incarnation"]), int(message["rank"]))
            self._open_door.greet(sock, speaker)
            for _, child in self._found(speaker):
                child.greeted = True
        elif op == "event":
            for generation, child in self._found(self._open_door.speaker(sock)):
                self._event(generation, child, message)
        elif op == "status":
            protocol.send(sock, {"ok": True, **self.status()}, deadline=time.monotonic() + REPLY_SECS)
        elif op == "inject":
            if not self._in_place and FailureKind(message["kind"]) in DAMAGE:
                raise errors.UsageError(
                    f"--kind {message['kind']}: there is no retained memory, this job runs with --recovery {self.settings.recovery}"
                )
            on_gpu = any(gpu_of(item.kind) is not None for item in self._open_link.descriptors.values())
            self._injection.ask(sock, message, on_gpu)
        elif op == "checkpoint":
            self._saving.ask(str(message["directory"]), float(message["deadline_secs"]), sock)
        elif op == "reclaim":
            self._reclaim(sock, int(message["step"]))
        elif op == "stop":
            protocol.send(sock, {"ok": True}, deadline=time.monotonic() + REPLY_SECS)
            self._finish(policy.STOPPED, "leto stop")
        else:
            raise errors.ProtocolError(f"agent: expected hello, event, status, inject, checkpoint, reclaim or stop, found {op!r}")

    def _hung_up(self, sock: socket.socket) -> None:
        self._injection.gone(sock)
        self._saving.gone(sock)

    def _found(self, speaker: Speaker | None) -> list[tuple[Generation, Child]]:
        """The process that speaks, unless it is of an incarnation that is over."""
        if speaker is None:
            return []
        generations = [generation for generation in self._generations if generation.incarnation == speaker.incarnation]
        return [(generation, child) for generation in generations for child in generation.children if child.rank == speaker.rank]

    def _event(self, generation: Generation, child: Child, message: Mapping[str, Any]) -> None:
        name, who = message.get("event"), {"rank": child.rank, "incarnation": generation.incarnation}
        if name == "ready":
            child.ready, child.level = True, int(message["level"])
            set_priority(child.pid, 0)
            self.journal.write("ready", **who, level=child.level, note=str(message["note"]), stages=message["stages"])
            if generation is not self._shadows or not generation.ready:
                return
            if self._pending is None or self._trainers is not None:
                self._release(self._leveller.ready(generation))
            else:
                path = self._pending.path
                epoch = self._promote()
                self.journal.write("decision", action="promote", reason="the shadow that was loading is ready", path=path, epoch=epoch)
        elif name == "stage":
            child.stage = str(message["stage"])
        elif name == "refused":
            child.refused, child.lost = str(message["reason"]), bool(message.get("lost", False))
            self.journal.write("refused", **who, reason=child.refused)
            if generation is self._shadows and not self._shadow_refused:
                self._shadow_refused = generation.refused
                self._say(f"the shadow refuses: {self._shadow_refused}; training goes on without one, a failure means a cold attach")
        elif name == "published":
            self.journal.write("published", **who, nbytes=int(message["bytes"]))
        elif name == "attached":
            self._watch_gpus()
            self.journal.write(
                "attached", **who, commit=message["commit"], action=message["action"], reason=message["reason"], stages=message["stages"]
            )
        elif name in ("first_step", "takeover"):
            self._stepped(generation, child, message)
        elif name == "checkpoint":
            self._checkpointed(who, message)
        elif name == "saved":
            fields = {key: message[key] for key in ("tier", "commit", "stall_secs", "secs", "error")}
            self.journal.write("saved", **who, **fields)
            if not message["error"]:
                self._copied |= {child.rank} if message["tier"] == HOST_TIER else set(range(self.settings.ranks))
        elif name == "retried":
            fields = {key: message[key] for key in ("step", "action", "reason", "secs")}
            self.journal.write("retried", **who, **fields)
            self._say(f"step {message['step']} ran out of memory, and was done in a second try without a shadow ({message['reason']})")
            self._shadow_due = time.monotonic()
        elif name == "stopped":
            self.journal.write("stopped", **who, reason=str(message["reason"]))
        elif name == "done":
            generation.done.add(child.rank)
            self.journal.write("done", **who, commit=message["commit"], loss=message["loss"], digest=message["digest"])

    def _stepped(self, trainers: Generation, child: Child, message: Mapping[str, Any]) -> None:
        """A rank has finished its first step, or the one that was running when the failure came. The job is back when all are."""
        self._begun = True
        trainers.stepped.add(child.rank)
        if message["event"] == "first_step":
            self.journal.write(
                "first_step", rank=child.rank, incarnation=trainers.incarnation, commit=message["commit"], secs=message["secs"]
            )
        if message["event"] == "takeover" or not message.get("recovering", False):
            trainers.back[child.rank] = message
            if len(trainers.back) == trainers.ranks:
                self._taken_over(trainers)
        if len(trainers.stepped) == trainers.ranks:
            self._shadow_due = time.monotonic()

    def _taken_over(self, trainers: Generation) -> None:
        pending, self._pending = self._pending, None
        messages = {rank: message for rank, message in sorted(trainers.back.items()) if message["event"] == "takeover"}
        if not messages:  # a trainer that died before its arenas were live: the next one filled them
            return
        if pending is None:  # an attach to a job whose agent had died: no failure of ours
            for rank, message in messages.items():
                self.journal.write(
                    "first_step",
                    rank=rank,
                    incarnation=trainers.incarnation,
                    commit=message["commit"],
                    secs=message["stages"]["first_step"],
                )
            return
        secs = self._books.takeover(trainers, pending, list(messages.values()))
        self._say(f"took over in {secs:.3f} s ({pending.path}; {next(iter(messages.values()))['reason']})")

    def _checkpointed(self, who: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        problem, commit, path = str(message["error"]), int(message["commit"]), str(message["path"])
        self.journal.write("checkpoint", **who, commit=commit, path=path, secs=float(message["secs"]), error=problem)
        self._say(f"no checkpoint: {problem}" if problem else f"checkpoint of step {commit} in {path}")
        self._saving.done(message)
        if self.settings.only_checkpoint or (self._preempted and problem):  # what could not be written stays in memory
            self._finish(policy.GAVE_UP, problem or f"step {commit} is in {path}")
        elif self._preempted:
            self._finish(policy.PREEMPTED, f"SIGTERM: step {commit} is in {path}")

    # Status -----------------------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `leto status --json` prints."""
        state = "takeover" if self._pending is not None else "running" if self._ranks.trained else "starting"
        median = self._books.median_step_secs
        return {
            "job": self.settings.job,
            "state": state,
            "step": self._ranks.commit,
            "steps": self._ranks.steps,
            "ranks": [self._ranks.describe(generation, child) for generation in self._generations for child in generation.children],
            "restarts": len(self._history),
            "step_secs": median,
            "hang_deadline_secs": policy.step_deadline(self.settings.deadlines, median) if median else None,
            "shadow": self._shadow_refused or ("off" if not self.settings.shadow else "on"),
            "manager_pid": self._open_link.client.manager_pid,
            "agent_pid": os.getpid(),
            "uptime_secs": time.monotonic() - self._started,
        }

    def _write_run_file(self, state: str) -> None:
        """A note for the next agent, in case that this one and the manager die. Training does not depend on it."""
        path = self._directory / client.RUN_FILE
        temporary = path.with_suffix(".new")
        found = {
            "job": self.settings.job,
            "state": state,
            "step": self._ranks.commit,
            "ranks": self.settings.ranks,
            "incarnation": self._incarnation,
            "tokens": [generation.token for generation in self._generations],
        }
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(found))
            temporary.replace(path)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that was closed must not end the job
        print(f"leto: {text}", file=sys.stderr, flush=True)
