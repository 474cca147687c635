"""`leto report`: where the wall time of a job went, and what each takeover took; from the journal alone.

All wall time is booked under exactly one `Cause`, in integer nanoseconds, so the causes add up to it:

    wall                from the first `start` of the run to its last event, times without an agent included
    productive          inside `s.step` of steps that were kept, each at most as long as a plain one where it was the first of a process
    goodput             productive / wall: the time in which the model was trained
    ettr                (productive + body_and_data) / wall: effective training time ratio. As in MegaScale's definition (NSDI '24),
                        iterations times the length of an iteration over total time; its batch and its loop body belong to an iteration.
                        So 1 - ettr is what starting, failing and recovering cost; ettr * wall_secs / steps is the length of an iteration.
    coverage            share of the time in the training loop in which the parity on the host was that of the last commit
    peer_coverage       the same of the parity with the peer

Starting counts against both ratios: a restart that is slow to start must not look good. The overhead of protection inside a step counts
against neither, since a journal cannot tell it; `experiments/` measures it against plain JAX.

A journal of several agent lifetimes (the agent died, or gave up and was started again) is one run until a lifetime that ended on purpose is
followed by one that finds no retained state: then the newer run alone is reported. Of a running job the report ends with its last event.
With several ranks rank 0 is booked, and the failures of all: each replaces all trainers.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from leto_jax import errors
from leto_jax.config import state_root
from leto_jax.goodput import journal
from leto_jax.manager.runtime import check_job_name

Event = Mapping[str, Any]
FIELDS = journal.EVENTS
OF_ALL_RANKS = ("failure", "fence", "takeover")  # their rank is the one that failed
TAKEOVER_KEYS = (
    "rank",
    "kind",
    "phase",
    "step",
    "takeover_secs",
    "detect_secs",
    "stages",
    "lost_steps",
    "compiles",
    "path",
    "level",
    "plain_step_secs",
)
BAR_CELLS = 60


class Cause(enum.StrEnum):
    """What wall time was spent on: a closed set. In brackets the name that ml-goodput-measurement has for it."""

    PRODUCTIVE = "productive"
    INITIALISATION = (
        "initialisation"  # start, import, trace, compile or load, fill; of a cold attach too [TPU_INITIALIZATION, TRAINING_PREP]
    )
    DETECTION = "detection"  # from the failure until the agent knows of it
    FENCE = "fence"  # until every old process is dead and reaped
    ATTACH = "attach"  # decision, promotion, mapping, data position, until the first step begins [INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION]
    RESTORE = "restore"  # reading the newest copy of the state, where it does not outlive its trainer [CHECKPOINT_RESTORE]
    CHECKPOINT_STALL = "checkpoint_stall"  # training stood still while a copy was taken [UNPRODUCTIVE_CHECKPOINT_SAVE]
    ROLL_FORWARD = (
        "roll_forward"  # verifying, repairing pages, finishing the interrupted update, encoding parity; a step's way to its second try
    )
    RECOMPUTED_STEPS = "recomputed_steps"  # work that was done again [WASTED_PROGRESS_FROM_DISRUPTION]
    FIRST_STEP_OVERHEAD = "first_step_overhead"  # first step of a process beyond a plain one [PROGRAM_STARTUP]
    BODY_AND_DATA = "body_and_data"  # between two steps: loop body, sections, next batch [DATA_LOADING_SYNC, CUSTOM_BADPUT_EVENTS]
    OUTAGE = "outage"  # no agent: from the last event of one lifetime to the start of the next
    SHUTDOWN = "shutdown"  # after the last step, or after the agent gave up
    OTHER = "other"  # a trainer ran, but nobody wrote down what it did


class Ledger(NamedTuple):
    """One run, booked. `spent_ns` has every cause and adds up to `wall_ns` exactly. `coverage` is None before any trainer has reported,
    `peer_coverage` where there is no peer."""

    job: str
    wall_ns: int
    spent_ns: dict[Cause, int]
    steps: int
    coverage: float | None
    peer_coverage: float | None = None


def takeover_secs(takeover: Mapping[str, Any], plain_step_secs: float) -> float:
    """How long a takeover took, with another plain step taken off than the one of the run itself, whose steps share the machine with shadows."""
    return float(takeover["takeover_secs"] + takeover["plain_step_secs"] - plain_step_secs)


def summarise(events: Sequence[Event]) -> dict[str, Any]:
    """The report of a job as plain JSON values: `job`, `steps`, `wall_secs`, `takeovers`, `goodput`, `ettr`, `badput_secs`, `coverage`,
    `peer_coverage`.

    steps: committed in this run and kept. takeovers: finished ones, oldest first, with `TAKEOVER_KEYS`. badput_secs: seconds by cause;
    `productive` is among them, so that they add up to `wall_secs`.

    Raises JobError without a `start` event, RecordError for an event that lacks a field.
    """
    ledger = book(events)
    spent, wall = ledger.spent_ns, ledger.wall_ns or 1
    return {
        "job": ledger.job,
        "steps": ledger.steps,
        "wall_secs": ledger.wall_ns / 1e9,
        "takeovers": [{key: event[key] for key in TAKEOVER_KEYS} for event in _flat(_newest_run(events)) if event["event"] == "takeover"],
        "goodput": spent[Cause.PRODUCTIVE] / wall,
        "ettr": (spent[Cause.PRODUCTIVE] + spent[Cause.BODY_AND_DATA]) / wall,
        "badput_secs": {cause.value: ns / 1e9 for cause, ns in spent.items()},
        "coverage": ledger.coverage,
        "peer_coverage": ledger.peer_coverage,
    }


def journal_of(job: str | None) -> Path:
    """The journal of a job, or the newest one. Raises JobError if there is none, UsageError for what cannot be a job's name."""
    root = state_root()
    if job is not None:
        return root / check_job_name(job) / "journal.jsonl"
    found = sorted(root.glob("*/journal.jsonl"), key=lambda path: path.stat().st_mtime_ns)
    if not found:
        raise errors.JobError(f"report: expected the journal of a job under {root}, found none; `leto run` writes one")
    return found[-1]


