"""Which level a shadow should wait at, from samples of free memory; and how the agent brings it there, over a fake NVML and a fake CUDA."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from fake_nvml import GPU_IS_LOST, FakeNvml, Gpu

from leto_jax import errors
from leto_jax.agent import leveller as levellers
from leto_jax.agent.headroom import Headroom
from leto_jax.agent.leveller import Leveller
from leto_jax.agent.levels import (
    ASIDE,
    FIRST_BYTES,
    LOADED,
    MARGIN_BYTES,
    MAX_PATIENCE_SECS,
    OUT,
    PATIENCE_SECS,
    Policy,
    Top,
)
from leto_jax.agent.parking import Parking
from leto_jax.config import SHADOW_LEVELS, Level

GIB = 1 << 30
ROOM = MARGIN_BYTES + FIRST_BYTES
SECS = 5.0


# The policy -------------------------------------------------------------------------------------------------------------------------


def tops(policy: Policy, *samples: tuple[float, int, str]) -> list[Top]:
    """Where the shadow should wait after each (seconds, free bytes, shadow)."""
    found = []
    for now, free, shadow in samples:
        policy.look(free, now, shadow)
        found.append(policy.top)
    return found


def test_a_ready_shadow_is_parked_before_memory_runs_out_and_comes_back_when_there_is_room_for_a_while():
    policy = Policy("auto")
    assert tops(policy, (0, ROOM, "none"), (1, ROOM, "loading"), (9, MARGIN_BYTES, "ready")) == [LOADED] * 3
    change = policy.look(MARGIN_BYTES - 1, 10, "ready")
    assert change == (ASIDE, "1.00 GiB are free")
    assert tops(policy, (11, ROOM - 1, "parked"), (12, ROOM, "parked"), (11 + PATIENCE_SECS, ROOM, "parked")) == [ASIDE] * 3
    change = policy.look(ROOM, 12 + PATIENCE_SECS, "parked")
    assert change == (LOADED, f"{ROOM / GIB:.2f} GiB and more have been free for {PATIENCE_SECS:g} s")


def test_room_must_last_and_each_way_up_waits_longer():
    policy, now, free = Policy("auto"), 0.0, ROOM
    for wait in (PATIENCE_SECS, 2 * PATIENCE_SECS, 4 * PATIENCE_SECS):
        policy.look(0, now, "ready")
        assert policy.top == ASIDE
        policy.look(free, now + 1, "parked")
        policy.look(ROOM - 1, now + 2, "parked")  # the count begins anew
        policy.look(free, now + 3, "parked")
        assert policy.look(free, now + 2.9 + wait, "parked") is None
        assert policy.look(free, now + 3 + wait, "parked").top == LOADED
        now += 10 + wait
    for _ in range(9):
        policy.look(0, now, "ready")
        policy.look(free, now, "parked")
        assert policy.look(free, now + MAX_PATIENCE_SECS, "parked").top == LOADED
        now += 2 * MAX_PATIENCE_SECS


@pytest.mark.parametrize(("shadow", "several"), [("loading", False), ("ready", True), ("none", False)])
def test_what_cannot_be_parked_is_replaced_by_one_that_holds_nothing(shadow, several):
    policy = Policy("auto", several)
    free = ROOM - 1 if shadow == "none" else MARGIN_BYTES - 1
    assert tops(policy, (0, free, shadow), (1, free, "loading"), (2, free, "ready")) == [OUT] * 3
    assert tops(policy, (3, ROOM, "ready"), (3 + PATIENCE_SECS, ROOM, "ready")) == [OUT, LOADED]


def test_a_shadow_is_given_the_room_that_the_last_one_took():
    policy = Policy("auto")
    tops(policy, (0, 20 * GIB, "none"), (1, 14 * GIB, "loading"), (2, 9 * GIB, "loading"), (3, 15 * GIB, "ready"))
    assert policy.shadow_bytes == 11 * GIB
    policy.reclaimed()
    needed = MARGIN_BYTES + 11 * GIB
    assert tops(policy, (4, needed - 1, "ready"), (99, needed, "ready"), (99 + PATIENCE_SECS, needed, "ready")) == [OUT, OUT, LOADED]
    tops(policy, (200, 20 * GIB, "loading"), (201, 19 * GIB, "ready"))
    assert policy.shadow_bytes == FIRST_BYTES


def test_after_a_parked_one_has_taken_over_the_next_waits_outside():
    policy = Policy("auto")
    policy.look(0, 0, "ready")
    assert policy.look(ROOM, 1, "none") == (OUT, "the parked shadow has taken over, or is dead")


def test_out_of_memory_and_a_failed_parking_lead_outside():
    policy = Policy("auto")
    assert policy.reclaimed() == (OUT, "the trainer ran out of memory")
    assert policy.reclaimed() is None
    policy = Policy("auto")
    policy.look(0, 0, "ready")
    assert policy.cannot_park("NOT_SUPPORTED") == (OUT, "a shadow cannot be parked: NOT_SUPPORTED")
    assert tops(policy, (1, ROOM, "ready"), (1 + PATIENCE_SECS, ROOM, "ready"), (90, 0, "ready")) == [OUT, LOADED, OUT]


@pytest.mark.parametrize("setting", SHADOW_LEVELS[1:])
def test_a_level_that_was_asked_for_stays(setting):
    policy = Policy(setting)
    wanted = ASIDE if setting == "parked" else Top(Level(int(setting)))
    assert tops(policy, (0, 0, "ready"), (1, 0, "none"), (99, 900 * GIB, "ready")) == [wanted] * 3
    assert policy.reclaimed() is None
    assert str(policy.top.shown) == setting


# The look at the memory -------------------------------------------------------------------------------------------------------------


def wait_until(condition) -> None:
    end = time.monotonic() + SECS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_the_fullest_gpu_counts():
    nvml = FakeNvml(Gpu(free=5 * GIB), Gpu(uuid="GPU-1", free=1 * GIB), Gpu(uuid="GPU-2", free=3 * GIB))
    watch = Headroom([0, 1], {"CUDA_VISIBLE_DEVICES": "0,2"}, nvml.library, period_secs=0.005)
    wait_until(lambda: watch.latest is not None)
    assert watch.latest.free == 3 * GIB
    nvml.gpus[0].free = 2 * GIB
    wait_until(lambda: watch.latest.free == 2 * GIB)
    watch.close()
    wait_until(lambda: nvml.opened == 0)


def test_an_nvml_that_fails_is_said():
    nvml = FakeNvml()
    nvml.gpus[0].errors["nvmlDeviceGetMemoryInfo"] = GPU_IS_LOST
    watch = Headroom([0], {}, nvml.library, period_secs=0.005)
    wait_until(lambda: watch.problem)
    assert watch.problem == "NVML, nvmlDeviceGetMemoryInfo: GPU is lost"
    wait_until(lambda: nvml.opened == 0)

    def missing():
        raise errors.DeviceError("NVML needs the package nvidia-ml-py")

    watch = Headroom([0], {}, missing)
    wait_until(lambda: watch.problem)
    assert (watch.problem, watch.latest) == ("NVML needs the package nvidia-ml-py", None)


# Carrying it out --------------------------------------------------------------------------------------------------------------------


class Shadows:
    """What of a generation is looked at."""

    def __init__(self, level: int, *pids: int):
        self.children = [SimpleNamespace(pid=pid, parked=False) for pid in pids]
        self.level, self.ready = level, True

    def rising(self) -> None:
        self.ready = False


class World:
    """A leveller, and what it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, setting: str = "auto", ranks: int = 1):
        self.nvml, self.done, self.problem = FakeNvml(), [], ""
        self.go = threading.Event()
        self.go.set()
        monkeypatch.setattr(levellers, "Headroom", lambda gpus, environ: Headroom(gpus, environ, self.nvml.library, 0.002))
        monkeypatch.setattr(
            levellers, "Parking", lambda: Parking(lambda pid: self._move("park", pid), lambda pid: self._move("unpark", pid))
        )
        monkeypatch.setattr("leto_jax.agent.levels.PATIENCE_SECS", 0.0)
        journal = SimpleNamespace(write=lambda event, **fields: self.done.append((event, fields["level"])))
        tell = lambda shadows, message: self.done.append((message["op"], message["level"]))
        self.leveller = Leveller(setting, ranks, journal, lambda text: self.done.append(("say", text)), tell)
        self.leveller.watch([0], {})

    def _move(self, what: str, pid: int) -> None:
        self.go.wait(SECS)
        if self.problem:
            raise errors.DeviceError(self.problem)
        self.done.append((what, pid))

    def free(self, nbytes: int, shadows: Shadows | None, until: int) -> str:
        """Sets what is free, and polls until `until` things are done."""
        self.nvml.gpus[0].free = nbytes
        end, reason = time.monotonic() + SECS, ""
        while not reason and len(self.done) < until:
            assert time.monotonic() < end, self.done
            reason = self.leveller.poll(shadows)
        while self.leveller._parking.moving and self.go.is_set() and not reason:
            reason = self.leveller.poll(shadows)
        return reason


