"""What to do with what a crash left: one pure function from the logs of all ranks to a plan and its reason.

It serves takeover, cold attach, re-attach after the agent's death and `leto checkpoint`. It never guesses: a picture that no crash of ours
can leave is refused, and the state is kept.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Sequence
from typing import NamedTuple

from leto_jax import errors, records
from leto_jax.records import Kind, Record
from leto_jax.rmu.log import Contents

COPIED = ("scalars", "extras", "metrics")
"""Regions with two copies, in the order of their CRCs in an intent or a commit. They are the same on all ranks."""
_RECORDS = {"commits": Kind.COMMIT, "intents": Kind.INTENT, "revokes": Kind.REVOKE, "marks": Kind.MARK}


class Life(enum.IntEnum):
    """Life of a rank's arenas. Only LIVE is rolled forward."""

    EMPTY = 0
    FILLING = 1
    LIVE = 2


class Action(enum.StrEnum):
    FILL = enum.auto()  # nothing usable yet: fill (again) from the source
    REDO = enum.auto()  # the state is commit `target - 1`; compute `target` with the batch of the ring
    REVOKE = enum.auto()  # as REDO, but an intent of `target` must be voided on all ranks first
    ROLL_FORWARD = enum.auto()  # apply the unmarked chunks of `target` with the retained gradients, commit
    REFUSE = enum.auto()  # never guess: a checkpoint, or stop with the state kept


