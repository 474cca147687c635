"""The agent of a job: one event loop over pidfds, sockets and control words.

    start -> trainer -> (programs published) -> shadow ... ready
    trainer fails: detect -> fence -> operability -> decide -> promote | wait for a loading shadow | cold attach | stop
    takeover done: the next shadow starts at low priority

If the agent dies, the state manager ends all of its processes and keeps the memory; `leto run --job NAME` attaches again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import select
import selectors
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from leto_jax import errors
from leto_jax import layout as layouts
from leto_jax.agent import client, operability, policy
from leto_jax.agent.door import Door
from leto_jax.agent.injection import DAMAGE, Injection
from leto_jax.agent.policy import Action, Failure, Kind, Limits
from leto_jax.agent.processes import LOW, Child, become_subreaper, new_token, reap_orphans, set_priority, spawn, state_letter
from leto_jax.agent.saving import Saving
from leto_jax.arena import control as controls
from leto_jax.arena import damage, metadata
from leto_jax.arena.control import Control, Word
from leto_jax.arena.memory import HostArena
from leto_jax.arena.metadata import HostMetadata, LostRange
from leto_jax.arena.rank import arena_names
from leto_jax.config import IN_PLACE, METRICS_FILE, SPARES, Deadlines, Process, Tiers, compile_cache
from leto_jax.faults import Phase, Point
from leto_jax.goodput import live
from leto_jax.goodput.journal import Journal
from leto_jax.manager import fence, protocol, runtime
from leto_jax.manager.client import ManagerClient, spawn_manager
from leto_jax.manager.store import gpu_of
from leto_jax.records import Kind as RecordKind
from leto_jax.records import Record
from leto_jax.rmu.recovery import Life
from leto_jax.shadow.inject import FailureKind
from leto_jax.shadow.member import AGENT_SOCKET, IDENTITY, control_name

TICK_SECS = 0.02
PROGRESS_SECS = 30.0
REPLY_SECS = 2.0
LOOK_SECS = 1.0
CACHE = "xla_cache"  # in the job's state directory, for as long as the job lives
MANAGER_RETRY_SECS = 2.0
MANAGER_END_SECS = 5.0
STEP_WINDOW = 64
MAX_SHADOW_EXITS = 3  # without one that got ready
MAX_SHADOW_DELAY_SECS = 300.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What `leto run` was asked to do."""

    job: str
    script: str
    arguments: tuple[str, ...]
    job_dir: Path
    shadow: bool = True
    limits: Limits = dataclasses.field(default_factory=Limits)
    deadlines: Deadlines = dataclasses.field(default_factory=Deadlines)
    debug: bool = False
    resume: str = ""  # directory of checkpoints that a fresh state comes from
    recovery: str = IN_PLACE
    tiers: Tiers = dataclasses.field(default_factory=Tiers)
    spares: int = 0
    metrics_port: int | None = None
    tensorboard: Path | None = None
    only_checkpoint: str = ""  # attach, write the retained state here, and leave it kept


@dataclasses.dataclass
class _Pending:
    """A failure on its way to the first step after it."""

    failure: Failure
    failed_ns: int
    stages: dict[str, float]
    lost_step_secs: float
    kind: str
    path: str = ""
    since: float = dataclasses.field(default_factory=time.monotonic)