@pytest.fixture
def world(monkeypatch) -> Iterator[World]:
    found = World(monkeypatch)
    yield found
    found.leveller.close()


def test_the_agent_parks_and_brings_back(world):
    shadows = Shadows(3, 7)
    assert world.free(0, shadows, 2) == ""
    assert world.done == [("level", "parked"), ("park", 7)]
    assert shadows.children[0].parked
    assert world.free(ROOM, shadows, 4) == ""
    assert world.done[2:] == [("level", 3), ("unpark", 7)]
    assert not shadows.children[0].parked


def test_the_agent_ends_a_shadow_that_loads_and_later_lets_the_next_one_rise(world):
    shadows = Shadows(0, 7)
    shadows.ready = False
    assert world.free(0, shadows, 9) == "0.00 GiB are free"
    assert world.leveller.top == OUT
    shadows = Shadows(1, 8)
    assert world.leveller.ready(shadows) == ""
    assert world.free(ROOM, shadows, 3) == ""
    assert world.done == [("level", 1), ("level", 3), ("rise", 3)]
    assert not shadows.ready


def test_room_that_came_before_the_shadow_was_ready_counts_once_it_is(world):
    world.leveller.reclaimed()
    loading = Shadows(0, 7)
    loading.ready = False
    world.free(ROOM, loading, 2)
    assert world.done == [("level", 1), ("level", 3)]
    assert world.leveller.ready(Shadows(1, 7)) == ""
    assert world.done[2:] == [("rise", 3)]


