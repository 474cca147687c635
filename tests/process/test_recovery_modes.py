"""One script, run with each `--recovery`: real processes, a real SIGKILL, and the result of a run in which nothing failed."""

from __future__ import annotations

import json
import os
import signal

import numpy as np
import pytest
from jobs import END_SECS, TINY, Jobs, Result, alone, leto, wait_until

STEPS = 12
MODES = {
    "none": ((), "cold"),
    "persistent": (("--checkpoint-every", 2), "cold"),
    "persistent, synchronous": (("--checkpoint-every", 2, "--synchronous"), "cold"),
    "host-memory": (("--copy-every", 2), "cold"),
    "host-memory+spare": (("--copy-every", 2), "shadow"),
}
_undisturbed: dict[str, Result] = {}


def options(mode: str, directory) -> tuple:
    recovery, more = mode.partition(",")[0], MODES[mode][0]
    return ("--recovery", recovery, *more, *(("--checkpoint-dir", directory) if recovery == "persistent" else ()))


def undisturbed(jobs: Jobs, data: str) -> Result:
    """What plain programs give: the same in all modes."""
    if data not in _undisturbed:
        run = jobs.run("--steps", STEPS, "--data", data, options=("--recovery", "none"))
        assert run.finish() == 0, run.err
        _undisturbed[data] = run.result
    return _undisturbed[data]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", MODES)
def test_a_killed_trainer_is_followed_by_one_that_goes_on(jobs, tmp_path, mode):
    data = "grain" if "persistent" in mode else "function"
    run = jobs.start("--data", data, steps=STEPS, options=options(mode, tmp_path / "saved"))
    run.allow(7)  # copies of 2, 4 and 6
    run.wait_for_step(7)  # its body waits
    if mode != "none":
        run.wait_for("saved", 1)
    if MODES[mode][1] == "shadow":
        run.wait_for_shadow()
    run.kill()
    run.allow(STEPS + 1)
    assert run.finish() == 0, run.err
    assert run.result == undisturbed(jobs, data)
    (found,) = run.events("takeover")
    restored = found["step"] - found["lost_steps"]
    assert (found["path"], found["kind"]) == (MODES[mode][1], "signal")
    assert restored == 0 if mode == "none" else restored in (2, 4, 6)
    assert (f"leto: resumed from step {restored} of " in run.err) == (mode != "none")
    assert {"detect", "fence", "restore", "body", "recompute", "first_step"} <= set(found["stages"])
    assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
    report = json.loads(leto("report", run.job, "--json").stdout)
    assert report["steps"] == STEPS
    assert sum(report["badput_secs"].values()) == pytest.approx(report["wall_secs"], abs=1e-6)
    assert (report["badput_secs"]["checkpoint_stall"] > 0) == (mode != "none")


@pytest.mark.timeout(300)
def test_copies_beside_retained_memory_and_a_new_job_from_them(jobs, tmp_path):
    """Agent, manager and trainer are gone; what is left is the directory."""
    tiers = ("--shadow-level", 0, "--checkpoint-dir", tmp_path / "saved", "--checkpoint-every", 3, "--copy-every", 2)
    run = jobs.start("--data", "grain", steps=STEPS, options=tiers)
    for number, step in enumerate((3, 6), 1):
        run.allow(step + 1)
        assert run.wait_for("saved", number, tier="persistent")["commit"] == step
    assert run.events("saved", tier="host memory")
    manager = run.status()["manager_pid"]
    run.kill_agent()
    wait_until(lambda: not run.carriers(), END_SECS, "the agent's processes to end")

    os.kill(manager, signal.SIGKILL)
    assert leto("run", *map(str, tiers), str(TINY)).returncode == 2  # what is there must not be overwritten by chance
    again = jobs.run("--data", "grain", "--steps", STEPS, job=run.job, options=(*tiers, "--resume", tmp_path / "saved"))
    assert again.finish() == 0, again.err
    assert "leto: resumed from step 6 of " in again.err
    whole = jobs.run("--data", "grain", "--steps", STEPS, options=("--shadow-level", 0))
    assert whole.finish() == 0
    assert again.result.final == whole.result.final


