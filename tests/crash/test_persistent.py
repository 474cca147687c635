"""The persistent tier: what is restored is what was saved, or an older version that is, or nothing with a reason. Never anything else."""

from __future__ import annotations

import dataclasses
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from harness import STEPS, VARIANTS, World, check, promote, variant

from leto_jax import errors
from leto_jax.checkpoint import frozen, persistent
from leto_jax.checkpoint.frozen import Frozen
from leto_jax.rmu.recovery import Action

SEED = 77


def state_at(v: harness.Variant, step: int) -> Frozen:
    """The state of a run in which nothing fails, frozen at `step`."""
    with World(v.layout) as world:
        process = promote(v, world)
        process.attach()
        process.train(step)
        found = frozen.copy(step, functools.partial(process.retained.arrays, commit=step), b"position %d" % step)
        process.close()
        return found


def equal(a: Frozen, b: Frozen) -> bool:
    same = all(
        x.tobytes() == y.tobytes() and x.dtype == y.dtype and x.shape == y.shape
        for name in frozen.GROUPS
        for x, y in zip(a.leaves[name], b.leaves[name], strict=True)
    )
    return same and (a.step, a.positions) == (b.step, b.positions)


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """A directory with versions 1 and 2."""
    directory = tmp_path_factory.mktemp("two")
    for step in (1, 2):
        persistent.save(frozen.form_of(variant("adamw").job), state_at(variant("adamw"), step), directory)
    return directory


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_restored_trains_on_as_if_it_had_never_been_away(name, step, tmp_path):
    v = variant(name)
    saved = state_at(v, step)
    persistent.save(frozen.form_of(v.job), saved, tmp_path / "saved")
    found = persistent.restore(frozen.form_of(v.job), tmp_path / "saved")
    assert equal(found, saved)
    with World(v.layout) as world:
        process = promote(v, world)
        process.transaction.fill(found.step, *found.for_fill(v.job))
        process.commit = found.step
        process.train(STEPS)
        process.finish()
        process.close()
        check(v, world, STEPS, padding=False)
        again = promote(v, world)
        assert again.attach().plan.action is Action.REDO
        again.close()


def test_the_newest_version_is_taken_and_as_many_are_kept_as_asked_for(tmp_path):
    v = variant("adamw")
    for step in (1, 2, 3):
        persistent.save(frozen.form_of(v.job), state_at(v, step), tmp_path / "saved", keep=2)
    assert persistent.versions(tmp_path / "saved") == [3, 2]
    assert persistent.restore(frozen.form_of(v.job), tmp_path / "saved").step == 3
    assert persistent.save(frozen.form_of(v.job), state_at(v, 3), tmp_path / "saved") == tmp_path / "saved" / "3"  # again is harmless


def files_of(version: Path) -> list[Path]:
    return sorted(path for path in version.rglob("*") if path.is_file())


# What tensorstore still had in flight when Orbax gave up on a read comes back to an event loop that is closed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["damaged", "cut short", "deleted"])
def test_a_damaged_version_is_written_anew_when_its_step_comes_once_more(two, tmp_path):
    v = variant("adamw")
    shutil.copytree(two, tmp_path / "saved")
    for path in (tmp_path / "saved" / "2" / "state").rglob("*"):
        if path.is_file() and path.stat().st_size > 256:
            path.write_bytes(path.read_bytes()[:-8] + b"\xff" * 8)
    form, said = frozen.form_of(v.job), []
    assert persistent.restore(form, tmp_path / "saved", said.append).step == 1
    assert said
    persistent.save(form, state_at(v, 2), tmp_path / "saved")
    assert equal(persistent.restore(form, tmp_path / "saved", lambda text: pytest.fail(text)), state_at(v, 2))


