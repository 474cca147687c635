"""Whole runs of `train_lm` under a schedule of failures, and what their reports say."""

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
from typing import Any, NamedTuple

import numpy as np

from leto_jax.agent import client
from leto_jax.config import compile_cache, state_root
from leto_jax.errors import LetoError
from leto_jax.goodput import journal, report

LEAST_SECS = 1.0  # between two failures, so that the job moves on at all
END_SECS, INJECT_SECS = 1800.0, 60.0


class Failure(NamedTuple):
    """at_secs: after the first step. hardware: the device cannot go on; else the process is killed, which hurts no hardware."""

    at_secs: float
    hardware: bool = False


def failure_times(every_secs: float, seed: int) -> list[float]:
    """Seconds after the first step, more than any run will see: a failure every `every_secs`, give or take half of it."""
    return np.cumsum(every_secs * np.random.default_rng(seed).uniform(0.5, 1.5, 1000)).tolist()


def command_line(options: Mapping[str, object]) -> list[str]:
    """Options as words of a command line; True stands for a flag."""
    return [
        word
        for name, value in options.items()
        for word in ([f"--{name.replace('_', '-')}"] if value is True else [f"--{name.replace('_', '-')}", str(value)])
    ]


def script(options: Mapping[str, object]) -> list[str]:
    """`train_lm.py` with its options, as words."""
    return [str(Path(__file__).with_name("train_lm.py")), *command_line(options)]


def warm_environ(directory: str) -> dict[str, str]:
    """Journals and a compile cache in `directory`, small programs too."""
    return {**os.environ, "XDG_STATE_HOME": directory, **compile_cache(Path(directory) / "cache")}


def train(
    options: Sequence[str], words: Sequence[str], failures: Sequence[Failure], environ: Mapping[str, str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One `leto run` to its end; its report and its journal. A failure that falls into a recovery comes when it is over.

    Raises RuntimeError if the job does not end well, TimeoutError if it does not end.
    """
    job = f"bench-{uuid.uuid4().hex[:8]}"
    command = [sys.executable, "-m", "leto_jax.cli", "run", "--job", job, "--max-restarts-without-progress", "100", *options, *words]
    waiting, end = list(failures), time.monotonic() + END_SECS
    with subprocess.Popen(command, env=dict(environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            began: float | None = None
            while process.poll() is None:
                if time.monotonic() > end:
                    raise TimeoutError(f"{job} did not end within {END_SECS:.0f} s")
                time.sleep(0.02)
                trainer = _in_its_loop(job)
                if trainer is None:
                    continue
                began = began or time.monotonic()
                if waiting and time.monotonic() - began >= waiting[0].at_secs:
                    _fail(job, trainer, waiting.pop(0))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
    if process.returncode:
        raise RuntimeError(f"{job} ended with exit code {process.returncode}")
    events = journal.read(state_root(environ) / job / "journal.jsonl")
    return report.summarise(events), events


def step_secs(summary: Mapping[str, Any]) -> float:
    """Seconds of an iteration in the loop, stalls included."""
    spent = summary["badput_secs"]
    return (spent["productive"] + spent["body_and_data"] + spent["checkpoint_stall"] + spent["first_step_overhead"]) / summary["steps"]


def _in_its_loop(job: str) -> int | None:
    """The trainer's process number, while it trains."""
    with contextlib.suppress(LetoError):
        status = client.ask(job, {"op": "status"})
        if status["state"] == "running":
            return next((rank["pid"] for rank in status["ranks"] if rank["role"] == "trainer"), None)
    return None


def _fail(job: str, trainer: int, failure: Failure) -> None:
    if not failure.hardware:
        with contextlib.suppress(ProcessLookupError):
            os.kill(trainer, signal.SIGKILL)
        return
    with contextlib.suppress(LetoError):  # the job may end before
        client.ask(job, {"op": "inject", "kind": "inoperable", "phase": "compute", "deadline_secs": INJECT_SECS}, INJECT_SECS + 5)