@pytest.mark.timeout(300)
def test_a_trainer_that_dies_on_its_way_back(jobs, tmp_path):
    """Twice before it has done again what was lost: one takeover, counted from the first failure."""
    run = jobs.start(steps=STEPS, options=("--recovery", "host-memory", "--copy-every", 4))
    run.allow(8)
    run.wait_for_step(7)
    run.wait_for("saved")
    run.allow(6)
    run.kill()
    run.wait_for("first_step", 2)
    run.kill()
    run.allow(STEPS + 1)
    assert run.finish() == 0, run.err
    assert run.result == undisturbed(jobs, "function")
    assert len(run.events("failure")) == 2
    (found,) = run.events("takeover")
    assert found["takeover_secs"] > sum(item["secs"] for item in run.events("fence"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shadow", [True, False])
def test_a_device_that_is_declared_inoperable_is_left_for_a_spare(jobs, tmp_path, shadow):
    """Other memory, the newest copy, the same batches: the result of a run in which nothing failed. The second time there is no spare left."""
    level = () if shadow else ("--shadow-level", 0)
    run = jobs.start("--data", "grain", steps=STEPS, options=("--copy-every", 2, "--spares", 1, *level))
    run.allow(7)
    run.wait_for_step(6)
    run.wait_for("saved")
    if shadow:
        run.wait_for_shadow()
    before = kept_memory(run)
    run.inject_on_the_way("inoperable", "update", when_ready=shadow)
    found = run.wait_for("takeover")
    assert (found["kind"], found["path"], found["plan"]) == ("inoperable", "spare", "restore")
    assert found["lost_steps"] >= 1
    after = kept_memory(run)
    assert set(after) == set(before)
    assert all(after[name] != before[name] for name in ("device.0", "host.0"))
    assert "the device cannot go on: declared inoperable by leto inject; a spare goes on from the newest copy" in run.err
    run.allow(9)
    run.inject_on_the_way("inoperable", "compute", when_ready=False)
    assert run.finish() == 3
    assert "no spare takes over: none is left" in run.err
    again = jobs.run("--data", "grain", "--steps", STEPS, "--limit", run.limit, job=run.job)
    again.finish_as_if_nothing_had_happened(STEPS, run, like=("--data", "grain"))


@pytest.mark.timeout(300)
def test_a_spare_begins_anew_before_the_first_copy(jobs):
    run = jobs.start(steps=STEPS, options=("--copy-every", 100, "--spares", 1))
    run.inject_on_the_way("inoperable", "update")
    found = run.wait_for("takeover")
    assert (found["path"], found["plan"]) == ("spare", "restore")
    assert found["lost_steps"] == found["step"] + 1
    assert "a spare begins anew, as no copy of the state has been taken yet" in run.err
    run.allow(STEPS + 1)
    assert run.finish() == 0, run.err
    assert run.result == alone("--steps", str(STEPS))


def kept_memory(run) -> dict[str, int]:
    """What is kept, by name: number of the file behind each descriptor."""
    from leto_jax.manager import runtime
    from leto_jax.manager.client import ManagerClient

    with ManagerClient(run.directory / runtime.SOCKET_NAME, "tool") as manager:
        found = {}
        for item in manager.list():
            with manager.open(item.name) as descriptor:
                found[item.name] = os.fstat(descriptor.fd).st_ino
        return found


@pytest.mark.timeout(300)
def test_a_state_beyond_repair_goes_on_from_a_copy(jobs, tmp_path):
    """Three pages of one group damaged while nobody writes: more than parity rebuilds."""
    run = jobs.start(steps=STEPS, options=("--copy-every", 2, "--spares", 1))
    run.allow(7)
    run.wait_for_step(6)
    run.wait_for("saved")
    run.wait_for_shadow()
    trainer = run.pid("trainer")
    os.kill(trainer, signal.SIGSTOP)
    damage_a_group(run)
    os.kill(trainer, signal.SIGKILL)
    run.allow(9)
    found = run.wait_for("takeover")
    assert (found["path"], found["plan"]) == ("spare", "restore")
    assert "pages are lost, parity rebuilds at most 2" in run.err
    run.allow(STEPS + 1)
    assert run.finish() == 0, run.err
    assert run.result == alone("--steps", str(STEPS))


def damage_a_group(run) -> None:
    """Overwrites a page in each of three rows of the first piece, wherever its lane lies now."""
    from leto_jax import layout as layouts
    from leto_jax.arena.memory import HostArena
    from leto_jax.manager import runtime
    from leto_jax.manager.client import ManagerClient
    from leto_jax.shadow.member import IDENTITY

    with ManagerClient(run.directory / runtime.SOCKET_NAME, "tool") as manager:
        with manager.get_blob(IDENTITY) as identity:
            plan = layouts.from_bytes(json.loads(identity.read())["layout"].encode())
        with manager.open("device.0") as descriptor:
            arena = HostArena(descriptor.fd, descriptor.nbytes, "device.0")
    piece, commit = plan.pieces[0], run.status()["step"]
    for row in range(3):
        arena.damage(plan.address(piece, commit) + row * piece.row_bytes, np.full(piece.page_bytes, 0xA5, np.uint8))
    arena.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recovery", "hope"), "--recovery: expected one of in-place, persistent, host-memory, host-memory+spare, none, found 'hope'"),
        (("--recovery", "persistent"), "--recovery persistent: expected --checkpoint-dir and --checkpoint-every with it"),
        (("--recovery", "host-memory"), "--recovery host-memory: expected --copy-every with it"),
        (("--checkpoint-every", "3"), "--checkpoint-every: expected --checkpoint-dir with it, found none"),
        (("--recovery", "none", "--copy-every", "3"), "--recovery none: expected neither --checkpoint-every nor --copy-every, since nothing would read the copies"),
        (("--copy-every", "soon"), "--copy-every: expected a number of steps such as 100, seconds such as 30s, or auto, found 'soon'"),
        (("--mttf-secs", "0"), "--mttf-secs: expected a positive number of seconds, found 0.0"),
        (("--spares", "1"), "--spares: expected --checkpoint-every or --copy-every with it, since a spare begins from a copy"),
        (("--keep", "0"), "--keep: expected 1 or more, found 0"),
    ],
)  # fmt: skip
def test_ways_to_go_on_that_cannot_work(words, message):
    done = leto("run", *words, TINY)
    assert (done.returncode, done.stderr) == (2, f"leto: {message}\n")


