"""Real jobs on a GPU. Run there: ``JAX_PLATFORMS=cuda XLA_FLAGS=--xla_gpu_deterministic_ops=true pytest -m gpu tests/process/test_gpu_jobs.py``.

LETO_GPU_TAKEOVERS: how many takeovers the leak test makes, 5 if it is not set.
"""

from __future__ import annotations

import hashlib
import os
import time

import pytest
from jobs import END_SECS, START_SECS, wait_until

from leto_jax.arena import cuda
from leto_jax.arena.device import DeviceArena
from leto_jax.manager import runtime
from leto_jax.manager.client import ManagerClient
from leto_jax.manager.store import gpu_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
READY_SECS = 2 * START_SECS  # CUDA, XLA and a rehearsal take their time
STEPS = 24
SETTLED_BYTES = 64 << 20  # what the driver itself may keep


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("sigkill", "compute"),
        ("sigkill", "update"),
        ("sigkill", "commit"),
        ("sigkill", "drain"),
        ("sigstop", "update"),
        ("illegal_address", "compute"),
        ("illegal_address", "update"),
        ("trap", "update"),
        ("spin", "compute"),
        ("page_loss", "compute"),
        ("page_loss", "update"),
        ("page_corruption", "update"),
    ],
)
def test_a_failure_is_survived_to_the_bit(jobs, kind, phase):
    run = jobs.start(steps=STEPS)
    run.allow(5)
    run.wait_for_step(5, READY_SECS)
    run.wait_for_shadow(READY_SECS)
    run.inject_on_the_way(kind, phase)
    found = run.wait_for("takeover")
    assert (found["kind"], found["phase"], found["path"]) == (kind, phase, "shadow")
    assert found["repaired_pages"] == (1 if kind.startswith("page") else 0)
    run.finish_as_if_nothing_had_happened(STEPS)


@pytest.mark.parametrize(("phase", "action"), [("compute", "redo"), ("update", "roll_forward")])
def test_out_of_memory_is_survived_in_the_same_process(jobs, phase, action):
    run = jobs.start(steps=STEPS)
    run.allow(5)
    run.wait_for_step(5, READY_SECS)
    run.wait_for_shadow(READY_SECS)
    trainer = run.pid("trainer")
    step = run.inject_on_the_way("oom", phase)
    found = run.wait_for("retried")
    assert (found["step"], found["action"]) == (step, action)
    assert run.pid("trainer") == trainer
    run.finish_as_if_nothing_had_happened(STEPS)
    assert run.events("failure") == []


@pytest.mark.parametrize("level", ["parked", 2, 1])
def test_a_shadow_below_level_3_takes_over(jobs, level):
    run = jobs.start(steps=STEPS, options=("--shadow-level", level))
    run.allow(5)
    run.wait_for_step(5, READY_SECS)
    alone = used_bytes()

    def waits() -> bool:
        return ("shadow", "ready", level) in [(rank["role"], rank["phase"], rank["level"]) for rank in run.status()["ranks"]]

    wait_until(waits, READY_SECS, lambda: f"a shadow at level {level}; {run.status()}\n{run.err}")
    if level != 2:
        assert used_bytes() - alone < SETTLED_BYTES
    run.inject_on_the_way("sigkill", "update")
    found = run.wait_for("takeover")
    assert (found["path"], found["level"]) == ("shadow", level)
    assert found["stages"]["unpark" if level == "parked" else "rise"] > 0
    print({key: found[key] for key in ("level", "takeover_secs", "stages", "compiles")})
    run.finish_as_if_nothing_had_happened(STEPS)


def test_the_manager_dies_and_then_the_trainer(jobs):
    run = jobs.start(steps=STEPS)
    run.allow(4)
    run.wait_for_step(4, READY_SECS)
    run.wait_for_shadow(READY_SECS)
    os.kill(run.status()["manager_pid"], 9)
    run.wait_for("manager")
    run.kill()
    run.wait_for("takeover")
    run.finish_as_if_nothing_had_happened(STEPS)


def test_a_dead_writer_changes_nothing_any_more(jobs):
    """Killed with kernels in its queue and forked workers in sessions of their own; the memory is looked at from outside for two seconds."""
    run = jobs.start("--workers", steps=STEPS)
    run.allow(STEPS // 2)
    run.wait_for_step(3, READY_SECS)
    run.kill_agent()  # the manager ends all that it has started, and keeps the memory
    wait_until(lambda: not run.carriers(), END_SECS, "the agent's processes to end")
    with ManagerClient(run.directory / runtime.SOCKET_NAME, "tool") as manager:
        kept = [item for item in manager.list() if gpu_of(item.kind) is not None]
        assert kept
        descriptors = [manager.open(item.name) for item in kept]
        nbytes = sum(item.nbytes for item in kept)
        arena = DeviceArena(0, [(item.fd, item.nbytes) for item in descriptors], nbytes, "looked at")
        digest = lambda: hashlib.sha256(arena.view(0, nbytes)).hexdigest()
        first, end = digest(), time.monotonic() + 2
        while time.monotonic() < end:
            assert digest() == first
        arena.close()
        for item in descriptors:
            item.close()
    again = jobs.run("--steps", STEPS, "--limit", run.limit, "--workers", job=run.job)
    again.finish_as_if_nothing_had_happened(STEPS, run)


def test_takeovers_leak_no_memory(jobs):
    """Neither of the device, however often a trainer is replaced, nor after the end of the job."""
    takeovers = int(os.environ.get("LETO_GPU_TAKEOVERS", "5"))
    before = used_bytes()
    run = jobs.start(steps=STEPS * takeovers)
    seen = []
    for number in range(takeovers):
        run.allow(5 * (number + 1))
        run.wait_for_step(5 * (number + 1), READY_SECS)
        run.wait_for_shadow(READY_SECS)
        seen.append(used_bytes())
        run.kill()
        run.wait_for("takeover", number + 1)
    run.finish_as_if_nothing_had_happened(STEPS * takeovers)
    assert max(seen) - min(seen) < SETTLED_BYTES, seen
    wait_until(lambda: used_bytes() - before < SETTLED_BYTES, END_SECS, lambda: f"{before} bytes in use again, there are {used_bytes()}")


def used_bytes() -> int:
    free, total = cuda.memory(0)
    return total - free
