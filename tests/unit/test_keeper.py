"""When copies are due, and what a keeper does with them."""

from __future__ import annotations

import json
import os
import threading

import jax
import numpy as np
import pytest

from leto_jax import errors
from leto_jax.arena.control import BYTES, Control
from leto_jax.arena.memory import HostArena
from leto_jax.checkpoint import frozen, hostmemory, keeper, persistent, stage
from leto_jax.checkpoint.announced import Announced
from leto_jax.checkpoint.frozen import Form
from leto_jax.checkpoint.interval import daly_interval_secs
from leto_jax.checkpoint.keeper import Keeper, Schedule
from leto_jax.checkpoint.stage import Stage
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


class Others:
    """This rank is one of several whose copies are known."""

    rank, count = 0, 2

    def __init__(self, held: list[int], lacks: int | None = None):
        self.held, self.lacks, self.asked = held, lacks, []

    def gather(self, what: str, data: bytes, secs: float) -> list[bytes]:
        return [data, json.dumps(self.held).encode()]

    def agree(self, what: str, mine: str, secs: float) -> str:
        self.asked.append(what)
        return mine or ("rank 1: it has none that is good" if what.endswith(f" {self.lacks}") else "")


def saved(tmp_path, *steps: int) -> str:
    for step in steps:
        persistent.save(FORM, frozen.copy(step, leaves_at(step), b""), tmp_path / "saved")
    return str(tmp_path / "saved")


def test_the_newest_copy_is_the_largest_in_the_intersection(tmp_path):
    """Not the least of the newest ones: rank 0 has none of step 9."""
    ranks = Others([8, 9])
    found = keeper.newest(FORM, None, [saved(tmp_path, 8, 10)], ranks)
    assert found is not None
    assert (found[0].step, ranks.asked) == (8, ["the copy of step 8"])


def test_what_is_damaged_on_another_rank_is_passed_over_by_all(tmp_path):
    directory = saved(tmp_path, 8, 10)
    found = keeper.newest(FORM, None, [directory], Others([8, 10], lacks=10))
    assert found is not None
    assert found[0].step == 8
    assert keeper.newest(FORM, None, [directory], Others([7])) is None


def test_rank_0_says_one_step_ahead_what_all_take(tmp_path):
    with open(tmp_path / "control", "w+b") as file:
        file.truncate(BYTES)
        first, other = (Announced(Control(file.fileno()), ("request", "host memory", "persistent")) for _ in range(2))
    first.say(4, ())
    assert (first.take(4), other.take(5)) == (set(), set())
    first.say(5, {"persistent", "request"})
    first.say(6, {"host memory"})  # rank 0 has gone on into step 6, the other one has not looked yet
    assert other.take(5) == {"persistent", "request"}
    assert other.take(5) == set()  # once
    assert other.take(6) == first.take(6) == {"host memory"}
    assert other.take(8) == set()


def shards(count: int, epoch: int = 3, wait_secs: float = 5.0) -> list[Stage]:
    arenas = []
    for rank in range(count):
        fd = os.memfd_create(stage.name(rank))
        os.ftruncate(fd, hostmemory.nbytes(FORM))
        arenas.append(HostArena(fd, hostmemory.nbytes(FORM), stage.name(rank)))
        os.close(fd)
    return [Stage(FORM, arenas if rank == 0 else [arenas[rank]], epoch, wait_secs) for rank in range(count)]


def test_a_whole_state_waits_for_the_shards_of_all_ranks():
    first, second = shards(2)
    joined = first.freeze(7, leaves_at(7), b"a")
    assert second.freeze(7, leaves_at(7), b"b")() is None
    whole = joined()
    assert whole is not None
    assert (whole.step, whole.leaves["params"][0].tolist()) == (7, [7.0] * 4)


def test_a_rank_whose_shards_do_not_come_is_named():
    first, second, _ = shards(3, wait_secs=0.2)
    second.freeze(6, leaves_at(6), b"")()  # of another step
    with pytest.raises(errors.DeadlineError, match=r"checkpoint 7: expected the shards of all ranks within 0 s, none came from rank 1, 2"):
        first.freeze(7, leaves_at(7), b"")()