def test_memory_that_is_not_retained_cannot_be_damaged(jobs):
    run = jobs.start(steps=STEPS, options=("--recovery", "none"))
    run.allow(2)
    run.wait_for_step(1)
    done = leto("inject", "--job", run.job, "--kind", "page_loss")
    assert done.returncode == 2
    assert "--kind page_loss: there is no retained memory, this job runs with --recovery none" in done.stderr
    run.interrupt()
    assert run.finish() == 130


@pytest.mark.timeout(300)
def test_a_second_job_takes_its_programs_from_the_users_cache(jobs, tmp_path, monkeypatch):
    """Nothing is compiled for it but what the script itself jits; the result is the same, and so is a takeover's."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    first = jobs.run("--steps", STEPS, options=("--shadow-level", 0))
    assert first.finish() == 0, first.err
    (kept,) = (tmp_path / "cache").glob("leto-*.bin")
    before = kept.stat().st_mtime_ns
    run = jobs.start(steps=STEPS)
    run.allow(5)
    run.wait_for_step(4)
    run.wait_for_shadow()
    run.inject_on_the_way("sigkill", "update")
    run.wait_for("takeover")
    run.allow(STEPS + 1)
    assert run.finish() == 0, run.err
    assert run.result == first.result
    assert run.events("published")[0]["nbytes"] == first.events("published")[0]["nbytes"]
    assert kept.stat().st_mtime_ns == before
