"""Real jobs for tests: `leto run` in private directories, what it wrote, and how to make it fail. Every wait here has a deadline.

    def test_something(jobs):
        run = jobs.run("--steps", "6")
        assert run.finish() == 0

The fixture `jobs` (conftest.py) fails the test if anything is left behind: a process, a socket, a file in the runtime directory.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from leto_jax import errors
from leto_jax.agent import client
from leto_jax.agent.processes import state_letter
from leto_jax.goodput import journal

REPOSITORY = Path(__file__).resolve().parents[2]
TINY = Path(__file__).resolve().parent / "scripts" / "tiny.py"
START_SECS = 120.0  # generous: these tests share their machine
END_SECS = 30.0
LEFT_SECS = 10.0
LETO = ("-m", "leto_jax.cli")
# An agent that outlived a test run that was killed would train on for ever: it gets a SIGTERM with its parent.
_TIED = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
_FINAL = re.compile(r"^final step=(\d+) loss=(\S+) digest=sha256:([0-9a-f]{64})$", re.MULTILINE)
_STEP = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


def wait_until[T](condition: Callable[[], T], secs: float, what: str | Callable[[], str]) -> T:
    """What `condition` gives once it is true. Fails with `what` after `secs` seconds."""
    until = time.monotonic() + secs
    while not (found := condition()):
        assert time.monotonic() < until, f"not within {secs:g} s: {what if isinstance(what, str) else what()}"
        time.sleep(0.02)
    return found


def leto(*arguments: object, secs: float = START_SECS) -> subprocess.CompletedProcess[str]:
    """A command of the CLI, to its end."""
    command = [sys.executable, *LETO, *map(str, arguments)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=secs, check=False, stdin=subprocess.DEVNULL)


def read_plainly(directory: object, *step: int) -> dict[str, Any]:
    """A checkpoint in a directory, the newest by default: `step`, and of each of its `leaves`, by path, `shape`, `first` element and `sha256`."""
    command = [sys.executable, str(TINY.with_name("read_plainly.py")), str(directory), *map(str, step)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECS, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def shapes(found: dict[str, Any], group: str = "") -> dict[str, list[int]]:
    """Of what `read_plainly` gives: the shapes of the leaves of a group, or of all."""
    return {path: leaf["shape"] for path, leaf in found["leaves"].items() if path.startswith(f"['{group}']" if group else "")}


class Result(NamedTuple):
    """What a training run printed. losses: by step. final: the last line that says so."""

    final: str
    losses: dict[int, str]


def result(text: str) -> Result:
    """Fails if a step that was replayed printed another loss than at first, or if two final lines differ."""
    losses: dict[int, str] = {}
    for step, loss in _STEP.findall(text):
        assert losses.setdefault(int(step), loss) == loss, f"step {step} printed {losses[int(step)]} and, replayed, {loss}"
    finals = {match[0] for match in _FINAL.finditer(text)}
    assert len(finals) <= 1, finals
    return Result(min(finals, default=""), losses)


@functools.cache
def alone(*arguments: str) -> Result:
    """The same script by itself: the result that every protected run must have."""
    done = subprocess.run(
        [sys.executable, str(TINY), *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=START_SECS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "training unprotected, with the same programs and the same results" in done.stderr
    found = result(done.stdout)
    assert found.final, done.stdout
    return found


class Jobs:
    """The jobs of one test. Owns every process that they start."""

    def __init__(self, root: Path):
        self.root = root
        self._runs: list[Run] = []
        self._numbers = itertools.count()

    def name(self, stem: str = "job") -> str:
        return f"{stem}-{uuid.uuid4().hex[:8]}"

    def run(
        self,
        *arguments: object,
        job: str | None = None,
        options: Sequence[object] = (),
        script: Path = TINY,
        command: Sequence[str] = LETO,
        stdin: int = subprocess.DEVNULL,
    ) -> Run:
        """Starts `leto run` and waits for nothing. command: Python's arguments, for an agent that is not quite as it should be."""
        job = job or self.name()
        words = [*command, "run", "--job", job, *options, script, *arguments]
        run = Run(self.root, job, [sys.executable, "-S", "-c", _TIED, *map(str, words)], next(self._numbers), stdin)
        self._runs.append(run)
        return run

    def start(self, *arguments: object, steps: int = 6, **run: Any) -> Run:
        """A job of `steps` steps that waits in the body of its first step, until `allow` lets it go on."""
        job = self.name()
        return self.run("--steps", steps, "--limit", self.root / f"limit-{job}", *arguments, job=job, **run)

    def processes(self) -> dict[int, str]:
        """Living processes of all these jobs by what the environment says: agents, managers, trainers, and whatever these have started."""
        return {pid: words for pid, words, environ in _processes() if f"XDG_RUNTIME_DIR={self.root / 'run'}".encode() in environ}

    def leftovers(self) -> list[str]:
        """Processes, runtime files and shared memory that a test has left behind."""
        files = [str(path) for path in (self.root / "run").rglob("*") if path.name != "leto"]
        shm = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "leto" in name]
        return [*(f"process {pid}: {words}" for pid, words in self.processes().items()), *files, *shm]

    def close(self, check: bool) -> None:
        """Ends the test. check: fails if anything was left behind; it is removed in any case."""
        until = time.monotonic() + LEFT_SECS
        while (left := self.leftovers() if check else []) and time.monotonic() < until:
            time.sleep(0.05)
        for run in self._runs:
            run.close()
        while processes := self.processes():
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
            assert time.monotonic() < until + LEFT_SECS, processes
        assert not left, "left behind:\n" + "\n".join(left)


