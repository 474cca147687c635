"""A protected run of `train_lm` that is killed again and again as soon as a shadow is ready, and what its journal says about the takeovers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _runs

from leto_jax.agent import client
from leto_jax.config import PARKED, state_root
from leto_jax.errors import JobError, LetoError
from leto_jax.goodput import journal, report

SHAPE_10M = {"width": 320, "depth": 8, "heads": 5, "context": 128, "batch": 8}
"""Of a model of 10 M parameters whose step takes half a second on two cores."""
PHASES = ("compute", "decide", "update", "commit", "drain")
STAGES = {
    "detect": "#8c8c8c",
    "fence": "#c44e52",
    "attach": "#dd8452",
    "verify": "#ccb974",
    "roll_forward": "#55a868",
    "restore": "#8172b3",
    "data": "#64b5cd",
    "body": "#da8bc3",
    "recompute": "#937860",
    "first_step": "#4c72b0",
}
"""Of a recovery, in their order, with their colours."""
IN_PLACE = {name: colour for name, colour in STAGES.items() if name not in ("restore", "body", "recompute")}
READY_SECS = 240.0
WAIT_SECS = 60.0


def collect(
    kills: int, options: Mapping[str, object], environ: Mapping[str, str] | None = None, level: str = "auto"
) -> list[dict[str, Any]]:
    """Runs `leto run train_lm.py` with `options`, kills it `kills` times, at every phase in turn; the takeovers as `leto report` gives them.

    level: `--shadow-level`; with '0' a new process takes over. Raises what the agent raises when the job does not come to a ready shadow in time.
    """
    job = f"bench-{uuid.uuid4().hex[:8]}"
    leto = [sys.executable, "-m", "leto_jax.cli", "run", "--job", job, "--shadow-level", level]
    command = [*leto, *_runs.script(options), "--steps", "1000000"]
    begin = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, **(environ or {})}) as process:
        try:
            for number in range(kills):
                phase = PHASES[number % len(PHASES)]
                if level == PARKED:
                    wait_for_level(job, process, PARKED)
                ask_when_up(
                    job,
                    {"op": "inject", "kind": "sigkill", "phase": phase, "when_ready": level != "0", "deadline_secs": READY_SECS},
                    process,
                )
                print(f"{time.monotonic() - begin:6.1f} s: killed in {phase} ({number + 1} of {kills})", file=sys.stderr, flush=True)
            wait_for(job, process, "takeover", kills)
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
            process.kill()
    return report.summarise(events(job))["takeovers"]


def rows(found: Sequence[Mapping[str, Any]], **more: Any) -> list[dict[str, Any]]:
    """Takeovers as flat rows of a result."""
    kept = ("kind", "phase", "step", "takeover_secs", "lost_steps", "compiles", "level")
    return [
        {
            "part": "takeover",
            **more,
            **{key: item[key] for key in kept},
            **{f"{name}_secs": value for name, value in item["stages"].items()},
        }
        for item in found
    ]


def draw(found: Sequence[Mapping[str, Any]], plain_step_secs: float, path: Path) -> None:
    """The takeovers as bars, one stage after the other, from SIGKILL to the end of the first step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.42 * len(found) + 1.8), layout="constrained")
    for row, item in enumerate(found):
        left = 0.0
        for name, colour in IN_PLACE.items():
            secs = item["stages"].get(name, 0.0)
            axes.barh(row, secs, left=left, color=colour, label=name.replace("_", " ") if row == 0 else None)
            left += secs
    axes.set_yticks(range(len(found)), [f"SIGKILL in {item['phase']}" for item in found])
    axes.invert_yaxis()
    axes.set_xlabel(f"seconds since SIGKILL (a plain step takes {plain_step_secs:.2f} s)")
    axes.set_title("From SIGKILL to the end of the first step after it", loc="left")
    axes.legend(
        ncols=len(IN_PLACE), loc="upper center", bbox_to_anchor=(0.45, -0.22 if len(found) > 5 else -0.4), frameon=False, fontsize=8
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def ask_when_up(job: str, message: dict[str, Any], process: subprocess.Popen) -> None:
    end = time.monotonic() + WAIT_SECS
    while True:
        try:
            client.ask(job, {"op": "status"})
            break
        except LetoError:
            if time.monotonic() > end or process.poll() is not None:
                raise
            time.sleep(0.2)
    client.ask(job, message, message["deadline_secs"] + 5)


def wait_for_level(job: str, process: subprocess.Popen, level: int | str) -> None:
    """Until a shadow is ready at `level`, as `leto status` shows it. Raises RuntimeError if the job ends before, TimeoutError."""
    end = time.monotonic() + READY_SECS
    while time.monotonic() < end:
        with contextlib.suppress(LetoError):
            ranks = client.ask(job, {"op": "status"})["ranks"]
            if any((rank["phase"], rank["level"]) == ("ready", level) for rank in ranks):
                return
        if process.poll() is not None:
            raise RuntimeError(f"{job} ended with exit code {process.returncode} before a shadow was ready at level {level}")
        time.sleep(0.2)
    raise TimeoutError(f"expected a shadow of {job} at level {level} within {READY_SECS:.0f} s, found none")


def wait_for(job: str, process: subprocess.Popen, event: str, count: int = 1, secs: float = WAIT_SECS) -> None:
    """Until the job's journal has `count` events of this name. Raises RuntimeError if the job ends before, TimeoutError."""
    end = time.monotonic() + secs
    while time.monotonic() < end:
        with contextlib.suppress(JobError):  # no journal yet
            if sum(line["event"] == event for line in events(job)) >= count:
                return
        if process.poll() is not None:
            raise RuntimeError(f"{job} ended with exit code {process.returncode} before {event} number {count}")
        time.sleep(0.05)
    raise TimeoutError(f"expected {count} x {event} in the journal of {job} within {secs:.0f} s, found fewer")


def events(job: str) -> list[dict[str, Any]]:
    return journal.read(state_root() / job / "journal.jsonl")
