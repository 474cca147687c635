"""When copies are due, and what a keeper does with them."""

from __future__ import annotations

import threading

import jax
import numpy as np
import pytest

from leto_jax import errors
from leto_jax.checkpoint import frozen, keeper, persistent
from leto_jax.checkpoint.frozen import Form
from leto_jax.checkpoint.interval import daly_interval_secs
from leto_jax.checkpoint.keeper import Keeper, Schedule
from leto_jax.config import Interval, Process, Tiers
from leto_jax.layout import LeafSpec

FORM = Form(
    {"params": [LeafSpec("['w']", (4,), "float32", "float32")], "opt_state": [], "companions": [], "extras": []},
    {
        name: jax.tree_util.tree_structure(tree)
        for name, tree in {"params": {"w": 0}, "opt_state": (), "companions": {}, "extras": {}}.items()
    },
)


def leaves_at(step: int):
    return {"params": [np.full(4, step, np.float32)], "opt_state": [], "companions": [], "extras": []}.__getitem__


@pytest.mark.parametrize(
    ("text", "interval"), [("100", Interval(steps=100)), ("30s", Interval(secs=30.0)), ("0.5s", Interval(secs=0.5)), ("auto", Interval())]
)
def test_intervals(text, interval):
    assert Interval.parse(text, "--x") == interval


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "0s", "s", "often", "-1s", "nans"])
def test_what_is_no_interval_is_refused(text):
    with pytest.raises(
        errors.UsageError, match="--checkpoint-every: expected a number of steps such as 100, seconds such as 30s, or auto, found"
    ):
        Interval.parse(text, "--checkpoint-every")


def due_steps(every: str, step_secs: float, cost_secs: float, steps: int, first: int = 0, mttf_secs: float = 100.0) -> list[int]:
    schedule, now, found = Schedule(Interval.parse(every, "--x"), mttf_secs, first, 0.0), 0.0, []
    for step in range(first, steps + 1):
        if schedule.due(step, now):
            now += cost_secs
            schedule.taken(step, now, cost_secs)
            found.append(step)
        now += step_secs
    return found


def test_by_steps():
    assert due_steps("3", 1.0, 0.5, 10) == [3, 6, 9]
    assert due_steps("3", 1.0, 0.5, 10, first=4) == [7, 10]


def test_by_seconds():
    assert due_steps("2.5s", 1.0, 0.0, 10) == [3, 6, 9]


def test_tuned():
    """The first at once, to know the cost; then as Daly has it."""
    interval = daly_interval_secs(0.5, 100.0)
    found = due_steps("auto", 1.0, 0.5, 60)
    assert found[0] == 1
    assert np.all(np.diff(found) == np.ceil(interval))


def whole(step, leaves, position):
    state = frozen.copy(step, leaves, position)
    return lambda: state


def serve(made: Keeper, step: int) -> None:
    made.take(made.due(step), step, leaves_at(step), lambda: b"")


def keep(tmp_path, monkeypatch, asynchronous: bool):
    told, gate = [], threading.Event()
    real = persistent.save

    def slow(*arguments):
        assert gate.wait(30)
        return real(*arguments)

    if asynchronous:
        monkeypatch.setattr(persistent, "save", slow)
    tiers = Tiers(str(tmp_path / "saved"), "1", keep=2, asynchronous=asynchronous)
    return Keeper(FORM, tiers, 0, None, whole, lambda **fields: told.append(fields)), told, gate


def test_training_goes_on_beside_a_checkpoint_and_none_is_begun_meanwhile(tmp_path, monkeypatch):
    made, told, gate = keep(tmp_path, monkeypatch, asynchronous=True)
    for step in range(4):
        serve(made, step)
    assert told == []
    gate.set()
    made.close()
    assert [item["commit"] for item in told] == [1]
    assert told[0]["stall_secs"] < told[0]["secs"]
    found = keeper.newest(FORM, None, [str(tmp_path / "saved"), str(tmp_path / "nowhere")])
    assert found is not None
    assert (found[0].step, found[0].leaves["params"][0].tolist()) == (1, [1.0] * 4)


def test_a_synchronous_one_is_waited_for(tmp_path, monkeypatch):
    made, told, _ = keep(tmp_path, monkeypatch, asynchronous=False)
    for step in range(4):
        serve(made, step)
    assert [item["commit"] for item in told] == [1, 2, 3]
    assert all(item["stall_secs"] == item["secs"] > 0 for item in told)
    assert persistent.versions(tmp_path / "saved") == [3, 2]
    made.close()


def test_a_copy_that_cannot_be_written_is_said_and_training_goes_on(tmp_path, monkeypatch, capsys):
    made, told, _ = keep(tmp_path, monkeypatch, asynchronous=False)
    (tmp_path / "saved").write_text("in the way")
    serve(made, 0)
    serve(made, 1)
    assert "the checkpoint of step 1 cannot be written" in told[0]["error"]
    assert "leto: no copy of step 1 (persistent): the checkpoint of step 1 cannot be written" in capsys.readouterr().err
    made.close()


def test_what_nobody_expected_reaches_the_trainer(tmp_path, monkeypatch):
    made, _, gate = keep(tmp_path, monkeypatch, asynchronous=True)
    monkeypatch.setattr(persistent, "save", lambda *arguments: 1 / 0)
    serve(made, 0)
    serve(made, 1)
    gate.set()
    with pytest.raises(ZeroDivisionError):
        made.close()


def test_a_process_is_told_of_its_tiers(tmp_path):
    process = Process(
        "j", "trainer", 0, tmp_path / "s", 2, tmp_path, recovery="host-memory", tiers=Tiers("d", "30s", 3, False, "auto", 2, 60.0)
    )
    assert Process.from_environ(process.environ()) == process