def _processes() -> Iterator[tuple[int, str, list[bytes]]]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if int(name) != os.getpid():
                words = Path(f"/proc/{name}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environ = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                role = next((entry.decode() for entry in environ if entry.startswith(b"LETO_ROLE=")), "")
                yield int(name), f"{words}{role} {state_letter(int(name))}".strip(), environ


class Run:
    """One `leto run`: its process is the agent."""

    def __init__(self, root: Path, job: str, command: Sequence[str], number: int, stdin: int):
        self.job = job
        self.directory = root / "run" / "leto" / job
        self.state = root / "state" / "leto" / job
        self.limit = root / f"limit-{job}"
        self._out, self._err = root / f"out{number}", root / f"err{number}"
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            self.process = subprocess.Popen(command, cwd=REPOSITORY, stdin=stdin, stdout=out, stderr=err, start_new_session=True)

    # What it says -----------------------------------------------------------------------------------------------------------------

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    @property
    def result(self) -> Result:
        return result(self.out)

    def events(self, event: str | None = None, **fields: Any) -> list[dict[str, Any]]:
        """Journal lines with this name and these values, oldest first."""
        try:
            lines = journal.read(self.state / "journal.jsonl")
        except errors.JobError:
            return []
        return [line for line in lines if event in (None, line["event"]) and all(line[key] == value for key, value in fields.items())]

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.state / "metrics.jsonl").read_text().splitlines()]

    def status(self) -> dict[str, Any]:
        return client.ask(self.job, {"op": "status"}, 30.0)

    def pid(self, role: str, rank: int = 0) -> int | None:
        """Process of the trainer or shadow of a rank, None if there is none now."""
        return next((found["pid"] for found in self.status()["ranks"] if (found["role"], found["rank"]) == (role, rank)), None)

    def carriers(self) -> dict[int, str]:
        """Living processes that carry a token of this job: trainers, shadows, and everything that descends from them."""
        mark = f"LETO_TOKEN={self.job}-".encode()
        return {pid: words for pid, words, environ in _processes() if any(entry.startswith(mark) for entry in environ)}

    # Waiting ----------------------------------------------------------------------------------------------------------------------

    def wait_for(self, event: str, count: int = 1, secs: float = START_SECS, **fields: Any) -> dict[str, Any]:
        """The journal line that is the `count`-th of its kind. Fails early if the job ends."""

        def look() -> list[dict[str, Any]]:
            ended = self.process.poll() is not None
            found = self.events(event, **fields)
            assert len(found) >= count or not ended, f"the job ended with {self.process.returncode} before {event} {fields}:\n{self.err}"
            return found if len(found) >= count else []

        return wait_until(look, secs, lambda: f"{count} x {event} {fields}; {self.status()}\n{self.err}")[count - 1]

    def wait_for_step(self, step: int, secs: float = START_SECS) -> None:
        def look() -> bool:
            assert self.process.poll() is None, f"the job ended with {self.process.returncode} before step {step}:\n{self.err}"
            with contextlib.suppress(errors.LetoError):
                return self.status()["step"] >= step
            return False

        wait_until(look, secs, lambda: f"step {step}; {self.status()}\n{self.err}")

    def wait_for_shadow(self, secs: float = START_SECS) -> None:
        """Until the shadows of all ranks are ready."""

        def look() -> bool:
            assert self.process.poll() is None, f"the job ended with {self.process.returncode} before a shadow was ready:\n{self.err}"
            with contextlib.suppress(errors.LetoError):
                shadows = [rank["phase"] for rank in self.status()["ranks"] if rank["role"] == "shadow"]
                return bool(shadows) and set(shadows) == {"ready"}
            return False

        wait_until(look, secs, lambda: f"a ready shadow; {self.status()}\n{self.err}")

    def finish(self, secs: float = START_SECS) -> int:
        """The exit code."""
        try:
            return self.process.wait(secs)
        except subprocess.TimeoutExpired as exception:
            raise AssertionError(f"the job did not end within {secs:g} s:\n{self.status()}\n{self.err}") from exception

    def finish_as_if_nothing_had_happened(self, steps: int, *earlier: Run, like: Sequence[str] = ()) -> None:
        """Lets a job from `Jobs.start` go to its end, and compares it with a run in which nothing failed.

        earlier: runs of the same job. like: arguments of the script that the run to compare with needs, too.
        """
        self.allow(steps + 1)
        assert self.finish() == 0, self.err
        found = result("".join(run.out for run in (*earlier, self)))
        assert found == alone("--steps", str(steps), *like)
        assert [row["step"] for row in self.metrics()] == list(range(1, steps + 1))
        assert all(repr(row["loss"]) == found.losses[row["step"]] for row in self.metrics())
        compiled = [item for item in self.events("takeover") if item["path"] in ("shadow", "late_shadow") and item["compiles"]]
        assert compiled == []
        assert len(self.events("fence")) == len(self.events("failure"))
        assert [item for item in self.events("fence") if item["remaining"]] == []
        end = self.events()[-1]
        assert (end["event"], end["code"], self.events("done")[-1]["commit"]) == ("finish", 0, steps)

    # Doing something to it ----------------------------------------------------------------------------------------------------------

    def allow(self, step: int) -> None:
        """Of a job from `Jobs.start`: lets the loop go on into the body of `step`, which then waits."""
        self.limit.with_suffix(".new").write_text(str(step))
        self.limit.with_suffix(".new").replace(self.limit)

    def kill(self, role: str = "trainer", number: int = signal.SIGKILL, rank: int = 0) -> int:
        """Signals the trainer or shadow of a rank from outside; returns its process number."""
        pid = wait_until(lambda: self.pid(role, rank), END_SECS, f"a {role} to kill")
        os.kill(pid, number)
        return pid

    def inject(
        self,
        kind: str,
        phase: str,
        chunk: int = -1,
        step: int = -1,
        when_ready: bool = True,
        secs: float = START_SECS,
        rank: int = 0,
        times: int = 1,
    ) -> int:
        """As `leto inject`: returns the step at which it fired."""
        message = {"op": "inject", "rank": rank, "kind": kind, "phase": phase, "step": step, "chunk": chunk}
        message |= {"when_ready": when_ready, "times": times}
        return client.ask(self.job, {**message, "deadline_secs": secs}, secs + 5)["fired_step"]

    def inject_on_the_way(self, kind: str, phase: str, when_ready: bool = True, **options: Any) -> int:
        """`inject` into a job that waits at its limit: which is raised, step by step, until the failure has fired."""
        if when_ready:
            self.wait_for_shadow()
        fired: list[Any] = []

        def ask() -> None:
            try:
                fired.append(self.inject(kind, phase, when_ready=when_ready, **options))
            except BaseException as exception:
                fired.append(exception)

        thread = threading.Thread(target=ask)
        thread.start()
        while thread.is_alive():
            with contextlib.suppress(errors.LetoError):
                self.allow(self.status()["step"] + 1)
            thread.join(0.05)
        if isinstance(fired[0], BaseException):
            raise AssertionError(f"{kind} in {phase} {options}: {fired[0]}\n{self.err}") from fired[0]
        return fired[0]

    def inject_in_the_next_takeover(self, kind: str, rank: int = 0) -> None:
        """Asks for a failure of whoever takes over next, and returns once the agent knows."""
        count = len(self.events("inject"))

        def ask() -> None:
            with contextlib.suppress(errors.LetoError):  # the journal tells whether it has fired
                self.inject(kind, "takeover", rank=rank)

        threading.Thread(target=ask, daemon=True).start()
        self.wait_for("inject", count + 1)

    def kill_agent(self) -> None:
        self.process.kill()
        self.process.wait(END_SECS)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_SECS)