def test_a_damaged_version_is_passed_over_for_the_next_older_one(two, how, tmp_path):
    """Each file of the newest version in turn, in several places."""
    v, rng, warned = variant("adamw"), random.Random(SEED), 0
    good = {step: state_at(v, step) for step in (1, 2)}
    for file in files_of(two / "2"):
        copy = tmp_path / "copy"
        shutil.copytree(two, copy)
        target = copy / "2" / file.relative_to(two / "2")
        content = bytearray(target.read_bytes())
        if how == "deleted":
            target.unlink()
        elif how == "cut short":
            target.write_bytes(content[: len(content) // 2])
        else:
            for place in [0, len(content) - 1, *(rng.randrange(len(content)) for _ in range(3))] if content else []:
                content[place] ^= 1 << rng.randrange(8)
            target.write_bytes(content)
        warnings: list[str] = []
        found = persistent.restore(frozen.form_of(v.job), copy, warnings.append)
        assert equal(found, good[found.step]), target  # it may not have mattered; it must never be wrong
        assert (
            found.step == 2
            or any("checkpoint 2 in" in text and "is passed over" in text for text in warnings)
            or 2 not in persistent.versions(copy)
        )
        warned += found.step == 1
        shutil.rmtree(copy)
    assert warned


def test_nothing_that_is_good(two, tmp_path):
    v = variant("adamw")
    shutil.copytree(two, tmp_path / "bad")
    for version in ("1", "2"):
        for file in files_of(tmp_path / "bad" / version / "metadata"):
            file.write_bytes(b"{}")
    with pytest.raises(errors.CheckpointError, match=r"no version in .* can be restored \(found 2, 1\); name another directory"):
        persistent.restore(frozen.form_of(v.job), tmp_path / "bad", lambda text: None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.CheckpointError, match="there is none"):
        persistent.restore(frozen.form_of(v.job), tmp_path / "empty")
    with pytest.raises(errors.CheckpointError, match=r"expected a directory of checkpoints at .*, found nothing"):
        persistent.restore(frozen.form_of(v.job), tmp_path / "nowhere")


def test_a_newer_format_is_refused(two, tmp_path, monkeypatch):
    monkeypatch.setattr(persistent, "FORMAT", 2)
    warnings: list[str] = []
    with pytest.raises(errors.CheckpointError):
        persistent.restore(frozen.form_of(variant("adamw").job), two, warnings.append)
    assert "expected format 2, found 1; use the version of leto_jax that wrote it" in warnings[0]


def test_another_model_is_refused_with_its_first_leaf(two):
    with pytest.raises(
        errors.LayoutError, match=r"holds opt_state.*, this script has .*; resume with the model and optimizer that it was saved with"
    ):
        persistent.restore(frozen.form_of(variant("lamb").job), two)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(errors.CheckpointError, match="cannot be written to"):
        persistent.save(frozen.form_of(variant("adamw").job), state_at(variant("adamw"), 1), tmp_path / "locked" / "saved")


SAVER = """
import sys, numpy as np
sys.path[:0] = sys.argv[2:]
from test_persistent import large
from leto_jax.checkpoint import frozen, persistent
job, make = large()
print("ready", flush=True)
for step in range(1, 1000):
    persistent.save(frozen.form_of(job), make(step), sys.argv[1], keep=3)
    print(step, flush=True)
"""


def large():
    """A job, and states of it whose every leaf says which step it is."""
    job = variant("adamw").job

    def make(step: int) -> Frozen:
        leaves = {
            name: [np.full(spec.shape, step % 251, jnp.dtype(spec.dtype)) for spec in group]
            for name, group in frozen.form_of(job).specs.items()
        }
        return Frozen(step, leaves, (b"%d" % step,))

    return job, make


@pytest.mark.timeout(300)
def test_kill_9_in_the_middle_of_a_save(tmp_path, seed):
    """A version is complete or absent, wherever the process dies."""
    rng, (job, make) = random.Random(seed), large()
    here = str(Path(__file__).parent)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path / "saved"), here], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        done = [process.stdout.readline() for _ in range(3)]  # ready, and two versions at least
        assert done[0] == "ready\n"
        time.sleep(rng.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        rest = process.communicate()[0].split()
        last = int(rest[-1] if rest else done[-1])
        found = persistent.restore(frozen.form_of(job), tmp_path / "saved", lambda text: pytest.fail(text))
        assert found.step in (last, last + 1)
        assert equal(found, make(found.step))
        shutil.rmtree(tmp_path / "saved")


@pytest.mark.parametrize("item", ["default", "state"])
def test_a_checkpoint_that_plain_orbax_has_written_is_resumed_from(tmp_path, item):
    """Containers are other ones (Orbax knows no named tuples), leaves are found by their paths."""
    v = variant("adamw")
    kept, form = state_at(v, 2), frozen.form_of(v.job)
    tree = {name: jax.tree_util.tree_unflatten(form.trees[name], kept.leaves[name]) for name in frozen.GROUPS if kept.leaves[name]} | {
        "step": np.int32(2)
    }
    arrays = jax.tree.map(lambda x: x if x.size else None, tree)
    with ocp.CheckpointManager(tmp_path / "theirs", item_names=None if item == "default" else (item,)) as manager:
        args = ocp.args.StandardSave(arrays)
        manager.save(2, args=args if item == "default" else ocp.args.Composite(**{item: args}))
        manager.wait_until_finished()
    found = persistent.restore(form, tmp_path / "theirs")
    assert equal(found, dataclasses.replace(kept, positions=(b"",)))
    with pytest.raises(errors.LayoutError, match=r"theirs/2 (has no|holds) "):
        persistent.restore(frozen.form_of(variant("lamb").job), tmp_path / "theirs")


def test_a_checkpoint_of_something_else_is_no_state(tmp_path):
    with ocp.CheckpointManager(tmp_path / "theirs") as manager:
        manager.save(1, args=ocp.args.StandardSave({"weights": np.ones(3)}))
        manager.wait_until_finished()
    said: list[str] = []
    with pytest.raises(errors.CheckpointError, match="no version in"):
        persistent.restore(frozen.form_of(variant("adamw").job), tmp_path / "theirs", said.append)
    assert "expected an item with 'params' and 'opt_state' at its top, found default" in said[0]
