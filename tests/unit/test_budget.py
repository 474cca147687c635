"""What a job needs of a GPU's memory. The numbers of a device are given here; XLA's are those of real programs, on the CPU."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest
from test_records import small_layout

from leto_jax import errors
from leto_jax.arena import cuda
from leto_jax.arena.rank import scratch_bytes
from leto_jax.rmu.programs import Program
from leto_jax.shadow import executables
from leto_jax.train import budget

GIB = 1 << 30


@pytest.fixture
def device(monkeypatch):
    def has(free_gib: float) -> None:
        monkeypatch.setattr(cuda, "memory", lambda gpu: (int(free_gib * GIB), 140 * GIB))

    return has


def program(temp: int, output: int, alias: int):
    found = types.SimpleNamespace(temp_size_in_bytes=temp, output_size_in_bytes=output, alias_size_in_bytes=alias)
    return types.SimpleNamespace(memory_analysis=lambda: found)


def test_what_is_written_in_place_is_not_counted_twice():
    assert budget.temporary_bytes({"a": program(5, 100, 100), "b": program(3, 10, 4), "c": program(0, 1, 9)}) == 9
    assert budget.temporary_bytes({"a": types.SimpleNamespace(memory_analysis=lambda: None)}) == 0


def test_the_table_is_printed_and_adds_up(device, capsys):
    device(100)
    layout = small_layout()
    budget.check(layout, {"a": program(2 * GIB, 0, 0)}, 3, "3")
    said = capsys.readouterr().err
    needed = layout.device_bytes + scratch_bytes(layout) + 4 * GIB + budget.CONTEXT_BYTES + budget.MARGIN_BYTES
    assert f"leto: GPU 3: 100.00 of 140.00 GiB are free, {needed / GIB:.2f} are needed" in said
    shadow = lambda level: {what: nbytes for what, nbytes, _ in budget.rows(layout, 2 * GIB, level)}["shadow"]
    assert [shadow(level) for level in ("auto", "1", "0")] == [0, 0, 0]  # auto: training goes on without the room for one
    assert shadow("2") == budget.CONTEXT_BYTES
    assert sum(nbytes for _, nbytes, _ in budget.rows(layout, 2 * GIB, "parked")) == needed


def test_too_little_is_refused_with_what_takes_what(device):
    device(1)
    with pytest.raises(
        errors.MemoryBudgetError, match=r"(?s)GPU 0: 1.00 of 140.00 GiB are free, .* are needed.*retained.*shadow.*take a smaller model"
    ):
        budget.check(small_layout(), {}, 0, "3")


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_an_output_that_is_not_in_place_is_found_when_the_program_is_built():
    form = jax.ShapeDtypeStruct((256,), jnp.float32)
    good = Program("good", lambda x, places: [x + 1], (form, [form]), 1)
    bad = Program("bad", lambda x, places: [(x + 1)[:128]], (form, [form]), 1)
    for item in (good, bad):
        lowered = jax.jit(item.function, donate_argnums=1, keep_unused=True).lower(*item.arguments)
        job = types.SimpleNamespace(programs={item.name: item})
        compiled = {item.name: lowered.compile()}
        if item is good:
            executables.check_in_place(job, compiled)
        else:
            with pytest.raises(
                errors.LayoutError, match="program 'bad': expected 1024 bytes of its outputs at their places, XLA has aliased 0"
            ):
                executables.check_in_place(job, compiled)
