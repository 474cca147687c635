"""`leto demo`: the same training with and without failures, compared to the bit."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import leto_jax
from leto_jax import errors
from leto_jax.agent import client
from leto_jax.config import deterministic, state_root
from leto_jax.goodput import journal, report

DIFFERS = 4
MAX_CELLS = 60  # of one stage in a timeline
SCRIPT = Path(__file__).resolve().parent.parent / "experiments" / "train_lm.py"
_FINAL = re.compile(r"^final step=(\d+) loss=(\S+) digest=sha256:([0-9a-f]{64})$", re.MULTILINE)
_LOSS = re.compile(r"^step (\d+) loss (\S+)", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Fault:
    """One failure of the demo: what `leto inject` is asked for, and how it is called on the screen."""

    title: str
    kind: str
    phase: str


FAULTS = (
    Fault("SIGKILL while gradients are computed", "sigkill", "compute"),
    Fault("SIGKILL between two marks of the update", "sigkill", "update"),
    Fault("SIGKILL between last mark and commit", "sigkill", "commit"),
    Fault("hang: SIGSTOP in the middle of the update", "sigstop", "update"),
    Fault("a data page overwritten, and SIGKILL", "page_corruption", "compute"),
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Size of one demo. pause_secs: between two steps of the protected run, until the last failure, so that shadows get ready on two cores;
    it is no part of a step, and the results do not depend on it."""

    faults: tuple[Fault, ...]
    arguments: tuple[str, ...]
    pause_secs: float
    deadline_secs: float


FULL = Plan(
    FAULTS,
    ("--width", "256", "--depth", "4", "--heads", "4", "--context", "128", "--batch", "8", "--steps", "100", "--log-every", "1"),
    1.0,
    480.0,
)
QUICK = Plan(
    (FAULTS[0], FAULTS[1], FAULTS[2]),
    ("--width", "128", "--depth", "2", "--heads", "4", "--context", "64", "--batch", "8", "--steps", "60", "--log-every", "1"),
    1.0,
    240.0,
)


