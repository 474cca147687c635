"""Fence = death: every process of an incarnation is dead before another one may touch what it wrote.

A process belongs to an incarnation if it is one of the given ones, descends from one (by parent, process group or session), or carries the
incarnation's token in its environment: a worker that called setsid and lost its parent still does. Standard library only; the state manager
uses it when the agent dies, the agent when a trainer does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

from leto_jax.errors import UsageError

TOKEN_VARIABLE = "LETO_TOKEN"
_MIN_TOKEN_CHARS = 8
_FREEZE_LOOKS = 4
_LOOK_SECS = 0.02
_MAX_WATCHED = 256
_STAT_BYTES = 4096
_ENVIRON_BYTES = 256 * 1024
_MAX_BYTES = 4 * 1024 * 1024
_NAMELESS_SECS = 2.0
_SETTLE_SECS = 0.2
_PF_KTHREAD = 0x00200000


class ProcessId(NamedTuple):
    """A process that no later one can be mistaken for: `start` is in clock ticks since boot (field 22 of /proc/PID/stat)."""

    pid: int
    start: int


class Remaining(NamedTuple):
    """A process that could not be killed: its state letter and the kernel function it sleeps in ("0" if that is hidden)."""

    pid: int
    state: str
    wchan: str
    command: str


class FenceReport(NamedTuple):
    """`killed`: found alive and dead now. `remaining`: still alive at the deadline; then the device is not operable."""

    killed: tuple[int, ...]
    remaining: tuple[Remaining, ...]
    elapsed_secs: float


class _Process(NamedTuple):
    """flags: PF_* of the kernel. address_space: bytes; 0 for a process that is giving it up, and for kernel threads."""

    pid: int
    start: int
    ppid: int
    pgrp: int
    session: int
    flags: int
    address_space: int
    state: str
    command: str

    @property
    def id(self) -> ProcessId:
        return ProcessId(self.pid, self.start)


def check_token(token: str) -> str:
    """The token itself, if it can identify an incarnation; `UsageError` otherwise."""
    if not isinstance(token, str) or len(token) < _MIN_TOKEN_CHARS or not token.isprintable():
        raise UsageError(f"a token is a printable string of at least {_MIN_TOKEN_CHARS} characters, found {token!r}")
    return token


def _read(path: str, nbytes: int) -> bytes:
    """A file of /proc; a takeover waits for this, and `open` costs three times as much."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = piece = os.read(fd, nbytes)
        while len(piece) == nbytes and len(text) < _MAX_BYTES:
            piece = os.read(fd, nbytes)
            text += piece
        return text
    finally:
        os.close(fd)


def _read_process(pid: int) -> _Process | None:
    try:
        text = _read(f"/proc/{pid}/stat", _STAT_BYTES)
    except OSError:
        return None
    before, _, after = text.rpartition(b")")  # the command may contain spaces and parentheses
    fields = after.split()
    if len(fields) < 21:
        return None
    command = before.partition(b"(")[2].decode(errors="replace")
    ppid, pgrp, session, flags, start, address_space = (int(fields[index]) for index in (1, 2, 3, 6, 19, 20))
    return _Process(pid, start, ppid, pgrp, session, flags, address_space, fields[0].decode(), command)


def process_id(pid: int) -> ProcessId | None:
    """Identity of the process with this number now (a zombie counts); None if there is none."""
    process = _read_process(pid)
    return None if process is None else process.id


def is_dead(identity: ProcessId) -> bool:
    """Whether exactly this process is dead: gone, or a zombie without a living thread."""
    process = _read_process(identity.pid)
    return process is None or process.start != identity.start or not _lives(process)


def _lives(process: _Process) -> bool:
    if process.state not in "ZX":
        return True
    # The first thread may be a zombie while others still run: then memory is still mapped and can still be written.
    try:
        return len(os.listdir(f"/proc/{process.pid}/task")) > 1
    except OSError:
        return False


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _carries_token(process: _Process, entries: frozenset[bytes], uid: int) -> bool | None:
    """Whether one of `entries` is in its environment; None if it shows none, since it is dead or dying (or has an empty one)."""
    directory = f"/proc/{process.pid}"
    try:
        if process.flags & _PF_KTHREAD or os.stat(directory).st_uid != uid:
            return False
        directories = [directory]
        if process.state in "ZX":  # the first thread is dead and shows no environment: ask those that live
            directories = [f"{directory}/task/{task}" for task in os.listdir(f"{directory}/task") if task != str(process.pid)]
        shown = None
        for directory in directories:
            environ = _read(f"{directory}/environ", _ENVIRON_BYTES)
            if not entries.isdisjoint(environ.split(b"\0")):
                return True
            shown = False if environ else shown
        return shown
    except PermissionError:
        return False
    except OSError:
        return None


