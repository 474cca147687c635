"""What protection costs on the CPU, and how long a takeover takes, for a 10M-parameter language model. Ratios are measured in one run.

    uv run python experiments/bench_cpu.py [--json FILE] [--quick]

Three parts, one after the other, with nothing else running:
  step      a plain donated jit of value_and_grad + tx.update + apply_updates, without leto_jax, and the protected step, in turn
  encode    parity rows of the state through XLA, beside ISA-L where libisal is installed
  takeover  `leto run experiments/train_lm.py`, killed again and again as soon as a shadow is ready, at every phase in turn
"""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any

import _takeovers
import jax
import numpy as np
import optax
import train_lm
import typer
from _result import JsonOption, cpu_device, git_commit, write_result

import leto_jax as leto
from leto_jax.arena.rank import private_arenas
from leto_jax.goodput import report
from leto_jax.rmp import codec, matrix
from leto_jax.rmu import programs
from leto_jax.rmu.retained import Retained
from leto_jax.rmu.transaction import Transaction
from leto_jax.shadow import executables

SHAPE = _takeovers.SHAPE_10M


def step_times(rounds: int, seed: int) -> dict[str, Any]:
    """Seconds of a plain and of a protected step, measured in turn: plain, protected, plain, ... ratio: median of the pairs' ratios."""
    init, loss_fn = leto.flax.nnx(
        lambda rngs: train_lm.ByteLM(SHAPE["width"], SHAPE["depth"], SHAPE["heads"], SHAPE["context"], 0.1, rngs=rngs), train_lm.loss
    )
    tx = train_lm.optimizer(1000, 1e-3)
    batches = train_lm.windows(train_lm.read_corpus(), SHAPE["batch"], SHAPE["context"], seed)
    key = jax.random.key(seed)

    @jax.jit
    def fresh(key):
        params, extras = init(key)
        return params, tx.init(params), extras

    def plain(params, opt_state, extras, batch, key):
        (loss, (extras, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, extras, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, extras, loss

    run_plain = jax.jit(plain, donate_argnums=(0, 1, 2))
    state = fresh(key)

    job = programs.trace(init, leto.TrainStep(loss_fn, tx).spec, batches(1), key, leto.Protection())
    run = executables.compile_all(executables.lower(job))
    arenas = private_arenas(job.layout)
    retained = Retained(job, arenas.device, arenas.host, arenas.metadata, jax.local_devices()[0])
    marks: list[tuple[float, str]] = []
    transaction = Transaction(retained, run, 1, lambda phase, step, chunk: marks.append((time.perf_counter(), phase.value)))
    key_data = jax.random.key_data(key)
    transaction.fill(0, *run["init"](key_data))

    plain_secs, protected_secs, update_secs = [], [], []
    for step in range(1, rounds + 1):
        batch = batches(step)
        begin = time.perf_counter()
        *state, loss = run_plain(*state, batch, jax.random.fold_in(key, step))
        jax.block_until_ready((state, loss))
        plain_secs.append(time.perf_counter() - begin)
        marks.clear()
        begin = time.perf_counter()
        transaction.step(step, [batch], key_data)
        protected_secs.append(time.perf_counter() - begin)
        phases = {name: at for at, name in reversed(marks)}
        update_secs.append(phases["body"] - phases["update"])
    skip = 2  # the first steps pay for first touches of memory
    ratios = [b / a for a, b in zip(plain_secs[skip:], protected_secs[skip:], strict=True)]
    return {
        "parameters": sum(spec.size for spec in job.layout.spec.params),
        "plain_step_secs": statistics.median(plain_secs[skip:]),
        "protected_step_secs": statistics.median(protected_secs[skip:]),
        "update_secs": statistics.median(update_secs[skip:]),
        "protected_over_plain": statistics.median(ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
        "state_mib": job.layout.state_bytes / 2**20,
        "device_arena_mib": job.layout.device_bytes / 2**20,
        "host_arena_mib": job.layout.host_bytes / 2**20,
    }


def encode_rates(seed: int, mib: int = 64) -> list[dict[str, Any]]:
    """GB/s of data for the codec's XLA form, and for ISA-L on one thread where it is installed. Best and median of several runs."""
    rows = []
    for data_rows, parity_rows in ((32, 2), (16, 2), (8, 4)):
        words = np.random.default_rng(seed).integers(0, 2**32, (data_rows, mib * 2**20 // 4 // data_rows), np.uint32)
        data = jax.device_put(words)
        encode = jax.jit(lambda x, h=parity_rows: codec.encode(x, h))
        rows.append(
            {
                "codec": "xla",
                "threads": os.cpu_count(),
                "data_rows": data_rows,
                "parity_rows": parity_rows,
                **_rate(functools.partial(_encode_and_wait, encode, data), words.nbytes),
            }
        )
        other = _isal(words, parity_rows)
        if other is not None:
            rows.append({"codec": "isa-l", "threads": 1, "data_rows": data_rows, "parity_rows": parity_rows, **_rate(other, words.nbytes)})
    return rows


def _encode_and_wait(encode: Callable, data: jax.Array) -> None:
    jax.block_until_ready(encode(data))


def _rate(function: Callable[[], Any], nbytes: int, runs: int = 15) -> dict[str, float]:
    function()
    secs = []
    for _ in range(runs):
        begin = time.perf_counter()
        function()
        secs.append(time.perf_counter() - begin)
    return {"gb_per_sec_best": nbytes / min(secs) / 1e9, "gb_per_sec_median": nbytes / statistics.median(secs) / 1e9}


def _isal(words: np.ndarray, parity_rows: int) -> Callable[[], None] | None:
    """ISA-L's encoder with our matrix over the same rows; None where the library is not installed."""
    name = ctypes.util.find_library("isal")
    if name is None:
        return None
    library = ctypes.CDLL(name)
    data_rows, row_bytes = words.shape[0], words.shape[1] * 4
    coefficients = np.ascontiguousarray(matrix.parity_matrix(data_rows, parity_rows))
    tables = np.zeros(32 * data_rows * parity_rows, np.uint8)
    library.ec_init_tables(data_rows, parity_rows, coefficients.ctypes.data_as(ctypes.c_void_p), tables.ctypes.data_as(ctypes.c_void_p))
    out = np.zeros((parity_rows, row_bytes), np.uint8)
    sources = (ctypes.c_void_p * data_rows)(*(words.ctypes.data + row * row_bytes for row in range(data_rows)))
    targets = (ctypes.c_void_p * parity_rows)(*(out.ctypes.data + row * row_bytes for row in range(parity_rows)))

    def run(keep: Any = (words, out, tables)) -> None:  # the addresses hold nothing alive
        library.ec_encode_data(row_bytes, data_rows, parity_rows, tables.ctypes.data_as(ctypes.c_void_p), sources, targets)

    run()
    expected = jax.jit(lambda x: codec.encode(x, parity_rows))(words)
    assert all(np.array_equal(np.asarray(row).view(np.uint8), found) for row, found in zip(expected, out, strict=True)), (
        "ISA-L and XLA disagree"
    )
    return run


def main(
    json_path: JsonOption = None,
    kills: Annotated[int, typer.Option(min=1, help="Takeovers to time.")] = 10,
    rounds: Annotated[int, typer.Option(min=4, help="Pairs of a plain and a protected step.")] = 24,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Benchmarks leto_jax on the CPU; writes experiments/results/bench_cpu.json."""
    jax.config.update("jax_platforms", "cpu")
    commit = git_commit()
    steps = step_times(rounds, seed)
    print(
        f"protected / plain step: {steps['protected_over_plain']:.3f} ({steps['protected_step_secs']:.3f} s / {steps['plain_step_secs']:.3f} s)",
        file=sys.stderr,
        flush=True,
    )
    rates = encode_rates(seed)
    found = _takeovers.collect(kills, {**SHAPE, "seed": seed})
    for item in found:  # a plain step is one of the same programs with nothing beside them
        item["takeover_secs"] = report.takeover_secs(item, steps["protected_step_secs"])
    rows: list[dict[str, Any]] = [{"part": "step", **steps}, *({"part": "encode", **row} for row in rates)]
    rows += _takeovers.rows(found)
    path = write_result(
        "bench_cpu",
        None,
        rows,
        {**SHAPE, "kills": kills, "rounds": rounds, "protection": str(leto.Protection()), "isal": ctypes.util.find_library("isal")},
        seed,
        {
            "takeover_secs": statistics.median(item["takeover_secs"] for item in found),
            "protected_over_plain": steps["protected_over_plain"],
            "compiles_at_takeover": max(item["compiles"] for item in found),
        },
        json_path,
        cpu_device(),
        commit,
    )
    _takeovers.draw(found, steps["plain_step_secs"], path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