def load(job: str | None) -> dict[str, Any]:
    """The report of a job, or of the one whose journal is newest.

    Raises JobError if there is none, UsageError for what cannot be a job's name, RecordError for a damaged journal.
    """
    return summarise(journal.read(journal_of(job)))


def newest_events(events: Sequence[Event]) -> list[Event]:
    """Those of the run that is reported, oldest first."""
    return _flat(_newest_run(events))


# Booking ----------------------------------------------------------------------------------------------------------------------------


def book(events: Sequence[Event]) -> Ledger:
    """Books the newest run of a journal. See the head of this file for what the numbers mean, `summarise` for the errors."""
    _check(events)
    lifetimes = _newest_run(events)
    books = _Books(_typical_step_ns(lifetimes))
    wall, before = 0, None
    for lifetime in lifetimes:
        if before is not None:
            # CLOCK_MONOTONIC starts again with each boot, so between lifetimes the time of day has to do.
            gap = max(0, round((lifetime[0]["time"] - before["time"]) * 1e9))
            books.spent[Cause.OUTAGE] += gap
            wall += gap
        wall += books.live(lifetime)
        before = lifetime[-1]
    share = lambda stale, watched: 1 - stale / watched if watched else None
    covered = share(books.stale, books.watched), share(books.peer_stale, books.peer_watched)
    return Ledger(lifetimes[0][0]["job"], wall, {cause: books.spent[cause] for cause in Cause}, books.steps, *covered)


def _check(events: Iterable[Any]) -> None:
    for number, event in enumerate(events, 1):
        found = set(event) if isinstance(event, Mapping) else set()
        name = event.get("event") if found else None
        missing = [field for field in ("event", "time", "ns", *FIELDS.get(str(name), ())) if field not in found]
        if missing:
            raise errors.RecordError(
                f"journal, event {number} ({name}): expected the field {missing[0]!r}, found none; damaged, or written by another version"
            )


