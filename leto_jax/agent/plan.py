"""`leto run --plan`: runs the script up to its session on every rank; rank 0 prints there what memory it would take, and all of them end."""

from __future__ import annotations

import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from leto_jax import errors
from leto_jax.agent.coordinator import Coordinator
from leto_jax.agent.processes import new_token
from leto_jax.config import Deadlines, Process

LOOK_SECS, REAP_SECS = 0.05, 5.0
NOWHERE = Path("/nonexistent")  # there is no job


def plan(command: Sequence[str], job: str, ranks: int, environ: Mapping[str, str], deadlines: Deadlines) -> int:
    """command: the script and its arguments. Returns the exit code of the first rank that fails, 0 if none does.

    Raises DeadlineError if the ranks do not meet, or are not at their session in time.
    """
    if ranks == 1:
        return _wait([_start(command, job, 0, 1, "", environ)], deadlines.init)
    addresses: list[str] = []
    problems: list[str] = []
    with selectors.DefaultSelector() as selector:
        coordinator = Coordinator(ranks, new_token(job), environ, selector, addresses.append, problems.append)
        try:
            end = time.monotonic() + deadlines.coordinator
            while not addresses:
                if problems or time.monotonic() > end:
                    raise errors.DeadlineError(f"the coordinator, where the ranks meet: {(problems or ['it did not listen in time'])[0]}")
                for key, _ in selector.select(LOOK_SECS):
                    key.data()
            return _wait([_start(command, job, rank, ranks, addresses[0], environ) for rank in range(ranks)], deadlines.init)
        finally:
            coordinator.close()
            coordinator.reap(REAP_SECS)


def _start(command: Sequence[str], job: str, rank: int, ranks: int, coordinator: str, environ: Mapping[str, str]) -> subprocess.Popen:
    process = Process(job, "plan", rank, NOWHERE, 0, NOWHERE, ranks=ranks, coordinator=coordinator, gpu=rank if ranks > 1 else None)
    return subprocess.Popen([sys.executable, "-m", "leto_jax.shadow.child", *command], env={**environ, **process.environ()})


def _wait(processes: Sequence[subprocess.Popen], secs: float) -> int:
    """Until all have ended, or one has failed: then the others, who may wait for it, are ended."""
    end = time.monotonic() + secs
    try:
        while True:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                return next((code for code in codes if code), 0)
            if time.monotonic() > end:
                raise errors.DeadlineError(
                    f"--plan: expected every rank at its session within {secs:g} s, found {codes.count(None)} on their way"
                )
            time.sleep(LOOK_SECS)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait(REAP_SECS)
