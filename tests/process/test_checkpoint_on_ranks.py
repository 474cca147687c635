"""Checkpoints and copies of several ranks: whole states that plain Orbax reads, and that any number of ranks goes on from."""

from __future__ import annotations

import signal

import pytest
from jobs import END_SECS, leto, read_plainly, shapes, wait_until
from test_checkpoint import SHAPES
from test_training_on_ranks import finish, of_rank, start, undisturbed

from leto_jax.arena.memory import HostArena
from leto_jax.manager import runtime
from leto_jax.manager.client import ManagerClient
from leto_jax.records import Kind

pytestmark = pytest.mark.timeout(600)
STEPS = 8


def save(jobs, directory) -> None:
    """A checkpoint of step 6 of a job of two ranks, each with its half of the state, that gets a SIGTERM."""
    run = start(jobs, 2, STEPS, "--cut", "rows", options=("--shadow-level", 0, "--checkpoint-dir", directory))
    run.allow(5)
    run.wait_for_step(5)
    run.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "SIGTERM: finishing the step" in run.err, END_SECS, "the agent to hear of it")
    run.allow(7)
    assert run.finish() == 5, run.err
    (written,) = run.events("checkpoint")
    assert (written["rank"], written["commit"], written["error"]) == (0, 6, "")


def test_two_ranks_are_written_as_one_state_and_go_on_to_the_bit(jobs, tmp_path):
    """By a job that gets a SIGTERM; then by a fresh process when all trainers and the agent are dead."""
    save(jobs, tmp_path / "saved")
    shown = read_plainly(tmp_path / "saved")
    assert shown["step"] == 6
    assert shapes(shown, "params") == {f"['params']['{name}']": shape for name, shape in SHAPES.items()}
    second = start(jobs, 2, STEPS, "--cut", "rows", options=("--shadow-level", 0, "--resume", tmp_path / "saved"))
    second.wait_for_step(7)  # it waits in the body
    second.kill_agent()
    wait_until(lambda: not second.carriers(), END_SECS, "the agent's processes to end")
    written = leto("checkpoint", "--job", second.job, tmp_path / "again")
    assert (written.returncode, written.stdout) == (0, f"step 7 of job {second.job} is in {tmp_path / 'again'}\n"), written.stderr
    assert leto("stop", "--job", second.job).returncode == 0
    third = start(jobs, 2, STEPS, "--cut", "rows", options=("--shadow-level", 0, "--resume", tmp_path / "again"))
    third.allow(STEPS + 1)
    assert third.finish() == 0, third.err
    assert [run.err.count("leto: resumed from step ") for run in (second, third)] == [2, 2]
    for rank, whole in enumerate(undisturbed(jobs, 2, STEPS, "--cut", "rows")):
        assert of_rank(third.out, rank).final == whole.final
        assert (of_rank(second.out, rank).losses | of_rank(third.out, rank).losses) == {step: whole.losses[step] for step in (7, 8)}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_any_number_of_ranks_goes_on_from_a_state_and_writes_it_again(jobs, tmp_path, ranks):
    """At once, since the cost of a checkpoint is not known yet: what is written then is what was read, leaf by leaf."""
    save(jobs, tmp_path / "saved")
    tiers = ("--checkpoint-dir", tmp_path / "again", "--checkpoint-every", "auto")
    run = start(jobs, ranks, STEPS, "--cut", "tensor", options=("--shadow-level", 0, "--resume", tmp_path / "saved", *tiers))
    assert run.wait_for("saved")["commit"] == 6
    assert read_plainly(tmp_path / "again", 6) == read_plainly(tmp_path / "saved")
    run.allow(STEPS + 1)
    assert run.finish() == 0, run.err


def damage_the_newer(run, name: str) -> int:
    """Damages one byte of the newer one of two copies. Returns its step."""
    with ManagerClient(run.directory / runtime.SOCKET_NAME, "tool") as manager:
        found = []
        for item in manager.list():
            if item.name.startswith(name):
                with manager.open(item.name) as descriptor:
                    arena = HostArena(descriptor.fd, descriptor.nbytes, item.name)
                record = arena.record(0, Kind.COPY)
                found.append((record.step, arena))
    step, arena = max(found, key=lambda pair: pair[0])
    arena.damage(arena.nbytes - 4096, ~arena.view(arena.nbytes - 4096, 1))
    for _, each in found:
        each.close()
    return step


def test_a_spare_begins_from_the_newest_copy_that_is_good_on_all_ranks(jobs):
    run = start(jobs, 2, STEPS, "--cut", "rows", options=("--copy-every", 2, "--spares", 1))
    run.allow(6)
    run.wait_for_step(6)
    run.wait_for("saved", 6)  # of 2, 4 and 6 by each rank
    assert damage_the_newer(run, "copy.1.") == 6
    run.inject_on_the_way("inoperable", "update", rank=1)
    found = run.wait_for("takeover")
    assert (found["rank"], found["path"], found["plan"], found["lost_steps"]) == (1, "spare", "restore", found["step"] + 1 - 4)
    assert run.err.count("leto: resumed from step 4 of host memory") == 2
    assert "leto: checkpoint 6 in host memory is passed over: CheckpointError: " in run.err
    finish(run, jobs, 2, STEPS, "--cut", "rows")


MODES = {"host-memory+spare": ("--copy-every", 2, "--copies", 2), "persistent": ("--checkpoint-every", 2, "--checkpoint-dir", "saved")}


@pytest.mark.parametrize("recovery", ["host-memory+spare", pytest.param("persistent", marks=pytest.mark.slow)])
def test_ranks_with_plain_programs_go_on_from_a_copy(jobs, tmp_path, recovery):
    """As people train without retained memory; what they end with is what they end with where nothing failed."""
    more = [tmp_path / word if word == "saved" else word for word in MODES[recovery]]
    run = start(jobs, 2, STEPS, "--cut", "mixed", options=("--recovery", recovery, *more))
    run.allow(6)
    run.wait_for_step(6)
    run.wait_for("saved", 3, rank=0)
    if recovery.endswith("spare"):
        run.wait_for_shadow()
    run.kill(rank=1)
    run.allow(STEPS + 1)
    assert run.finish() == 0, run.err
    (found,) = run.events("takeover")
    assert (found["rank"], found["path"]) == (1, "shadow" if recovery.endswith("spare") else "cold")
    assert found["step"] - found["lost_steps"] in (4, 6)
    whole = start(jobs, 2, STEPS, "--cut", "mixed", options=("--recovery", "none"))
    whole.allow(STEPS + 1)
    assert whole.finish() == 0, whole.err
    assert [of_rank(run.out, rank) for rank in (0, 1)] == [of_rank(whole.out, rank) for rank in (0, 1)]