class Agent:
    """Runs one job to its end. `run` returns the exit code."""

    def __init__(self, settings: Settings, environ: Mapping[str, str] = os.environ, say=None):
        self.settings = settings
        self._environ = {**environ, **_cache_settings(environ, settings.job_dir), **_gpu_settings(environ)}
        self._say = say or _say
        self._selector = selectors.DefaultSelector()
        self._trainer: Child | None = None
        self._shadow: Child | None = None
        self._incarnation = 0
        self._history: list[Failure] = []
        self._damage: FailureKind | None = None
        self._pending: _Pending | None = None
        self._steps: collections.deque[float] = collections.deque(maxlen=STEP_WINDOW)
        self._plain_steps: collections.deque[float] = collections.deque(maxlen=STEP_WINDOW)  # while no shadow was loading
        self._last_seen_commit = -1
        self._stopped_since = 0
        self._progress_at = 0.0
        self._exit: tuple[int, str] | None = None
        self._started = time.monotonic()
        self._spawned_at = 0.0
        self._shadow_refused = ""
        self._shadow_due = math.inf  # when the next one may start, by time.monotonic
        self._shadow_deaths = 0  # since the last promotion
        self._manager_due = 0.0
        self._done_event: dict[str, Any] | None = None
        self._interrupts = 0
        self._preempted = self._preempt_asked = False
        self._manager_process: subprocess.Popen | None = None
        self._door: Door | None = None
        self._look_at = 0.0
        self._begun = False  # a step of the job was trained
        self._spares = settings.spares
        self._copied: int | None = None  # step of the newest copy that was taken
        self._inoperable = ""  # why, if the device was declared so
        self._prometheus: live.Prometheus | None = None
        self._tensorboard: live.TensorBoard | None = None

    # Life of the job --------------------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """From attach to the end of the job. Leaves nothing behind unless the state is kept on purpose."""
        try:
            self._open()
        except BaseException:
            if self._manager_process is not None:  # nothing is in it yet
                self._manager_process.kill()
                self._manager_process.wait()
            if self._door is not None:
                self._door.close()
                client.remove_job_dir(self._directory, [AGENT_SOCKET])
            raise
        try:
            if self.settings.only_checkpoint:
                if not self._retained:
                    raise errors.JobError(f"job {self.settings.job!r} has no retained state: there is nothing to write")
                self._saving.ask(self.settings.only_checkpoint, self.settings.deadlines.init, last=True)
            self._start_trainer("first" if not self._attached else "attach")
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
        job = self.settings.job
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
        socket_path = directory / runtime.SOCKET_NAME
        before = client.read_run_file(directory)
        if runtime.probe(socket_path) is None:
            self._attached = False
            if tokens := [str(token) for token in before.get("tokens", ())]:  # they end themselves, unless they are stopped or stuck
                fence.fence(tokens, [], self.settings.deadlines.reap)
            if (state := before.get("state")) in ("running", "kept"):
                cause = "state manager and agent both died" if state == "running" else "its state manager died, or its time was over"
                self._say(
                    f"the retained state of job {job!r} is gone ({cause} after step {before.get('step', 0)}); starting from step 0, as no checkpoint was asked for"
                )
            self._manager_process = spawn_manager(job, directory, self.settings.deadlines.orphan_timeout).process
        else:
            self._attached = True
        self._client = ManagerClient(socket_path, "agent")
        self._subscription = self._client.subscribe()
        self._selector.register(self._subscription, selectors.EVENT_READ, self._manager_spoke)
        rank = 0
        with self._client.reserve(arena_names(rank)[2], metadata.BYTES) as item:
            self._metadata = HostMetadata(HostArena(item.fd, metadata.BYTES, item.name))
        with self._client.reserve(control_name(rank), controls.BYTES) as item:
            self._control = Control(item.fd)
        self._attached = self._attached and self._metadata.latest(RecordKind.LIFE) is not None
        if self._attached:
            self._say(f"attached to job {job!r}: retained state found")
        self._incarnation = max(self._control[Word.INCARNATION], int(before.get("incarnation", 0)), 0)
        self._control[Word.STEPS_DONE] = 0
        self._control[Word.PID] = 0
        self._injection = Injection(self._control, self.journal, self.settings.deadlines)
        self._saving = Saving(self._control, directory)
        self._write_run_file("running")
        self.journal.write("start", job=job, script=self.settings.script, arguments=list(self.settings.arguments), attached=self._attached)

    def _turn(self) -> None:
        """One round: what became readable, then what became late."""
        for key, _ in self._selector.select(TICK_SECS):
            key.data()
        self._sample()
        self._watch()
        in_loop = self._trainer is not None and self._control[Word.PID] == self._trainer.pid and self._control[Word.STEPS_DONE] > 0
        self._injection.serve(in_loop, self._shadow is not None and self._shadow.ready)
        if self._preempted and not self._preempt_asked:
            self._preempt_asked = True
            self._say(f"SIGTERM: finishing the step, then a checkpoint in {self.settings.tiers.directory}")
            self._saving.refuse(errors.JobError("checkpoint: the job was told to end"))
            self._saving.ask(self.settings.tiers.directory, self.settings.deadlines.preempt, last=True)
        if self._saving.late() and (self._preempted or self.settings.only_checkpoint):
            self._finish(policy.GAVE_UP, "the checkpoint was not written in time")
        if time.monotonic() >= self._shadow_due:
            self._start_shadow()
        if self._subscription.lost and time.monotonic() >= self._manager_due:
            self._replace_manager()
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_SECS
            self._open_door.stay_reachable(self._say)
            self._tell_others()
        reap_orphans(
            {child.pid for child in (self._trainer, self._shadow) if child is not None}
            | ({self._manager_process.pid} if self._manager_process else set())
        )

    def _tell_others(self) -> None:
        """Brings the metrics that others look at up to date."""
        if self._prometheus is not None:
            ready = self._shadow is not None and self._shadow.ready
            self._prometheus.sample(self._control[Word.COMMIT], self.median_step_secs, ready)
        if self._tensorboard is not None:
            self._tensorboard.poll()

    def _close(self) -> int:
        """Ends every process, frees the memory unless the state is kept, and removes the sockets."""
        assert self._exit is not None
        code, reason = self._exit
        keep = code == policy.GAVE_UP and (self._in_place or bool(self.settings.tiers.copies_every))
        if keep and self._subscription.lost:
            self._replace_manager()
        manager = self._open_manager()
        if self._trainer is not None:
            self._ended(self._trainer)
        for child in (self._shadow, self._trainer):
            if child is not None:
                self._fence(child)
        self._injection.refuse(errors.JobError(f"the job ended: {reason}"))
        self._saving.refuse(errors.JobError(f"the job ended: {reason}"))
        self.journal.write("finish", code=code, reason=reason)
        self._write_run_file("kept" if keep else "ended")
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._subscription)
        if not keep:
            with contextlib.suppress(errors.LetoError, OSError):
                self._client.free(force=True)
            shutil.rmtree(self.settings.job_dir / CACHE, ignore_errors=True)
        self._subscription.close()
        self._client.close()
        if manager >= 0:
            if not keep:
                select.select([manager], [], [], MANAGER_END_SECS)
            os.close(manager)
        if self._manager_process is not None:
            self._manager_process.poll()
        for teller in (self._prometheus, self._tensorboard):
            if teller is not None:
                teller.close()
        self._open_door.close()
        client.remove_job_dir(self._directory, [AGENT_SOCKET] if keep else client.JOB_FILES)
        self.journal.close()
        if keep:
            self._say(
                f"the state is kept: `leto run --job {self.settings.job} ...` goes on from step {self._control[Word.COMMIT]}, `leto stop --job {self.settings.job}` frees it"
            )
        return code

    def _open_manager(self) -> int:
        """A pidfd of the state manager, -1 if it is dead. It may be one that an earlier agent has started."""
        with contextlib.suppress(OSError):
            return os.pidfd_open(self._client.manager_pid)
        return -1

    def _finish(self, code: int, reason: str) -> None:
        if self._exit is None:
            self._exit = (code, reason)

    def _interrupted(self, number: int, frame: Any) -> None:
        self._interrupts += 1
        if number == signal.SIGINT and self.settings.debug and self._interrupts == 1 and self._trainer is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._trainer.pid, signal.SIGINT)  # the terminal is the script's; a second Ctrl-C ends the job
            return
        if number == signal.SIGTERM and self.settings.tiers.directory and not self._preempted and self._trainer is not None:
            self._preempted = True
            return
        self._finish(128 + number, f"{signal.Signals(number).name}")
        if self._interrupts == 1:
            self._say(f"{signal.Signals(number).name}: stopping")

    # Processes --------------------------------------------------------------------------------------------------------------------

    def _spawn(self, role: str, path: str) -> Child:
        self._incarnation += 1
        token = new_token(self.settings.job)
        # Registered before it exists: there is no moment at which the agent's death leaves it behind.
        self._register_children(token)
        self._write_run_file("running", token)
        socket_path = self._directory / runtime.SOCKET_NAME
        settings = self.settings
        process = Process(
            settings.job,
            role,
            0,
            socket_path,
            self._incarnation,
            settings.job_dir,
            settings.resume,
            settings.shadow,
            settings.recovery,
            settings.tiers,
        )
        stdin = None if self.settings.debug else subprocess.DEVNULL
        child = spawn(process, token, [self.settings.script, *self.settings.arguments], self._environ, stdin)
        self._selector.register(child.pidfd, selectors.EVENT_READ, lambda: self._died(child))
        self._register_children(extra=child)
        self.journal.write("spawn", role=role, rank=0, incarnation=child.incarnation, pid=child.pid, path=path)
        return child

    def _register_children(self, token: str | None = None, extra: Child | None = None) -> None:
        children = [child for child in (self._trainer, self._shadow, extra) if child is not None]
        entries: list[tuple[int | None, str]] = [(child.pid, child.token) for child in children]
        if token is not None:
            entries.append((None, token))
        with contextlib.suppress(errors.ProtocolError):  # a manager that has just died: its successor is told again
            self._client.children(entries)

    def _start_trainer(self, path: str) -> None:
        self._metadata.raise_epoch()
        self._shadow_refused = ""  # a script that was changed back may have shadows again
        self._control[Word.STEPS_DONE] = 0
        self._control[Word.ARMED_SINCE_NS] = 0
        self._control[Word.PID] = 0
        self._control.enter(Phase.INIT)
        self._trainer = self._spawn("trainer", path)
        self._spawned_at = time.monotonic()

    def _start_shadow(self) -> None:
        """Starts a shadow if one is wanted now: beside a trainer that is in its loop."""
        self._shadow_due = math.inf
        wanted = self.settings.shadow and self.settings.recovery in SPARES
        if not wanted or self._shadow is not None or self._trainer is None or self._shadow_refused or self._exit is not None:
            return
        self._shadow = self._spawn("shadow", "shadow")
        set_priority(self._shadow.pid, LOW)

    def _shadow_died(self, child: Child, returncode: int) -> None:
        """The next one starts soon, later each time, unless the script itself does not let it."""
        self._shadow = None
        self._fence(child)
        if self._exit is not None:
            return
        self._shadow_deaths += 1
        kind, detail = policy.classify(returncode)
        if not self._shadow_refused and kind is Kind.EXIT and not child.ready and self._shadow_deaths >= MAX_SHADOW_EXITS:
            self._shadow_refused = f"the shadow ended ({detail}) {self._shadow_deaths} times before it was ready"
            self._say(f"{self._shadow_refused}; training goes on without one, a failure means a cold attach")
        if not self._shadow_refused:
            delay = min(2.0**self._shadow_deaths - 2.0, MAX_SHADOW_DELAY_SECS)
            self._shadow_due = time.monotonic() + delay
            self._say(f"the shadow ended ({detail}); the next one starts" + (f" in {delay:.0f} s" if delay else ""))
        if not child.refused:
            self.journal.write(
                "refused", rank=0, incarnation=child.incarnation, reason=self._shadow_refused or f"the shadow ended ({detail})"
            )
        if self._pending is not None and self._trainer is None:
            self._recover()

    def _died(self, child: Child) -> None:
        """A pidfd is readable: the process has ended. What it said before comes first."""
        self._open_door.hear_out(child.incarnation)
        returncode = child.popen.wait()
        if child is self._shadow:
            self._shadow_died(child, returncode)
            return
        if child is not self._trainer:
            return
        if returncode == 0 and not (self._done_event is None and self._in_the_middle):
            self._ended(child)
            if self._done_event is not None:
                self._finish(0, "done")
            elif not child.greeted:
                self._say(f"{self.settings.script} ended without entering a session: nothing was trained; use `with leto.session(...)`")
                self._finish(policy.USAGE, "the script never reached a session")
            else:
                self._finish(0, "the script ended")
            self._trainer = None
            self._fence(child)
            return
        kind, detail = policy.classify(returncode)
        if returncode == 0:
            detail = f"exit code 0 before step {self._control[Word.STEPS]}"
        if child.refused:
            kind, detail = Kind.REFUSED, child.refused
        elif kind is Kind.EXIT and not self._retained:
            where = "before its state was in place" if child.greeted else "before its session"
            kind, detail = Kind.REFUSED, f"{self.settings.script} failed {where} ({detail})"
        self._failed(kind, detail, None, time.monotonic_ns())

    @property
    def _in_the_middle(self) -> bool:
        """Whether the trainer has trained, and not to the end."""
        return self._control[Word.STEPS_DONE] > 0 and self._control[Word.COMMIT] < self._control[Word.STEPS]

    def _drop(self, child: Child) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(child.pidfd)
        child.close()

    def _fence(self, child: Child) -> fence.FenceReport:
        """Kills and reaps a child and everything that descends from it."""
        report = fence.fence(child.token, [child.identity], self.settings.deadlines.reap)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.popen.wait(0.5)
        self._drop(child)
        return report

    # Failures ---------------------------------------------------------------------------------------------------------------------

    def _failed(self, kind: Kind, detail: str, detect_secs: float | None, detected_ns: int) -> None:
        """The trainer failed: fence it, look at the machine, decide."""
        child, control = self._trainer, self._control
        assert child is not None
        if self._exit is not None:  # on our way out: whatever it died of, nobody takes over
            return
        self._sample()
        self._ended(child)
        failed_ns = detected_ns
        injected = self._injection.fired()
        if injected is not None:
            if kind in (Kind.SIGNAL, Kind.EXIT):
                failed_ns = injected.ns
            else:
                detect_secs = (detected_ns - injected.ns) / 1e9
            if injected.kind in DAMAGE:
                self._damage = injected.kind
            elif injected.kind is FailureKind.INOPERABLE:
                self._inoperable = "declared inoperable by leto inject"
        name = injected.kind.value if injected is not None else kind.value
        try:
            phase = control.phase
        except errors.RecordError:
            phase = Phase.INIT
        if kind is Kind.DAMAGED:
            control[Word.COMMIT] = max(self._last_seen_commit, 0)
        failure = Failure(kind, detail, phase, control[Word.COMMIT], detect_secs, child.lost)
        armed = control[Word.ARMED_SINCE_NS]
        committed = phase in (Phase.DRAIN, Phase.BODY)  # no work of this step is lost
        lost_secs = (failed_ns - armed) / 1e9 if armed and not committed else 0.0
        self.journal.write(
            "failure",
            rank=0,
            incarnation=child.incarnation,
            kind=name,
            phase=phase.value,
            step=failure.step,
            reason=detail,
            failed_ns=failed_ns,
            detect_secs=detect_secs if detect_secs is not None else (detected_ns - failed_ns) / 1e9,
            lost_step_secs=lost_secs,
        )
        began = time.monotonic()
        report = self._fence(child)
        self._trainer = None
        stages = {"detect": (detected_ns - failed_ns) / 1e9, "fence": time.monotonic() - began}
        self.journal.write(
            "fence",
            rank=0,
            incarnation=child.incarnation,
            killed=len(report.killed),
            remaining=[item._asdict() for item in report.remaining],
            secs=stages["fence"],
        )
        if kind is not Kind.REFUSED:
            self._say(f"the trainer failed ({failure.describe()})")
        if self._pending is not None:  # a failure on the way back: one takeover, counted from the first failure
            failed_ns, earlier = self._pending.failed_ns, self._pending.stages
            stages = {name: secs + earlier.get(name, 0.0) for name, secs in stages.items()}
        self._pending = _Pending(failure, failed_ns, stages, lost_secs, name)
        if report.remaining:
            stuck = report.remaining[0]
            self._give_up(
                f"process {stuck.pid} ({stuck.command}) cannot be killed (state {stuck.state}, in {stuck.wchan}): its memory may still change"
            )
            return
        if self._damage is not None:
            self._damage_memory(self._damage)
            self._damage = None
        self._recover()

    def _recover(self) -> None:
        """Decides on the pending failure and carries the decision out."""
        assert self._pending is not None
        failure = self._pending.failure
        operable = (False, self._inoperable) if self._inoperable else operability.check(self.settings.job_dir)
        self.journal.write("operability", operable=operable[0], reason=operable[1])
        shadow = "none" if self._shadow is None else "ready" if self._shadow.ready else "loading"
        first = self._pending.path == ""
        earlier = self._history if first else self._history[:-1]
        decision = policy.decide(failure, earlier, self.settings.limits, operable, shadow, self._spare())
        if first:
            self._history.append(failure)
        action = decision.action
        if action is Action.SPARE:
            self._say(decision.reason)
            self._move()
            action = policy.successor(shadow).action
        on_spare = decision.action is Action.SPARE or (self._pending.path == "spare" and action is not Action.STOP)
        path = {Action.PROMOTE: "shadow", Action.WAIT: "late_shadow", Action.COLD: "cold", Action.STOP: "stop"}[action]
        self._pending.path = "spare" if on_spare else path
        epoch = self._metadata.epoch
        if action is Action.PROMOTE:
            epoch = self._promote()
        elif action is Action.WAIT:
            assert self._shadow is not None
            set_priority(self._shadow.pid, 0)
            self._say("no shadow is ready yet: waiting for the one that is loading")
        elif action is Action.COLD:
            self._say("no shadow: a new trainer attaches to the retained state" if self._in_place else "a new trainer starts")
            self._start_trainer("cold")
        else:
            self._give_up(decision.reason)
        self.journal.write("decision", action=decision.action.value, reason=decision.reason, path=self._pending.path, epoch=epoch)

    def _spare(self) -> tuple[bool, str]:
        """Whether a spare can take over, and how, or why not."""
        if not self._spares:
            return (
                False,
                "none is left" if self.settings.spares else "there is none; start with --spares 1 and --checkpoint-every or --copy-every",
            )
        if self._copied is None:
            return False, "no copy of the state has been taken yet (--checkpoint-every, --copy-every)"
        return True, f"a spare goes on from the newest copy, of step {self._copied} or later"

    def _move(self) -> None:
        """To a spare: the memory of this device is given up; whoever comes next fills other memory from the newest copy.

        Crash: of the agent in between, the retained state is gone or empty, and what attaches goes on from the newest copy too.
        """
        self._spares -= 1
        self._inoperable = ""
        if not self._in_place:
            return
        self._metadata.write(Point.LIFE_FILLING, Record(RecordKind.LIFE, self._metadata.epoch, 0, body=(Life.EMPTY,)))
        self._metadata.clear_lost()
        device, host, _ = arena_names(0)
        for name in list(self._subscription.descriptors):
            if name in (device, host) or name.startswith(f"{device}."):
                self._client.discard(name)

    def _give_up(self, reason: str) -> None:
        """Ends the job; what was retained is kept."""
        self._say(f"stopped: {reason}")
        self._finish(policy.GAVE_UP if self._retained else policy.USAGE, reason)

    @property
    def _retained(self) -> bool:
        """Whether there is a state worth keeping: one that was completely filled, or copies of one."""
        if not self._in_place or self._copied is not None:
            return self._begun
        life = self._metadata.latest(RecordKind.LIFE)
        return life is not None and life.body[0] == Life.LIVE

    @property
    def _in_place(self) -> bool:
        """Whether the state outlives the trainer."""
        return self.settings.recovery == IN_PLACE

    def _promote(self) -> int:
        """Makes the ready shadow the trainer. Returns the new epoch.

        Crash: the epoch may be raised without a promotion; the next agent raises it again.
        """
        shadow = self._shadow
        assert shadow is not None
        assert self._pending is not None
        epoch = self._metadata.raise_epoch()
        self._metadata.write(Point.PROMOTION, Record(RecordKind.PROMOTION, epoch, self._control[Word.COMMIT], shadow.incarnation))
        self._control[Word.ARMED_SINCE_NS] = 0
        self._control[Word.STEPS_DONE] = 0
        self._control[Word.PID] = 0
        self._control.enter(Phase.TAKEOVER)
        self._trainer, self._shadow, self._shadow_deaths = shadow, None, 0
        self._spawned_at = time.monotonic()
        shadow.role = "trainer"
        sock = self._open_door.socket_of(shadow.incarnation)
        try:
            if sock is None:
                raise errors.ProtocolError("its connection is gone")
            protocol.send(sock, {"op": "promote", "epoch": epoch}, deadline=time.monotonic() + REPLY_SECS)
        except errors.LetoError as exception:
            self._say(f"the shadow cannot be promoted ({exception}); a new trainer attaches")
            self._fence(shadow)
            self._trainer, self._pending.path = None, "cold"
            self._start_trainer("cold")
            return self._metadata.epoch
        set_priority(shadow.pid, 0)
        self._register_children()
        return epoch

    def _damage_memory(self, kind: FailureKind) -> None:
        """Carries out an injected page loss or corruption: after the fence, before the attach. One page of parameters or optimizer state."""
        assert self._pending is not None
        name = arena_names(0)[0]
        descriptors = self._subscription.descriptors
        layout = layouts.from_bytes(json.loads(descriptors[IDENTITY].read())["layout"].encode())
        # The piece that is updated last, where it lies now.
        step = self._control[Word.COMMIT] + (self._pending.failure.phase is Phase.COMMIT)
        piece = layout.pieces_of_chunk[layout.order(step + 1)[-1]][0]
        offset, page = layout.address(piece, step), piece.page_bytes
        if kind is FailureKind.PAGE_LOSS:
            self._metadata.add_lost(LostRange("device", offset, page))
        if name in descriptors:
            arena = HostArena(descriptors[name].fd, descriptors[name].nbytes, name)
            arena.damage(offset, np.random.default_rng(self._incarnation).integers(0, 256, page, np.uint8))
            arena.close()
        else:
            segment, begin = damage.segment_of(name, offset)
            found = descriptors[segment]
            damage.damage_gpu(gpu_of(found.kind) or 0, found.fd, found.nbytes, begin, page, self._incarnation)
        self.journal.write("damage", rank=0, kind=kind.value, offset=offset, nbytes=page)

    # Watching ---------------------------------------------------------------------------------------------------------------------

    def _sample(self) -> None:
        """Reads the control words: step times for the watchdog."""
        control = self._control
        commit = control[Word.COMMIT]
        if commit > self._last_seen_commit and self._trainer is not None and control[Word.PID] == self._trainer.pid:
            if (control[Word.STEPS_DONE] > 1 and commit == self._last_seen_commit + 1) or control[Word.STEPS_DONE] > 2:
                self._steps.append(control[Word.LAST_STEP_NS] / 1e9)
                if self._shadow is None or self._shadow.ready:
                    self._plain_steps.append(self._steps[-1])
            self._last_seen_commit = commit
            self._write_run_file("running")
            if time.monotonic() - self._progress_at > PROGRESS_SECS:
                self._progress_at = time.monotonic()
                self.journal.write("progress", **self._books(self._trainer))

    @property
    def median_step_secs(self) -> float | None:
        return statistics.median(self._steps) if self._steps else None

    def _watch(self) -> None:
        """The watchdog: is the trainer overdue?"""
        child, control, deadlines = self._trainer, self._control, self.settings.deadlines
        if self._exit is not None or self.settings.debug:
            return
        if child is None:
            if self._shadow is not None and self._pending is not None and time.monotonic() - self._pending.since > deadlines.init:
                self._say(f"the shadow was not ready within {deadlines.init:g} s")
                slow, self._shadow = self._shadow, None
                self._fence(slow)
                self._recover()
            return
        now = time.monotonic_ns()
        letter = state_letter(child.pid)
        self._stopped_since = (self._stopped_since or now) if letter == "T" else 0
        if control[Word.PID] == 0:  # it has not come to its loop yet
            limit = deadlines.takeover if self._pending is not None and self._pending.path == "shadow" else deadlines.init
            late = time.monotonic() - self._spawned_at > limit
            if self._stopped_since and (now - self._stopped_since) / 1e9 > deadlines.stopped:
                self._failed(Kind.STOPPED, "the process was stopped before its first step", (now - self._stopped_since) / 1e9, now)
            elif late and not child.greeted:
                self._say(
                    f"{self.settings.script} has not entered a session within {limit:g} s; use `with leto.session(...)`, and keep what is before it short"
                )
                self._finish(policy.GAVE_UP if self._retained else policy.USAGE, "the script never reached a session")
            elif late:
                self._failed(Kind.HANG, f"no first step within {limit:g} s", limit, now)
            return
        try:
            control.check(child.pid, child.incarnation)
            phase = control.phase
        except errors.RecordError as exception:
            self._failed(Kind.DAMAGED, str(exception), None, now)
            return
        progress = policy.Progress(
            phase,
            control[Word.PHASE_SINCE_NS],
            control[Word.COMMIT],
            control[Word.STEPS_DONE],
            control[Word.ARMED_SINCE_NS],
            control[Word.SECTION_DEADLINE_NS],
            letter,
        )
        hang = policy.overdue(progress, now, deadlines, self.median_step_secs, self._stopped_since)
        if hang is not None:
            kind, why, since = hang
            self._failed(kind, why, (now - since) / 1e9, now)

    def _books(self, child: Child) -> dict[str, Any]:
        """What the control words say about the steps of this child."""
        control = self._control
        mine = control[Word.INCARNATION] == child.incarnation
        return {
            "rank": 0,
            "incarnation": child.incarnation,
            "commit": control[Word.COMMIT],
            "steps": control[Word.STEPS_DONE] if mine else 0,
            "step_secs": control[Word.STEP_NS_TOTAL] / 1e9 if mine else 0.0,
            "stale_secs": control[Word.STALE_NS_TOTAL] / 1e9 if mine else 0.0,
        }

    def _ended(self, child: Child) -> None:
        books = self._books(child)
        del books["commit"]
        self.journal.write("ended", **books, alive_secs=time.monotonic() - self._spawned_at)

    # Manager ----------------------------------------------------------------------------------------------------------------------

    def _manager_spoke(self) -> None:
        with contextlib.suppress(errors.ProtocolError):
            self._subscription.poll()
        if self._subscription.lost:
            self._selector.unregister(self._subscription)
            self._client.close()
            self._say("the state manager died; starting another one with the agent's descriptors")

    def _replace_manager(self) -> None:
        """Starts a manager that takes the retained memory back from us. Training goes on meanwhile, and if this fails it is tried again."""
        kept = self._subscription
        if self._manager_process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._manager_process.wait(1)
        try:
            started = spawn_manager(
                self.settings.job, self._directory, self.settings.deadlines.orphan_timeout, adopt=kept.descriptors.values()
            )
            self._manager_process = started.process
            self._client = ManagerClient(started.path, "agent")
            self._subscription = self._client.subscribe()
        except (errors.LetoError, OSError) as exception:
            self._manager_due = time.monotonic() + MANAGER_RETRY_SECS
            self._say(f"no state manager: {exception}; trying again in {MANAGER_RETRY_SECS:g} s")
            return
        kept.close()
        self._selector.register(self._subscription, selectors.EVENT_READ, self._manager_spoke)
        self._register_children()
        self.journal.write("manager", pid=started.pid, reason="the last one died")

    # Connections ------------------------------------------------------------------------------------------------------------------

    def _handle(self, sock: socket.socket, message: Mapping[str, Any]) -> None:
        op = message.get("op")
        if op == "hello":
            incarnation = int(message["incarnation"])
            self._open_door.greet(sock, incarnation)
            for child in (self._trainer, self._shadow):
                if child is not None and child.incarnation == incarnation:
                    child.greeted = True
        elif op == "event":
            speaker = self._open_door.incarnation_of(sock)
            child = next((c for c in (self._trainer, self._shadow) if c is not None and c.incarnation == speaker), None)
            if child is not None:
                self._event(child, message)
        elif op == "status":
            protocol.send(sock, {"ok": True, **self.status()}, deadline=time.monotonic() + REPLY_SECS)
        elif op == "inject":
            if not self._in_place and FailureKind(message["kind"]) in DAMAGE:
                raise errors.UsageError(
                    f"--kind {message['kind']}: there is no retained memory, this job runs with --recovery {self.settings.recovery}"
                )
            on_gpu = any(gpu_of(item.kind) is not None for item in self._subscription.descriptors.values())
            self._injection.ask(sock, message, on_gpu)
        elif op == "checkpoint":
            self._saving.ask(str(message["directory"]), float(message["deadline_secs"]), sock)
        elif op == "stop":
            protocol.send(sock, {"ok": True}, deadline=time.monotonic() + REPLY_SECS)
            self._finish(policy.STOPPED, "leto stop")
        else:
            raise errors.ProtocolError(f"agent: expected hello, event, status, inject, checkpoint or stop, found {op!r}")

    def _hung_up(self, sock: socket.socket) -> None:
        self._injection.gone(sock)
        self._saving.gone(sock)

    @property
    def _open_door(self) -> Door:
        assert self._door is not None
        return self._door

    def _event(self, child: Child, message: Mapping[str, Any]) -> None:
        name, who = message.get("event"), {"rank": 0, "incarnation": child.incarnation}
        if name == "ready":
            child.ready, child.level = True, int(message["level"])
            set_priority(child.pid, 0)
            self.journal.write("ready", **who, level=child.level, note=str(message["note"]))
            if self._pending is not None and self._trainer is None and child is self._shadow:
                path = self._pending.path
                epoch = self._promote()
                self.journal.write("decision", action="promote", reason="the shadow that was loading is ready", path=path, epoch=epoch)
        elif name == "refused":
            child.refused, child.lost = str(message["reason"]), bool(message.get("lost", False))
            self.journal.write("refused", **who, reason=child.refused)
            if child is self._shadow:
                self._shadow_refused = child.refused
                self._say(f"the shadow refuses: {self._shadow_refused}; training goes on without one, a failure means a cold attach")
        elif name == "published":
            self.journal.write("published", **who, nbytes=int(message["bytes"]))
        elif name == "attached":
            self.journal.write(
                "attached", **who, commit=message["commit"], action=message["action"], reason=message["reason"], stages=message["stages"]
            )
        elif name in ("first_step", "takeover"):
            self._begun = True
            if name == "first_step":
                if not message.get("recovering", False):
                    self._pending = None  # a trainer that died before its arenas were live: the next one filled them
                self.journal.write("first_step", **who, commit=message["commit"], secs=message["secs"])
            else:
                self._takeover_done(child, message)
            self._shadow_due = time.monotonic()
        elif name == "checkpoint":
            self._checkpointed(child, message)
        elif name == "saved":
            fields = {key: message[key] for key in ("tier", "commit", "stall_secs", "secs", "error")}
            self.journal.write("saved", **who, **fields)
            if not message["error"]:
                self._copied = max(self._copied or 0, int(message["commit"]))
        elif name == "stopped":
            self.journal.write("stopped", **who, reason=str(message["reason"]))
        elif name == "done":
            self._done_event = dict(message)
            self.journal.write("done", **who, commit=message["commit"], loss=message["loss"], digest=message["digest"])

    def _checkpointed(self, child: Child, message: Mapping[str, Any]) -> None:
        problem, commit, path = str(message["error"]), int(message["commit"]), str(message["path"])
        self.journal.write(
            "checkpoint", rank=0, incarnation=child.incarnation, commit=commit, path=path, secs=float(message["secs"]), error=problem
        )
        self._say(f"no checkpoint: {problem}" if problem else f"checkpoint of step {commit} in {path}")
        self._saving.done(message)
        if self.settings.only_checkpoint or (self._preempted and problem):  # what could not be written stays in memory
            self._finish(policy.GAVE_UP, problem or f"step {commit} is in {path}")
        elif self._preempted:
            self._finish(policy.PREEMPTED, f"SIGTERM: step {commit} is in {path}")

    def _takeover_done(self, child: Child, message: Mapping[str, Any]) -> None:
        pending, self._pending = self._pending, None
        if pending is None:  # an attach to a job whose agent had died: no failure of ours
            self.journal.write(
                "first_step", rank=0, incarnation=child.incarnation, commit=message["commit"], secs=message["stages"]["first_step"]
            )
            return
        plain = statistics.median(self._plain_steps or self._steps or [0.0])
        total = (int(message["finished_ns"]) - pending.failed_ns) / 1e9
        self.journal.write(
            "takeover",
            rank=0,
            incarnation=child.incarnation,
            kind=pending.kind,
            phase=pending.failure.phase.value,
            step=pending.failure.step,
            commit=message["commit"],
            takeover_secs=total - plain,
            detect_secs=pending.failure.detect_secs if pending.failure.detect_secs is not None else pending.stages["detect"],
            stages={**pending.stages, **message["stages"]},
            lost_steps=_lost_steps(pending, message),
            compiles=message["compiles"],
            plan=message["action"],
            path=pending.path,
            plain_step_secs=plain,
            repaired_pages=message["repaired_pages"],
        )
        self._say(f"took over in {total - plain:.3f} s ({pending.path}; {message['reason']})")

    # Status -----------------------------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `leto status --json` prints."""
        control = self._control
        ranks = []
        for child in (self._trainer, self._shadow):
            if child is None:
                continue
            trainer = child is self._trainer
            try:
                phase = control.phase.value if trainer else ("ready" if child.ready else "loading")
            except errors.RecordError:
                phase = "unknown"
            ranks.append(
                {
                    "rank": 0,
                    "pid": child.pid,
                    "role": child.role,
                    "phase": phase,
                    "level": None if trainer else child.level,
                    "step": control[Word.COMMIT] if trainer else None,
                }
            )
        state = "takeover" if self._pending is not None else "running" if control[Word.STEPS_DONE] else "starting"
        median = self.median_step_secs
        return {
            "job": self.settings.job,
            "state": state,
            "step": control[Word.COMMIT],
            "steps": control[Word.STEPS],
            "ranks": ranks,
            "restarts": len(self._history),
            "step_secs": median,
            "hang_deadline_secs": policy.step_deadline(self.settings.deadlines, median) if median else None,
            "shadow": self._shadow_refused or ("off" if not self.settings.shadow else "on"),
            "manager_pid": self._client.manager_pid,
            "agent_pid": os.getpid(),
            "uptime_secs": time.monotonic() - self._started,
        }

    def _write_run_file(self, state: str, *tokens: str) -> None:
        """A note for the next agent, in case that this one and the manager die. Training does not depend on it."""
        path = self._directory / client.RUN_FILE
        temporary = path.with_suffix(".new")
        tokens = (*tokens, *(child.token for child in (self._trainer, self._shadow) if child is not None))
        found = {
            "job": self.settings.job,
            "state": state,
            "step": self._control[Word.COMMIT],
            "incarnation": self._incarnation,
            "tokens": tokens,
        }
        with contextlib.suppress(OSError):
            temporary.write_text(json.dumps(found))
            temporary.replace(path)


def _lost_steps(pending: _Pending, message: Mapping[str, Any]) -> int:
    """Steps whose compute ran again."""
    cut_off = pending.lost_step_secs > 0
    if message["restored"] is not None:
        return pending.failure.step - int(message["restored"]) + cut_off
    return int(message["action"] in ("redo", "revoke") and cut_off and message["commit"] == pending.failure.step + 1)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # a terminal that was closed must not end the job
        print(f"leto: {text}", file=sys.stderr, flush=True)


def _cache_settings(environ: Mapping[str, str], job_dir: Path) -> dict[str, str]:
    """A persistent compilation cache for what the script jits itself, unless the user has chosen one; small programs too."""
    return {} if "JAX_COMPILATION_CACHE_DIR" in environ else compile_cache(job_dir / CACHE)


def _gpu_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """XLA must not take the GPU's memory in advance: arenas and a shadow need theirs. No effect on the CPU."""
    return {name: value for name, value in {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}.items() if name not in environ}