def _newest_run(events: Sequence[Event]) -> list[list[Event]]:
    """The lifetimes of the newest run, each a list of events that begins with `start`."""
    run: list[list[Event]] = []
    for event in events:
        if event["event"] == "start":
            if run and not event["attached"] and run[-1][-1]["event"] == "finish":
                run = []
            run.append([])
        if run:
            run[-1].append(event)
    if not run:
        raise errors.JobError(
            f"report: expected a journal with a `start` event, found {len(events)} events and none; the job has not begun"
        )
    return run


def _flat(lifetimes: Iterable[Iterable[Event]]) -> list[Event]:
    return [event for lifetime in lifetimes for event in lifetime]


def _ns(secs: float) -> int:
    return max(0, round(secs * 1e9))


def _first_step_secs(event: Event) -> float:
    return event["secs"] if event["event"] == "first_step" else event["stages"].get("first_step", 0.0)


def _records(lifetime: Iterable[Event]) -> dict[int, Event]:
    """By incarnation, the last that is known of what a trainer did in its loop."""
    return {event["incarnation"]: event for event in lifetime if event["event"] in ("progress", "ended") and event["rank"] == 0}


def _typical_step_ns(lifetimes: Iterable[Sequence[Event]]) -> int:
    """Mean length of the steps of a run that were not the first of their process; 0 if there are none."""
    total, count = 0, 0
    for lifetime in lifetimes:
        records = _records(lifetime)
        for event in lifetime:
            if event["event"] != "takeover" and (event["event"] != "first_step" or event["rank"] != 0):
                continue
            record = records.get(event["incarnation"])
            if record is not None and record["steps"] > 1:
                total += max(0, _ns(record["step_secs"]) - _ns(_first_step_secs(event)))
                count += record["steps"] - 1
    return total // count if count else 0


@dataclasses.dataclass
class _Loop:
    """A trainer that has finished its first step, which led from commit `before` to the next.

    first_ns: length of that step. plain_ns: of a plain one, 0 if it is not known.
    """

    incarnation: int
    before: int
    first_ns: int
    plain_ns: int


@dataclasses.dataclass
class _Kept:
    """Steps before+1 .. last, and what they took."""

    before: int
    last: int
    productive_ns: int
    body_ns: int