def _is_nameless(process: _Process, uid: int) -> bool:
    """Whether this is a dying process of this user that has given up its address space, and its environment with it."""
    if process.address_space or process.flags & _PF_KTHREAD or not _lives(process):
        return False
    try:
        return os.stat(f"/proc/{process.pid}").st_uid == uid
    except OSError:
        return False


def _signal(identity: ProcessId, number: int) -> None:
    """Signals exactly this process: the pidfd pins it, the start time read after that says that it is the right one."""
    with contextlib.suppress(OSError):  # gone, or not ours to signal: the next look tells
        fd = os.pidfd_open(identity.pid)
        try:
            if process_id(identity.pid) == identity:
                signal.pidfd_send_signal(fd, number)
        finally:
            os.close(fd)


class Fence:
    """The work of `fence` in steps, for a caller that has to answer others meanwhile. It is done when `step` returns a report."""

    def __init__(self, token: str | Collection[str], pids: Iterable[int | ProcessId], deadline_secs: float = 10.0) -> None:
        tokens = [token] if isinstance(token, str) else list(token)
        self._entries = frozenset(f"{TOKEN_VARIABLE}={check_token(item)}".encode() for item in tokens)
        self._uid = os.geteuid()
        self._begin = time.monotonic()
        self._deadline = self._begin + deadline_secs
        self._spared = self._own_line()
        self._members: dict[int, int] = {}
        for item in pids:
            identity = item if isinstance(item, ProcessId) else process_id(item) or ProcessId(item, -1)
            if identity.pid > 1 and identity.pid not in self._spared:
                self._members[identity.pid] = identity.start
        self._seen_alive: dict[ProcessId, None] = {}
        self._alive: list[_Process] = []
        self._nameless: list[ProcessId] | None = None
        self._struck = False

    @staticmethod
    def _own_line() -> frozenset[int]:
        """This process and its ancestors: never killed, whatever token they carry."""
        line = {1}
        pid = os.getpid()
        while pid > 1 and pid not in line:
            line.add(pid)
            process = _read_process(pid)
            pid = process.ppid if process is not None else 0
        return frozenset(line)

    def _visit_all(self) -> tuple[dict[int, _Process], set[int]]:
        """Every process there is, and the numbers of those that carry the token.

        A listing is not a picture of one moment: a process that it names can fork and die before it is read, and its child is in no listing
        yet. So new numbers are visited until all that a listing brought could be read: then no carrier of the token has slipped by.
        """
        processes: dict[int, _Process] = {}
        carriers: set[int] = set()
        seen: set[int] = set()
        until = time.monotonic() + _SETTLE_SECS
        while True:
            slipped = False
            for pid in _pids():
                if pid in seen:
                    continue
                seen.add(pid)
                process = _read_process(pid)
                if process is None:
                    slipped = True
                    continue
                processes[pid] = process
                if self._entries and pid not in self._spared:
                    carries = _carries_token(process, self._entries, self._uid)
                    if carries:
                        carriers.add(pid)
                    slipped |= carries is None
            if not slipped or time.monotonic() >= until:
                return processes, carriers

    def _look(self) -> list[_Process]:
        """One look at /proc: takes in every process that belongs to the incarnation, returns those that live."""
        processes, carriers = self._visit_all()
        # A number is not given out again while its process, group or session exists. So a number that now belongs to another process says
        # nothing about groups of that number; one that belongs to no process can still name the group that its leader left behind.
        ours = {pid for pid, start in self._members.items() if pid not in processes or processes[pid].start == start} | carriers
        candidates = [process for pid, process in processes.items() if pid not in self._spared]
        grown = True
        while grown:
            grown = False
            for process in candidates:
                if process.pid not in ours and (process.ppid in ours or process.pgrp in ours or process.session in ours):
                    ours.add(process.pid)
                    grown = True
        members = [process for process in candidates if process.pid in ours]
        for process in members:
            self._members[process.pid] = process.start
        self._alive = [process for process in members if _lives(process)]
        self._seen_alive.update((process.id, None) for process in self._alive)
        if self._nameless is None:
            # Dying since before we came: nothing tells any more whose it was, and it may still hold a device. So it is waited for.
            others = [process for process in candidates if process.pid not in ours]
            self._nameless = [process.id for process in others if _is_nameless(process, self._uid)]
        return self._alive

    def _waits_for_nameless(self) -> bool:
        self._nameless = [identity for identity in self._nameless or [] if not is_dead(identity)]
        return bool(self._nameless) and time.monotonic() < self._begin + _NAMELESS_SECS

    def step(self) -> FenceReport | None:
        """Looks, kills what lives, and returns the report when nothing does (seen twice) or the time is over; else None: call again.

        *Cost*: two to three looks at /proc (a few ms per hundred processes), no waiting.
        """
        alive = self._look()
        if alive and not self._struck:
            # Frozen processes cannot fork: otherwise a child born between look and kill could lose its parent unseen.
            frozen: set[ProcessId] = set()
            for _ in range(_FREEZE_LOOKS):
                fresh = [process.id for process in alive if process.id not in frozen]
                if not fresh:
                    break
                for identity in fresh:
                    _signal(identity, signal.SIGSTOP)
                frozen.update(fresh)
                alive = self._look()
            self._struck = True
        for process in alive:
            _signal(process.id, signal.SIGKILL)
        if not alive and not self._waits_for_nameless() and not self._look():  # twice: numbers may have wrapped around between
            return self._report()
        return self._report() if time.monotonic() >= self._deadline else None

    def wait(self, timeout_secs: float = _LOOK_SECS) -> None:
        """Returns when what lived at the last look is dead, at the latest after `timeout_secs`."""
        until = time.monotonic() + timeout_secs
        poller = select.poll()
        fds = []
        try:
            for identity in [*(process.id for process in self._alive), *(self._nameless or [])][:_MAX_WATCHED]:
                with contextlib.suppress(OSError):
                    fds.append(os.pidfd_open(identity.pid))
                    poller.register(fds[-1], select.POLLIN)
            waiting = len(fds)
            while waiting and (left := until - time.monotonic()) > 0:
                for fd, _ in poller.poll(left * 1000):
                    poller.unregister(fd)
                    waiting -= 1
        finally:
            for fd in fds:
                os.close(fd)

    def _report(self) -> FenceReport:
        alive = {process.id for process in self._alive}
        remaining = tuple(Remaining(p.pid, p.state, _wchan(p.pid), p.command) for p in self._alive)
        killed = tuple(identity.pid for identity in self._seen_alive if identity not in alive)
        return FenceReport(killed, remaining, time.monotonic() - self._begin)


def _wchan(pid: int) -> str:
    try:
        return _read(f"/proc/{pid}/wchan", _STAT_BYTES).decode(errors="replace").strip() or "0"
    except OSError:
        return "0"


def fence(token: str | Collection[str], pids: Iterable[int | ProcessId], deadline_secs: float = 10.0) -> FenceReport:
    """Kills every process of an incarnation and returns when all are dead, or at the deadline with those that are not.

    Members: `pids`, their descendants, process groups and sessions that a member leads, and every process of this user whose environment
    holds `LETO_TOKEN=<token>`. A group that a member merely sits in (the user's shell pipeline) is left alone, as are this process and its
    ancestors. Zombies count as dead; reaping is the parent's. Give a `ProcessId` for a process that may have been reaped already, so that a
    later process with its number is safe; a plain number is taken as the process that has it now.

    Args:
      token: the incarnation's token, or several.
      pids: processes that the caller knows of; may be empty.
      deadline_secs: how long to go on killing.

    *Crash*: what was stopped and not killed yet stays stopped; the next fence kills it.
    """
    work = Fence(token, pids, deadline_secs)
    while True:
        report = work.step()
        if report is not None:
            return report
        work.wait()
