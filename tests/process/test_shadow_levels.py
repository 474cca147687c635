"""Shadows that wait before they are all that they can be: each takes over, to the bit; and the agent moves them up and down."""

from __future__ import annotations

import contextlib

import pytest
from jobs import START_SECS, TINY, Run, leto, wait_until

from leto_jax import errors
from leto_jax.agent.levels import FIRST_BYTES, MARGIN_BYTES

pytestmark = pytest.mark.timeout(300)
STEPS = 12

# An agent whose device has as much free memory as a file says.
MEASURED = """if True:
    import os, time
    from leto_jax import cli
    from leto_jax.agent import agent, levels, leveller
    from leto_jax.agent.headroom import Sample

    class Headroom:
        problem = ""
        def __init__(self, gpus, environ):
            pass
        @property
        def latest(self):
            return Sample(int(open(os.environ["FREE"]).read() or 0), time.monotonic())
        def close(self):
            pass

    leveller.Headroom = Headroom
    levels.PATIENCE_SECS = 0.5
    opened = agent.Agent._open
    def _open(self):
        opened(self)
        self._leveller.watch([0], {})
    agent.Agent._open = _open
    cli.main()
"""


def wait_for_level(run: Run, level: int) -> int:
    """Until the shadow is ready there. Its process number."""

    def look() -> int:
        assert run.process.poll() is None, f"the job ended with {run.process.returncode} before:\n{run.err}"
        with contextlib.suppress(errors.LetoError):
            shadows = [rank for rank in run.status()["ranks"] if rank["role"] == "shadow"]
            return next((rank["pid"] for rank in shadows if (rank["phase"], rank["level"]) == ("ready", level)), 0)
        return 0

    return wait_until(look, START_SECS, lambda: f"a shadow at level {level}; {run.status()}\n{run.err}")


def taken_over(run: Run, level: int) -> dict:
    found = run.wait_for("takeover")
    assert (found["path"], found["level"], found["kind"]) == ("shadow", level, "sigkill")
    assert found["stages"]["rise"] > 0
    return found


def test_a_shadow_that_has_traced_and_not_loaded(jobs):
    run = jobs.start(steps=STEPS, options=("--shadow-level", 2))
    run.wait_for("ready", level=2)
    run.inject_on_the_way("sigkill", "update")
    assert taken_over(run, 2)["plan"] == "roll_forward"
    run.finish_as_if_nothing_had_happened(STEPS)


def test_the_level_follows_the_memory(jobs, monkeypatch):
    free = jobs.root / "free"

    def has(nbytes: int) -> None:
        free.with_suffix(".new").write_text(str(nbytes))
        free.with_suffix(".new").replace(free)

    monkeypatch.setenv("FREE", str(free))
    has(0)
    run = jobs.start(steps=STEPS, command=("-c", MEASURED))
    first = wait_for_level(run, 1)
    has(MARGIN_BYTES + FIRST_BYTES)
    assert wait_for_level(run, 3) == first  # it went on
    has(MARGIN_BYTES)
    assert wait_for_level(run, 3) == first  # there is a way between up and down
    has(MARGIN_BYTES - 1)
    second = wait_for_level(run, 1)  # what cannot be parked, here without a GPU, is replaced
    assert second != first
    run.inject_on_the_way("sigkill", "compute")
    taken_over(run, 1)
    run.finish_as_if_nothing_had_happened(STEPS)
    levels = [item["level"] for item in run.events("level")]
    assert levels[:4] == [1, 3, "parked", 1]
    assert "a shadow cannot be parked: process" in run.events("released")[0]["reason"]


def test_parked_needs_a_gpu(jobs):
    done = leto("run", "--job", jobs.name(), "--shadow-level", "parked", TINY)
    assert done.returncode == 2
    assert "--shadow-level parked: expected a GPU, whose state CUDA moves to host memory, found the CPU backend" in done.stderr
