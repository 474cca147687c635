"""Steps, failures and takeovers of a job, as its journal and its watchdog want them. With several ranks rank 0's steps count for all."""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from leto_jax import errors
from leto_jax.agent.generation import Generation
from leto_jax.agent.injection import Fired
from leto_jax.agent.policy import Failure, Kind
from leto_jax.agent.watch import Symptom
from leto_jax.arena.control import Control, Word
from leto_jax.faults import Phase
from leto_jax.goodput.journal import Journal

PROGRESS_SECS = 30.0
STEP_WINDOW = 64


@dataclasses.dataclass
class Pending:
    """A failure on its way to the first step after it. stages: seconds by name. rank: which one failed."""

    failure: Failure
    failed_ns: int
    stages: dict[str, float]
    lost_step_secs: float
    kind: str
    rank: int
    path: str = ""
    level: int | str = 0  # of the shadow that takes over
    since: float = dataclasses.field(default_factory=time.monotonic)

    def after(self, earlier: Pending) -> Pending:
        """This failure came on the way back from another one: one takeover, counted from the first."""
        stages = {name: secs + earlier.stages.get(name, 0.0) for name, secs in self.stages.items()}
        return dataclasses.replace(self, failed_ns=earlier.failed_ns, stages=stages)


class Books:
    """Watches the commits of all ranks, and writes down what they mean."""

    def __init__(self, controls: Sequence[Control], journal: Journal):
        self._controls, self._journal = controls, journal
        self._steps: collections.deque[float] = collections.deque(maxlen=STEP_WINDOW)
        self._plain_steps: collections.deque[float] = collections.deque(maxlen=STEP_WINDOW)  # while no shadow was loading
        self._seen = [-1] * len(controls)  # commits, while the control words were whole
        self._progress_at = 0.0

    @property
    def median_step_secs(self) -> float | None:
        return statistics.median(self._steps) if self._steps else None

    @property
    def plain_step_secs(self) -> float:
        return statistics.median(self._plain_steps or self._steps or [0.0])

    def sample(self, trainers: Generation, shadow_loading: bool) -> bool:
        """Reads the control words: step times for the watchdog. Whether rank 0 has committed since the last look."""
        news = False
        for child in trainers.children:
            control, rank = self._controls[child.rank], child.rank
            commit = control[Word.COMMIT]
            if commit <= self._seen[rank] or control[Word.PID] != child.pid:
                continue
            if rank == 0:
                news = True
                if (control[Word.STEPS_DONE] > 1 and commit == self._seen[0] + 1) or control[Word.STEPS_DONE] > 2:
                    self._steps.append(control[Word.LAST_STEP_NS] / 1e9)
                    if not shadow_loading:
                        self._plain_steps.append(self._steps[-1])
            self._seen[rank] = commit
        if news and time.monotonic() - self._progress_at > PROGRESS_SECS:
            self._progress_at = time.monotonic()
            self._journal.write("progress", **self._of(trainers), commit=self._controls[0][Word.COMMIT])
        return news

    def _of(self, trainers: Generation) -> dict[str, Any]:
        """What rank 0 says about the steps of these trainers."""
        control = self._controls[0]
        mine = control[Word.INCARNATION] == trainers.incarnation
        return {
            "rank": 0,
            "incarnation": trainers.incarnation,
            "steps": control[Word.STEPS_DONE] if mine else 0,
            "step_secs": control[Word.STEP_NS_TOTAL] / 1e9 if mine else 0.0,
            "stale_secs": control[Word.STALE_NS_TOTAL] / 1e9 if mine else 0.0,
            "peer_stale_secs": control[Word.PEER_STALE_NS_TOTAL] / 1e9 if mine and control[Word.PEER_STALE_NS_TOTAL] >= 0 else None,
        }

    def ended(self, trainers: Generation) -> None:
        """These trainers have ended, or will now."""
        self._journal.write("ended", **self._of(trainers), alive_secs=time.monotonic() - trainers.began)

    def failure(self, trainers: Generation, symptom: Symptom, injected: Fired | None, detected_ns: int) -> Pending:
        """What has failed, when and where, from the control words of the rank to blame: of the one that was told to fail, if one was."""
        rank, kind, detail, detect_secs, _ = symptom
        failed_ns = detected_ns
        if injected is not None:
            rank = injected.rank
            if kind in (Kind.SIGNAL, Kind.EXIT):
                failed_ns = injected.ns
            else:
                detect_secs = (detected_ns - injected.ns) / 1e9
        control = self._controls[rank]
        try:
            phase = control.phase
        except errors.RecordError:
            phase = Phase.INIT
        if kind is Kind.DAMAGED:
            control[Word.COMMIT] = max(self._seen[rank], 0)
        step = min(each[Word.COMMIT] for each in self._controls)  # of all ranks, so that a failure is the same one again whoever is blamed
        failure = Failure(kind, detail, phase, step, detect_secs, trainers.lost, rank if trainers.ranks > 1 else None)
        armed = control[Word.ARMED_SINCE_NS]
        committed = phase in (Phase.DRAIN, Phase.BODY)  # no work of this step is lost
        lost_secs = (failed_ns - armed) / 1e9 if armed and not committed else 0.0
        detect = (detected_ns - failed_ns) / 1e9
        name = injected.kind.value if injected is not None else kind.value
        self._journal.write(
            "failure",
            rank=rank,
            incarnation=trainers.incarnation,
            kind=name,
            phase=phase.value,
            step=failure.step,
            reason=detail,
            failed_ns=failed_ns,
            detect_secs=detect_secs if detect_secs is not None else detect,
            lost_step_secs=lost_secs,
        )
        return Pending(failure, failed_ns, {"detect": detect}, lost_secs, name, rank)

    def takeover(self, trainers: Generation, pending: Pending, messages: Sequence[Mapping[str, Any]]) -> float:
        """Every rank has said that training goes on: one takeover, as long as that of the slowest. Returns its seconds."""
        plain = self.plain_step_secs
        secs = (max(int(message["finished_ns"]) for message in messages) - pending.failed_ns) / 1e9 - plain
        failure, first = pending.failure, messages[0]
        self._journal.write(
            "takeover",
            rank=pending.rank,
            incarnation=trainers.incarnation,
            kind=pending.kind,
            phase=failure.phase.value,
            step=failure.step,
            commit=first["commit"],
            takeover_secs=secs,
            detect_secs=failure.detect_secs if failure.detect_secs is not None else pending.stages["detect"],
            stages={**pending.stages, **longest([message["stages"] for message in messages])},
            lost_steps=lost_steps(pending, first),
            compiles=sum(message["compiles"] for message in messages),
            plan=first["action"],
            path=pending.path,
            level=pending.level,
            plain_step_secs=plain,
            repaired_pages=sum(message["repaired_pages"] for message in messages),
            ranks=trainers.ranks,
        )
        return secs


def longest(stages: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each stage the longest of all ranks."""
    names = dict.fromkeys(name for each in stages for name in each)
    return {name: max(each.get(name, 0.0) for each in stages) for name in names}


def lost_steps(pending: Pending, message: Mapping[str, Any]) -> int:
    """Steps whose compute ran again."""
    cut_off = pending.lost_step_secs > 0
    if message["restored"] is not None:
        return pending.failure.step - int(message["restored"]) + cut_off
    return int(message["action"] in ("redo", "revoke") and cut_off and message["commit"] == pending.failure.step + 1)