def test_a_parked_one_is_brought_back_before_it_is_promoted_also_from_half_way(world):
    shadows = Shadows(3, 7)
    world.go.clear()
    world.free(0, shadows, 1)
    threading.Timer(0.05, world.go.set).start()
    world.leveller.bring_back(shadows)
    assert world.done == [("level", "parked"), ("park", 7), ("unpark", 7)]
    assert not shadows.children[0].parked
    world.leveller.bring_back(shadows)
    assert len(world.done) == 3


def test_a_parking_that_fails_ends_the_shadow_and_is_not_tried_again(world):
    world.problem = "cuCheckpointProcessCheckpoint: CUDA_ERROR_NOT_SUPPORTED"
    shadows = Shadows(3, 7)
    reason = world.free(0, shadows, 9)
    assert reason == f"a shadow cannot be parked: process 7: {world.problem}"
    assert [item for item in world.done if item[0] == "level"] == [("level", "parked"), ("level", 1)]
    world.free(ROOM, Shadows(1, 8), 4)
    assert world.free(0, Shadows(3, 8), 9) == "0.00 GiB are free"
    assert world.leveller.top == OUT


def test_a_process_that_died_on_its_way_is_none_of_the_next_ones_business(world):
    world.go.clear()
    world.free(0, Shadows(3, 7), 1)
    world.problem = "cuCheckpointProcessCheckpoint: CUDA_ERROR_INVALID_VALUE"
    world.go.set()
    assert world.free(0, Shadows(3, 8), 9) == "the parked shadow has taken over, or is dead"
    world.leveller.bring_back(Shadows(1, 8))
    assert world.done == [("level", "parked"), ("level", 1)]


def test_where_it_was_asked_for_a_shadow_is_parked_as_soon_as_it_is_ready(monkeypatch):
    world = World(monkeypatch, "parked")
    shadows = Shadows(3, 7)
    assert world.leveller.ready(shadows) == ""
    assert world.free(0, shadows, 1) == ""
    assert shadows.children[0].parked
    assert world.nvml.opened == 0  # nothing is to be chosen, so nobody looks


def test_an_nvml_that_is_not_there_leaves_the_shadow_as_it_is(world):
    world.nvml.gpus[0].errors["nvmlDeviceGetMemoryInfo"] = GPU_IS_LOST
    assert world.free(0, Shadows(3, 7), 1) == ""
    assert world.done == [
        ("say", "free memory cannot be watched, the shadow stays at its level: NVML, nvmlDeviceGetMemoryInfo: GPU is lost")
    ]
    assert world.leveller.top == LOADED