def main(quick: bool, json_file: Path | None, self_check: bool, device: str = "cpu") -> int:
    """Runs the demo on 'cpu' or 'gpu', there with XLA's flag for repeatable programs; returns the exit code: 0 only if losses and final state are bit-identical."""
    if not SCRIPT.is_file():
        raise errors.UsageError(f"demo: expected {SCRIPT}, found nothing there; run it inside a clone of the repository")
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise errors.UsageError(f"--json: expected a file in a directory that exists, found {json_file}")
    plan, console = (QUICK if quick else FULL), Console(stderr=True, highlight=False)
    plan = dataclasses.replace(plan, arguments=(*plan.arguments, "--device", device))
    end = time.monotonic() + plan.deadline_secs
    job = f"demo-{uuid.uuid4().hex[:8]}"
    with (
        tempfile.TemporaryDirectory(prefix="leto-demo-") as directory,
        Progress(
            TextColumn("{task.description:<52}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=console,
        ) as progress,
    ):
        steps = int(plan.arguments[plan.arguments.index("--steps") + 1])
        alone_json = Path(directory) / "alone.json"
        reference = _alone(plan, alone_json, progress, steps, end)
        plain = statistics.median(row["secs"] for row in json.loads(alone_json.read_text())["rows"][1:])
        protected = _protected(plan, job, directory, progress, steps, end)
    events = journal.read(state_root() / job / "journal.jsonl")
    summary = report.summarise(events)
    identical = _final(reference) == _final(protected) and _losses(reference) == _losses(protected)
    if self_check:  # one bit of one loss: a comparison that cannot fail is no comparison
        losses = _losses(protected)
        losses[max(losses)] = _flip(losses[max(losses)])
        identical = identical and losses == _losses(reference)
    failures = [
        {key: item[key] for key in ("kind", "phase", "step", "detect_secs", "stages", "lost_steps")}
        | {"takeover_secs": report.takeover_secs(item, plain)}
        for item in summary["takeovers"]
    ]
    result: dict[str, Any] = {
        "bit_identical": identical,
        "steps": steps,
        "failures": failures,
        "goodput": summary["goodput"],
        "compiles_at_takeover": max((item["compiles"] for item in summary["takeovers"]), default=0),
        "plain_step_secs": plain,
        "versions": {"leto_jax": leto_jax.__version__}
        | {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
        | {"python": sys.version.split()[0]},
    }
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    _show(console, plan, result, reference, protected, job, self_check)
    return 0 if identical and len(failures) == len(plan.faults) else DIFFERS


def _alone(plan: Plan, json_file: Path, progress: Progress, steps: int, end: float) -> str:
    """The reference: the script by itself, in a process of its own."""
    task = progress.add_task("reference run, nothing fails", total=steps)
    command = [sys.executable, str(SCRIPT), *plan.arguments, "--json", str(json_file)]
    out, err = json_file.with_name("reference.out"), json_file.with_name("reference.err")
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env={**deterministic(os.environ), "PYTHONUNBUFFERED": "1"})
        try:
            while process.poll() is None and time.monotonic() < end:
                progress.update(task, completed=max(_losses(out.read_text()), default=0))
                time.sleep(0.2)
        finally:
            if late := process.poll() is None:
                process.kill()
                process.wait()
    if late:
        raise errors.DeadlineError("demo: the reference run did not end in time; the machine is busy, try again")
    if process.returncode:
        raise errors.JobError(f"demo: the reference run ended with exit code {process.returncode}:\n{err.read_text()[-2000:]}")
    progress.update(task, completed=steps)
    return out.read_text()


def _protected(plan: Plan, job: str, directory: str, progress: Progress, steps: int, end: float) -> str:
    """The same script under `leto run`, failing again and again."""
    out, err, pausing = Path(directory) / "out", Path(directory) / "err", Path(directory) / "pausing"
    pausing.touch()
    pauses = ["--sleep-secs", str(plan.pause_secs), "--sleep-while", str(pausing)]
    command = [sys.executable, "-m", "leto_jax.cli", "run", "--job", job, "--deterministic", str(SCRIPT), *plan.arguments, *pauses]
    task = progress.add_task("protected run", total=steps)
    with open(out, "wb") as stdout, open(err, "wb") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env={**os.environ, "PYTHONUNBUFFERED": "1"})
        try:
            _wait_for_agent(job, process, end, err)
            for number, fault in enumerate(plan.faults, 1):
                progress.update(task, description=f"protected run, {number}/{len(plan.faults)}: waiting for a shadow")
                _inject(job, fault, process, progress, task, end, err)
                progress.update(task, description=f"protected run, {number}/{len(plan.faults)}: {fault.title}")
            pausing.unlink()
            while process.poll() is None and time.monotonic() < end:
                _show_step(job, progress, task)
            if process.poll() is None:
                raise errors.DeadlineError(f"demo: the protected run did not end in time:\n{err.read_text()[-2000:]}")
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()
    if process.returncode:
        raise errors.JobError(f"demo: the protected run ended with exit code {process.returncode}:\n{err.read_text()[-2000:]}")
    progress.update(task, completed=steps, description=f"protected run, {len(plan.faults)} failures")
    return out.read_text()


def _wait_for_agent(job: str, process: subprocess.Popen, end: float, err: Path) -> None:
    while process.poll() is None and time.monotonic() < end:
        with contextlib.suppress(errors.LetoError):
            client.ask(job, {"op": "status"})
            return
        time.sleep(0.1)
    raise errors.JobError(f"demo: `leto run` did not start:\n{err.read_text()[-2000:]}")


