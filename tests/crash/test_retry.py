"""A step that runs out of memory at any store is done in the second try, in the same process, to the bit; or its error is raised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import harness
import jax
import pytest
from harness import KEY, Incarnation, World, check, crash, promote, variant

from leto_jax import faults
from leto_jax.arena.control import Control
from leto_jax.faults import Moment, Phase, Point
from leto_jax.rmu import rollforward
from leto_jax.rmu.device import transaction_type
from leto_jax.rmu.retained import Retained
from leto_jax.train.retry import Retry

PLACES = [
    (Point.GRADIENTS_CLEAR, 0, "redo"),
    (Point.GRADIENTS_STORED, 0, "redo"),
    (Point.INTENT, 1, "roll_forward"),
    (Point.PIECE, 1, "roll_forward"),
    (Point.MARK, 0, "roll_forward"),
    (Point.COMMIT, 1, "redo"),  # of the step after it, that is: this one is done
]


class Trainer:
    """One incarnation as a session has it, the agent's part included."""

    def __init__(self, v: harness.Variant, world: World, control: Control):
        self.variant, self.control = v, control
        self.process: Incarnation = promote(v, world)
        self.process.attach()
        self.said: list[dict] = []
        self.retry = Retry(self, control, lambda: self.process.transaction.abandon(), self._attach)

    def event(self, name: str, **fields: object) -> None:
        self.said.append({"event": name, **fields})

    def reclaim(self, step: int) -> int:
        self.event("reclaim", step=step)
        return self.process.metadata.raise_epoch()

    def _attach(self, epoch: int) -> rollforward.Recovered:
        process, arenas = self.process, self.process.arenas
        process.retained = Retained(self.variant.job, arenas.device, arenas.host, process.metadata, jax.devices()[0], arenas.peer)
        process.transaction = transaction_type(self.variant.job)(process.retained, self.variant.run, epoch, wait_for_peer=True)
        return rollforward.recover(process.retained, process.transaction)

    def step(self, number: int) -> int:
        batch = self.variant.batch(number)
        lost = self.retry.run(number, lambda: self.process.transaction.step(number, batch, jax.random.key_data(KEY)))
        self.process.commit = number
        return lost


def out_of_memory() -> Exception:
    return jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.\nmore")


@contextlib.contextmanager
def failing_at(point: Point, number: int, times: int = 1, error: Callable[[], BaseException] = out_of_memory):
    """The `number`-th store of its kind is done, and then an error comes; so it does the next `times - 1` times."""
    count = -number

    def hook(found: Point, moment: Moment, nbytes: int) -> bool:
        nonlocal count
        if found is point and moment is Moment.AFTER:
            count += 1
            if 0 < count <= times:
                raise error()
        return False

    with faults.armed(hook):
        yield


@pytest.mark.parametrize("name", ["adamw", "placed"])
@pytest.mark.parametrize(("point", "number", "action"), PLACES)
def test_the_step_is_done_in_the_second_try(control, name, point, number, action):
    v = variant(name)
    with World(v.layout) as world:
        trainer = Trainer(v, world, control)
        assert trainer.step(1) == 0
        epoch = trainer.process.metadata.epoch
        with failing_at(point, number):
            assert trainer.step(2) > 0
        assert trainer.process.metadata.epoch == trainer.process.transaction.epoch == epoch + 1
        assert [item["event"] for item in trainer.said] == ["reclaim", "retried"]
        assert (trainer.said[1]["step"], trainer.said[1]["action"]) == (2, action)
        assert trainer.said[1]["reason"] == str(out_of_memory()).splitlines()[0]
        assert trainer.step(3) == 0
        trainer.process.finish()
        trainer.process.close()
        check(v, world, 3)


def test_each_step_has_one_second_try(control):
    v = variant("adamw")
    with World(v.layout) as world:
        trainer = Trainer(v, world, control)
        for step in (1, 2):
            with failing_at(Point.EXTRAS, 0):
                trainer.step(step)
        with failing_at(Point.EXTRAS, 0, times=2), pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            trainer.step(3)
        assert [item["event"] for item in trainer.said] == ["reclaim", "retried", "reclaim", "retried", "reclaim"]
        assert control.phase is Phase.TAKEOVER
        trainer.process.close()
        promote(v, world).close()
        harness.life(v, world, 3)  # and the next process does it
        check(v, world, 3)


def test_another_error_is_none_of_its_business(control):
    v = variant("adamw")
    broken = lambda: jax.errors.JaxRuntimeError("INTERNAL: the device is gone")
    with World(v.layout) as world:
        trainer = Trainer(v, world, control)
        with failing_at(Point.EXTRAS, 0, error=broken), pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
            trainer.step(1)
        assert trainer.said == []
        trainer.process.close()


def test_a_process_that_dies_between_the_tries_leaves_what_the_next_one_reads(control):
    """At every store of the way to the second try, and of the second try itself."""
    v = variant("adamw")
    with World(v.layout) as world:
        trainer = Trainer(v, world, control)
        trainer.step(1)
        trainer.process.finish()
        trainer.process.close()
        before = world.content()
    stores = 0
    while True:
        with World(v.layout, before) as world:
            trainer = Trainer(v, world, control)
            with contextlib.suppress(jax.errors.JaxRuntimeError), failing_at(Point.PIECE, 1):
                trainer.process.transaction.step(2, v.batch(2), jax.random.key_data(KEY))
            killed = crash(lambda trainer=trainer: trainer._attach(trainer.reclaim(2)), stores)
            trainer.process.close()
            harness.life(v, world, 3)
            check(v, world, 3)
        if killed is None:
            break
        stores += 7  # not each one: `test_matrix` has them all for a takeover, which this is
    assert stores > 20