class _Books:
    """Walks along the events of a run. What lies between the cursor and the next event is booked once, so nothing is missing or double."""

    def __init__(self, typical_step_ns: int):
        self.spent: Counter[Cause] = Counter()
        self.stale = self.watched = self.peer_stale = self.peer_watched = 0
        self._typical = typical_step_ns
        self._kept: list[_Kept] = []
        self._base: int | None = None
        self._reached = 0
        self._cursor = 0
        self._begin()

    def _begin(self) -> None:
        """State of one lifetime.

        waiting: on what time passes while no trainer is in its loop. interrupted: booked work of a step that was cut off.
        """
        self._waiting = Cause.INITIALISATION
        self._loop: _Loop | None = None
        self._interrupted = 0
        self._spawned = False
        self._stalled = self._retried = 0
        self._exit_ns: int | None = None

    @property
    def steps(self) -> int:
        return self._reached - (self._base or 0)

    def live(self, lifetime: Sequence[Event]) -> int:
        """Books one lifetime of the agent; returns its length."""
        self._begin()
        self._records = _records(lifetime)
        begin = self._cursor = lifetime[0]["ns"]
        for event in lifetime[1:]:
            handle = getattr(self, f"_on_{event['event']}", None)
            if handle is not None and (event.get("rank", 0) == 0 or event["event"] in OF_ALL_RANKS):
                handle(event)
        self._pause(lifetime[-1]["ns"])
        return self._cursor - begin

    def _pass(self, until: int, rest: Cause, *parts: tuple[Cause, int]) -> Counter[Cause]:
        """Books the time from the cursor to `until`: each part as long as it lasts, the remainder under `rest`. Returns what it booked."""
        left, booked = max(0, until - self._cursor), Counter[Cause]()
        for cause, ns in parts:
            taken = min(max(0, ns), left)
            booked[cause] += taken
            left -= taken
        booked[rest] += left
        self.spent.update(booked)
        self._cursor = max(self._cursor, until)
        return booked

    def _pause(self, until: int, lost: int = 0) -> int:
        """Time up to `until`, whatever went on; `lost` of it inside a step that was cut off. Returns what was booked for that step."""
        if self._loop is not None:
            return self._leave(self._loop, until, lost)
        return self._pass(until, self._waiting, (Cause.RECOMPUTED_STEPS, lost))[Cause.RECOMPUTED_STEPS]

    def _leave(self, loop: _Loop, until: int, lost: int) -> int:
        """A trainer leaves its loop, in which it was since the cursor."""
        self._loop, self._waiting = None, Cause.SHUTDOWN
        begin, record = self._cursor, self._records.get(loop.incarnation)
        steps, step_ns, known = 1, loop.first_ns, min(until, begin + loop.first_ns)
        if record is not None:
            steps, step_ns = max(1, record["steps"]), max(loop.first_ns, _ns(record["step_secs"]))
            known = until if record["event"] == "ended" else min(until, max(known, record["ns"]))
        useful = min(loop.first_ns, loop.plain_ns or self._typical or loop.first_ns)
        booked = self._pass(
            known,
            Cause.BODY_AND_DATA,
            (Cause.PRODUCTIVE, useful),
            (Cause.FIRST_STEP_OVERHEAD, loop.first_ns - useful),
            (Cause.PRODUCTIVE, step_ns - loop.first_ns),
            (Cause.RECOMPUTED_STEPS, lost),
            (Cause.CHECKPOINT_STALL, self._stalled),
            (Cause.ROLL_FORWARD, self._retried),
        )
        self._stalled = self._retried = 0
        if record is not None:
            self.watched += known - begin
            self.stale += max(0, min(known - begin, _ns(record["stale_secs"])))
            if record["peer_stale_secs"] is not None:
                self.peer_watched += known - begin
                self.peer_stale += max(0, min(known - begin, _ns(record["peer_stale_secs"])))
        self._pass(until, Cause.OTHER)
        self._reached = loop.before + steps
        self._kept.append(_Kept(loop.before, self._reached, booked[Cause.PRODUCTIVE], booked[Cause.BODY_AND_DATA]))
        return booked[Cause.RECOMPUTED_STEPS]

    def _move(self, source: Cause, target: Cause, ns: int) -> None:
        self.spent[source] -= ns
        self.spent[target] += ns

    def _rewind(self, commit: int) -> None:
        """Steps after `commit` are lost: they were work for nothing."""
        for kept in self._kept:
            lost = kept.last - max(kept.before, commit)
            if lost > 0:
                productive, body = (ns * lost // (kept.last - kept.before) for ns in (kept.productive_ns, kept.body_ns))
                self._move(Cause.PRODUCTIVE, Cause.RECOMPUTED_STEPS, productive)
                self._move(Cause.BODY_AND_DATA, Cause.RECOMPUTED_STEPS, body)
                kept.last, kept.productive_ns, kept.body_ns = kept.last - lost, kept.productive_ns - productive, kept.body_ns - body
        self._kept = [kept for kept in self._kept if kept.last > kept.before]

    # One method per event that says something about time; all others pass.

    def _wait_on(self, event: Event, cause: Cause) -> None:
        """No trainer is in its loop; from this event on, time passes on `cause`."""
        if self._loop is None:
            self._pass(event["ns"], self._waiting)
        self._waiting = cause

    def _on_spawn(self, event: Event) -> None:
        if event["role"] == "trainer":
            self._wait_on(event, Cause.INITIALISATION)
            self._spawned = True

    def _on_failure(self, event: Event) -> None:
        # Written once the agent has noticed. So the failure lies detect_secs before, also for a hang, whose failed_ns is its detection.
        onset = event["ns"] - _ns(event["detect_secs"])
        armed = event["failed_ns"] - _ns(event["lost_step_secs"])
        self._interrupted += self._pause(onset, onset - armed if event["lost_step_secs"] > 0 else 0)
        self._pass(event["ns"], Cause.DETECTION)
        self._waiting, self._spawned = Cause.FENCE, False

    def _on_fence(self, event: Event) -> None:
        self._pass(event["ns"], Cause.FENCE)
        self._waiting = Cause.ATTACH

    def _on_decision(self, event: Event) -> None:
        waiting = {"promote": Cause.ATTACH, "wait": Cause.INITIALISATION, "stop": Cause.SHUTDOWN}.get(event["action"])
        if waiting is not None and not self._spawned:  # else a promotion failed, and a new trainer is on its way
            self._wait_on(event, waiting)

    def _on_attached(self, event: Event) -> None:
        commit, stages, fill = event["commit"], event["stages"], event["action"] == "fill"
        rolled = 0 if fill else _ns(stages.get("verify", 0.0)) + _ns(stages.get("roll_forward", 0.0))
        data = 0 if fill else _ns(stages.get("data", 0.0))
        restored = 0 if fill else _ns(stages.get("restore", 0.0))
        self._pass(event["ns"], self._waiting, (Cause.ROLL_FORWARD, rolled), (Cause.ATTACH, data), (Cause.RESTORE, restored))
        self._waiting = Cause.INITIALISATION if fill else Cause.ATTACH
        if commit < self._reached:
            self._rewind(commit)
        elif commit > self._reached and self._interrupted:
            # The step that was cut off was finished from what it had left behind: its work was not lost.
            saved = min(self._interrupted, self._typical or self._interrupted)
            self._move(Cause.RECOMPUTED_STEPS, Cause.PRODUCTIVE, saved)
            self._kept.append(_Kept(commit - 1, commit, saved, 0))
        self._base = commit if self._base is None else min(self._base, commit)
        self._reached, self._interrupted = commit, 0

    def _on_saved(self, event: Event) -> None:
        self._stalled += _ns(event["stall_secs"])

    def _on_retried(self, event: Event) -> None:
        if self._loop is not None:  # else no step was finished yet, and all of it is time on the way there
            self._retried += _ns(event["secs"])

    def _on_first_step(self, event: Event) -> None:
        if self._loop is not None and self._loop.incarnation == event["incarnation"]:
            return  # it is in its loop, and has now done again what was lost
        self._pass(event["ns"] - _ns(_first_step_secs(event)), self._waiting)
        first_ns, self._exit_ns = max(0, event["ns"] - self._cursor), None
        self._loop = _Loop(event["incarnation"], event["commit"] - 1, first_ns, _ns(event.get("plain_step_secs", 0.0)))

    _on_takeover = _on_first_step

    def _on_done(self, event: Event) -> None:
        self._pause(event["ns"])
        self._waiting = Cause.SHUTDOWN

    def _on_ended(self, event: Event) -> None:
        self._exit_ns = event["ns"]  # a failure may follow at once, which says more

    def _on_finish(self, event: Event) -> None:
        if self._loop is not None and self._exit_ns is not None:
            self._pause(self._exit_ns)
        self._pause(event["ns"])


# Tables -----------------------------------------------------------------------------------------------------------------------------


def show(report: Mapping[str, Any], console: Any = None) -> None:
    """Prints a report: summary, wall time by cause, takeovers with their stages."""
    from rich.console import Console
    from rich.table import Table

    console = console or Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    takeovers, spent, wall = report["takeovers"], report["badput_secs"], report["wall_secs"]
    summary = Table(title=f"job {report['job']}", title_justify="left", show_header=False)
    summary.add_column("")
    summary.add_column("", justify="right")
    summary.add_column("")
    for name, value, meaning in [
        ("steps", str(report["steps"]), "committed and kept"),
        ("wall time", f"{wall:.1f} s", "from the first start to the last event"),
        ("goodput", f"{report['goodput']:.2%}", "time inside kept steps / wall time"),
        ("ETTR", f"{report['ettr']:.2%}", "the same, loop body and data included"),
        ("takeovers", str(len(takeovers)), f"{sum(item['takeover_secs'] for item in takeovers):.3f} s in all"),
        ("parity coverage", "-" if report["coverage"] is None else f"{report['coverage']:.2%}", "of the time in the loop"),
        *([] if report["peer_coverage"] is None else [("the same with the peer", f"{report['peer_coverage']:.2%}", "")]),
    ]:
        summary.add_row(name, value, meaning)
    console.print(summary)
    causes = Table(title="wall time by cause", title_justify="left")
    for column in ("cause", "seconds", "%"):
        causes.add_column(column, justify="left" if column == "cause" else "right")
    for cause, secs in sorted(spent.items(), key=lambda item: (item[0] != Cause.PRODUCTIVE, -item[1])):
        if secs > 0:
            causes.add_row(cause, f"{secs:.3f}", f"{100 * secs / wall:.2f}")
    causes.add_row("all", f"{wall:.3f}", "100.00", style="bold")
    console.print(causes)
    if not takeovers:
        return
    table = Table(title="takeovers", title_justify="left")
    for column in ("", "rank", "kind", "phase", "after commit", "path", "level", "detect s", "takeover s", "lost steps", "compiles"):
        table.add_column(column, justify="left" if column in ("kind", "phase", "path") else "right")
    for number, item in enumerate(takeovers, 1):
        seconds = (f"{item['detect_secs']:.3f}", f"{item['takeover_secs']:.3f}")
        row = (
            str(item["rank"]),
            item["kind"],
            item["phase"],
            str(item["step"]),
            item["path"],
            str(item["level"]),
            *seconds,
            str(item["lost_steps"]),
            str(item["compiles"]),
        )
        table.add_row(str(number), *row)
    console.print(table)
    cell = max(max(item["takeover_secs"] for item in takeovers), 0.001) / BAR_CELLS
    for number, item in enumerate(takeovers, 1):
        console.print(f"{number:>3} |{bar(item, cell)}| {item['takeover_secs']:.3f} s", markup=False)
    legend = ", ".join(f"{letter} {words}" for letter, words in LETTERS.values())
    console.print(f"    one letter: {cell:.3f} s, at least one for each stage; {legend}", markup=False)


LETTERS = {
    "detect": ("D", "detect"),
    "fence": ("F", "fence"),
    "start": ("P", "a new process starts"),
    "unpark": ("K", "the GPU state of a parked shadow comes back"),
    "rise": ("U", "what a shadow below level 3 has left to do"),
    "attach": ("A", "attach"),
    "restore": ("C", "restore a copy"),
    "verify": ("V", "verify"),
    "roll_forward": ("R", "roll forward"),
    "data": ("B", "batches"),
    "recompute": ("W", "steps that are computed again"),
    "body": ("L", "loop body of the replayed step"),
    "rest": ("S", "first step beyond a plain one, and what no stage covers"),
}


def bar(takeover: Mapping[str, Any], secs_per_cell: float) -> str:
    """The stages of a takeover in their order, as letters (`LETTERS`); about `takeover_secs` long in all.

    What the measured stages leave over is mostly the start of a process where no ready shadow took over, else the first step.
    """
    stages = {name: secs for name, secs in takeover["stages"].items() if name in LETTERS}
    stages["rest" if takeover["path"] == "shadow" else "start"] = takeover["takeover_secs"] - sum(stages.values())
    return "".join(LETTERS[name][0] * max(1, round(secs / secs_per_cell)) for name in LETTERS if (secs := stages.get(name, 0.0)) > 0)