def _inject(job: str, fault: Fault, process: subprocess.Popen, progress: Progress, task: Any, end: float, err: Path) -> None:
    """Waits for a ready shadow, then fails; shows the steps meanwhile."""
    while process.poll() is None and time.monotonic() < end:
        ranks = client.ask(job, {"op": "status"})["ranks"]
        if any(rank["role"] == "shadow" and rank["phase"] == "ready" for rank in ranks):
            break
        _show_step(job, progress, task)
    left = end - time.monotonic()
    if process.poll() is not None:
        raise errors.JobError(f"demo: the protected run ended before «{fault.title}»:\n{err.read_text()[-2000:]}")
    if left <= 0:
        raise errors.DeadlineError(f"demo: no shadow was ready for «{fault.title}» in time; the machine is busy, try again")
    client.ask(job, {"op": "inject", "kind": fault.kind, "phase": fault.phase, "when_ready": True, "deadline_secs": left}, left + 5)


def _show_step(job: str, progress: Progress, task: Any) -> None:
    with contextlib.suppress(errors.LetoError):
        progress.update(task, completed=client.ask(job, {"op": "status"})["step"])
    time.sleep(0.2)


def _final(text: str) -> tuple[str, ...]:
    found = _FINAL.findall(text)
    return found[-1] if found else ("no final line",)


def _losses(text: str) -> dict[int, str]:
    """Loss by step as printed; a replayed step prints twice, and must print the same."""
    losses: dict[int, str] = {}
    for step, loss in _LOSS.findall(text):
        if losses.setdefault(int(step), loss) != loss:
            losses[int(step)] = f"{losses[int(step)]} and {loss}"
    return losses


def _flip(number: str) -> str:
    """A float's text with its lowest bit flipped."""
    (bits,) = struct.unpack("<Q", struct.pack("<d", float(number)))
    return repr(struct.unpack("<d", struct.pack("<Q", bits ^ 1))[0])


def _show(console: Console, plan: Plan, result: dict[str, Any], reference: str, protected: str, job: str, self_check: bool) -> None:
    from rich.table import Table

    table = Table(title=f"failures of job {job} (seconds)", title_justify="left")
    for column in (
        "failure",
        "after commit",
        "detect",
        "fence",
        "attach",
        "verify",
        "roll forward",
        "first step",
        "takeover",
        "lost steps",
    ):
        table.add_column(column, justify="left" if column == "failure" else "right")
    for fault, item in zip(plan.faults, result["failures"], strict=False):
        stages = item["stages"]
        cells = [f"{stages.get(name, 0.0):.3f}" for name in ("fence", "attach", "verify", "roll_forward", "first_step")]
        table.add_row(
            fault.title,
            str(item["step"]),
            f"{item['detect_secs']:.3f}",
            *cells,
            f"[bold]{item['takeover_secs']:.3f}[/]",
            str(item["lost_steps"]),
        )
    Console(width=None if sys.stdout.isatty() else 170).print(table)
    for fault, item in zip(plan.faults, result["failures"], strict=False):
        print(f"{fault.title[:44]:<44} {_timeline(item)}")
    print(
        f"a takeover is counted from the failure (of a hang: from its detection) to the end of the first step after it, minus one plain step ({result['plain_step_secs']:.3f} s)"
    )
    verdict = "bit-identical" if result["bit_identical"] else "NOT bit-identical"
    note = "  (self-check: one bit was flipped on purpose)" if self_check else ""
    if len(result["failures"]) != len(plan.faults):
        note += f"\nexpected {len(plan.faults)} takeovers, found {len(result['failures'])}: see `leto report {job}`"
    print(
        f"reference  {' '.join(_final(reference))}\nprotected  {' '.join(_final(protected))}\nverdict: losses and final state are {verdict} after {len(result['failures'])} failures{note}"
    )


def _timeline(item: dict[str, Any], secs_per_cell: float = 0.02) -> str:
    """Stages of one takeover as letters, one for every 20 ms: D detect, F fence, A attach, V verify, R roll forward, S first step."""
    names = (("detect", "D"), ("fence", "F"), ("attach", "A"), ("verify", "V"), ("roll_forward", "R"), ("first_step", "S"))
    return (
        "|"
        + "".join(letter * min(MAX_CELLS, max(1, round(item["stages"].get(name, 0.0) / secs_per_cell))) for name, letter in names)
        + f"| {item['takeover_secs']:.3f} s"
    )