@dataclasses.dataclass(frozen=True)
class Picture:
    """What one rank's retained memory shows.

    log: its valid records. stored: (step, epoch) of the gradient region's header, None if it is not complete.
    digests: step -> crc words of the scalars, extras and metrics as they read now, for the last commit and the step after it.
    bad_gradients: chunks whose gradients do not have the checksum that compute noted. log_lost: both log copies have lost a page.
    """

    life: Life
    log: Contents
    stored: tuple[int, int] | None
    digests: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    bad_gradients: frozenset[int] = frozenset()
    log_lost: bool = False

    def to_bytes(self) -> bytes:
        """For the other ranks."""
        log = {name: [record.pack().hex() for record in sorted(getattr(self.log, name), key=_order)] for name in _RECORDS}
        found = {
            "life": self.life,
            "log": log | {"torn": self.log.torn},
            "stored": self.stored,
            "digests": list(self.digests.items()),
            "bad_gradients": sorted(self.bad_gradients),
            "log_lost": self.log_lost,
        }
        return json.dumps(found).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Picture:
        """What `to_bytes` wrote. Raises RecordError for anything else."""
        try:
            raw = json.loads(data)
            sets = {name: frozenset(_record(bytes.fromhex(text), kind) for text in raw["log"][name]) for name, kind in _RECORDS.items()}
            return Picture(
                Life(raw["life"]),
                Contents(**sets, torn=tuple(raw["log"]["torn"])),
                None if raw["stored"] is None else (int(raw["stored"][0]), int(raw["stored"][1])),
                {int(step): tuple(words) for step, words in raw["digests"]},
                frozenset(raw["bad_gradients"]),
                bool(raw["log_lost"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as exception:
            raise errors.RecordError(f"picture: expected what another rank wrote, found {data[:60]!r}") from exception


class Loan(NamedTuple):
    """A copied region of `step` that `rank` has not written, or has lost, and that `donor` has: it is the same on all ranks."""

    rank: int
    name: str
    step: int
    donor: int


@dataclasses.dataclass(frozen=True)
class Plan:
    """action; target: the step that is committed next. first: per rank, how many chunks of the order are already in place.

    intent: the record that every rank rolls forward with. copy_to: ranks that lack it. done: ranks that have committed `target` already.
    unknown_metrics: ranks on which the metrics of the commit that the plan leads to are gone, and on all others too; the state does not depend
    on them. loans: what ranks take from others before anything else.
    """

    action: Action
    reason: str
    target: int = 0
    first: tuple[int, ...] = ()
    intent: Record | None = None
    copy_to: tuple[int, ...] = ()
    done: tuple[int, ...] = ()
    unknown_metrics: tuple[int, ...] = ()
    loans: tuple[Loan, ...] = ()


def plan(pictures: Sequence[Picture], order) -> Plan:
    """Decides for all ranks of a job at once. `order(step)` gives the chunk indices in the order of update `step`."""
    if any(picture.life is not Life.LIVE for picture in pictures):
        for rank, picture in enumerate(pictures):
            if picture.life is Life.EMPTY and picture.log.commit is not None:
                return _refuse(f"rank {rank}: no valid record says what the arenas hold, but the log shows commit {picture.log.commit}")
            if picture.life is Life.LIVE and len(picture.log.commits) > 1:  # all ranks are filled before one of them trains
                blank = next(other for other, its in enumerate(pictures) if its.life is not Life.LIVE)
                return _refuse(
                    f"rank {rank} has trained to commit {picture.log.commit}, but the arenas of rank {blank} are {pictures[blank].life.name}"
                )
        lives = ", ".join(f"rank {rank} {picture.life.name}" for rank, picture in enumerate(pictures))
        return Plan(Action.FILL, f"the arenas were never completely filled ({lives})")
    commits = []
    for rank, picture in enumerate(pictures):
        if picture.log_lost:
            return _refuse(f"rank {rank}: both log copies have lost pages")
        if picture.log.commit is None:
            return _refuse(f"no valid commit record in either log copy of rank {rank}")
        commits.append(picture.log.commit)
    low, high = min(commits), max(commits)
    if high - low > 1:
        return _refuse(f"ranks are {high - low} steps apart: commits {commits}")
    target = low + 1
    for rank, picture in enumerate(pictures):
        for record in picture.log.intents | picture.log.marks:
            if record.step > target:
                return _refuse(f"rank {rank}: the log shows {record.kind.name} {record.step}, but no more than commit {low} everywhere")

    intents = {record for picture in pictures for record in picture.log.intents if record.step == target and not _revoked(record, pictures)}
    marks = [[mark for mark in picture.log.marks if mark.step == target] for picture in pictures]
    done = tuple(rank for rank, commit in enumerate(commits) if commit == target)
    if len(intents) > 1:
        return _refuse(f"{len(intents)} different intents for step {target}")
    if not intents:
        if any(marks) or done:
            who = next((rank for rank, found in enumerate(marks) if found), *done[:1])
            return _refuse(f"rank {who} has begun update {target}, but no rank shows its intent")
        return _from_commit(pictures, Plan(Action.REDO, f"commit {low} on all ranks, no intent for step {target}", target))

    (intent,) = intents
    first, unknown, problem = [], [], ""
    loans: list[Loan] = []
    for rank, picture in enumerate(pictures):
        damaged = _damaged(pictures, rank, target, intent.body[:3], loans)
        if needed := [name for name in damaged if name != "metrics"]:
            problem = problem or f"rank {rank}: {' and '.join(needed)} of step {target} do not match the intent's digest"
        elif damaged:
            unknown.append(rank)
        if rank in done:
            first.append(len(order(target)))
            continue
        strange = [mark for mark in marks[rank] if mark.body[0] != intent.crc]
        if strange:
            return _refuse(f"rank {rank}: the mark of chunk {strange[0].index}, step {target}, names another intent")
        marked = {mark.index for mark in marks[rank]}
        prefix = 0
        for index in order(target):
            if index not in marked:
                break
            prefix += 1
        if prefix != len(marked):
            return _refuse(f"rank {rank}: marks of step {target} have a hole: {sorted(marked)}")
        first.append(prefix)
        pending = list(order(target))[prefix:]
        if pending and picture.stored != (target, intent.epoch):
            problem = problem or f"rank {rank}: gradients are of {picture.stored}, the intent of {(target, intent.epoch)}"
        if hurt := picture.bad_gradients.intersection(pending):
            problem = problem or f"rank {rank}: gradients of chunk {min(hurt)} are lost"
    begun = any(first) or bool(done)
    if unknown and not begun:  # worth computing again, not worth giving up
        problem = problem or f"rank {unknown[0]}: metrics of step {target} do not match the intent's digest"
    if problem and begun:
        return _refuse(f"{problem}, and a part of update {target} is already in place")
    if problem:
        return _from_commit(pictures, Plan(Action.REVOKE, f"{problem}; nothing of update {target} is in place", target, intent=intent))
    lacking = tuple(rank for rank, picture in enumerate(pictures) if rank not in done and intent not in picture.log.intents)
    return Plan(
        Action.ROLL_FORWARD,
        f"intent for step {target}, {', '.join(str(n) for n in first)} of {len(order(target))} chunks marked",
        target,
        tuple(first),
        intent,
        lacking,
        done,
        tuple(unknown),
        tuple(loans),
    )


def _from_commit(pictures: Sequence[Picture], plan: Plan) -> Plan:
    """`plan`, which computes again from the commit before its target, if what that reads is whole on all ranks."""
    commit, unknown = plan.target - 1, []
    loans: list[Loan] = []
    for rank, picture in enumerate(pictures):
        digest = next(record.body[1:4] for record in picture.log.commits if record.step == commit)
        damaged = _damaged(pictures, rank, commit, digest, loans)
        if needed := [name for name in damaged if name != "metrics"]:
            return _refuse(f"{plan.reason}; rank {rank}: {' and '.join(needed)} of commit {commit} are lost and kept nowhere else")
        if damaged:
            unknown.append(rank)
    return dataclasses.replace(plan, unknown_metrics=tuple(unknown), loans=tuple(loans))


def _damaged(pictures: Sequence[Picture], rank: int, step: int, digest: tuple[int, ...], loans: list[Loan]) -> list[str]:
    """Which of the copied regions of `step` do not read on `rank` as they did when `digest` was taken, and on no other rank either.

    What another rank has is added to `loans`.
    """
    unknown, lost = (None,) * len(COPIED), []
    for place, (name, wanted) in enumerate(zip(COPIED, digest, strict=True)):
        having = [peer for peer, picture in enumerate(pictures) if picture.digests.get(step, unknown)[place] == wanted]
        if rank in having:
            continue
        if having:
            loans.append(Loan(rank, name, step, having[0]))
        else:
            lost.append(name)
    return lost


def _order(record: Record) -> tuple[int, int, int]:
    return record.step, record.epoch, record.index


def _record(data: bytes, kind: Kind) -> Record:
    found = records.unpack(data, kind)
    if found is None:
        raise ValueError("not a record")
    return found


def _revoked(intent: Record, pictures: Sequence[Picture]) -> bool:
    return any(revoke.step == intent.step and revoke.epoch > intent.epoch for picture in pictures for revoke in picture.log.revokes)


def _refuse(reason: str) -> Plan:
    return Plan(Action.REFUSE, reason)
