"""The job of `train_lm` as its users run it today: plain JAX, a checkpoint by Orbax, and a new process after a failure.

    python experiments/orbax_restart.py --directory DIR --save        trains two steps and saves
    python experiments/orbax_restart.py --directory DIR               restores and trains a step; prints one JSON object with the seconds
    python experiments/orbax_restart.py --directory DIR --forever     trains until it is killed, and prints the number of each step

With --coordinator HOST:PORT --ranks N --rank R it is one of N processes, as `jax.distributed.initialize` makes them.

Best case for it: the checkpoint is in the page cache (put DIR on a tmpfs), the compile cache is warm, no step is lost, nobody detects anything.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Annotated

STARTED_NS = int(os.environ.get("STARTED_NS") or time.monotonic_ns())  # when the parent started this process, CLOCK_MONOTONIC

import jax  # noqa: E402  (imports are a part of what is measured)
import optax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
import train_lm  # noqa: E402
import typer  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import leto_jax as leto  # noqa: E402


def main(
    directory: Annotated[Path, typer.Option(help="Where the checkpoint lies.")],
    save: Annotated[bool, typer.Option("--save")] = False,
    device: str = "gpu",
    width: int = 320,
    depth: int = 8,
    heads: int = 5,
    context: int = 256,
    batch: int = 16,
    scan: Annotated[bool, typer.Option("--scan")] = False,
    seed: int = 0,
    forever: Annotated[bool, typer.Option("--forever")] = False,
    cut: str = "dp",
    coordinator: str = "",
    ranks: int = 1,
    rank: int = 0,
) -> None:
    marks = {"import": time.monotonic_ns()}
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[device])
    if ranks > 1:
        jax.distributed.initialize(coordinator, ranks, rank, local_device_ids=None if device == "cpu" else [rank])
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    same, cut_batch = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    marks["devices"] = time.monotonic_ns()
    init, loss_fn = leto.flax.nnx(lambda rngs: train_lm.ByteLM(width, depth, heads, context, 0.1, rngs=rngs, scan=scan), train_lm.loss)
    tx, key = train_lm.optimizer(1000, 1e-3), jax.random.key(seed)
    drawn = train_lm.own_windows(train_lm.windows(train_lm.read_corpus(), batch, context, seed))
    batches = lambda step: jax.make_array_from_process_local_data(cut_batch, drawn(step))

    def make(key):
        params, extras = init(key)
        return params, tx.init(params), extras

    def one_step(state, batch, key):
        params, opt_state, extras = state
        (loss, (extras, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, extras, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, extras), loss

    where = lambda x: NamedSharding(mesh, train_lm.part(x.shape, ranks) if cut == "fsdp" and ranks > 1 else PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x)), jax.eval_shape(make, key))
    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    key = jax.jit(lambda: jax.random.key(seed), out_shardings=same)()
    compiled = jax.jit(one_step, donate_argnums=0, out_shardings=(shardings, same)).lower(shapes, batches(1), key).compile()
    marks["compile"] = time.monotonic_ns()
    with ocp.CheckpointManager(directory.resolve()) as manager:
        if save or forever:
            state = jax.jit(make, out_shardings=shardings)(key)
            for t in itertools.count(1) if forever else (1, 2):
                state, loss = compiled(state, batches(t), key)
                if forever:
                    jax.block_until_ready(loss)
                    print(f"step {t}", flush=True)
            # Typed keys are stored as their data: Orbax takes arrays.
            manager.save(2, args=ocp.args.StandardSave(_plain(state)))
            manager.wait_until_finished()
            return
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where(x)), jax.eval_shape(_plain, jax.eval_shape(make, key))
        )
        restored = manager.restore(2, args=ocp.args.StandardRestore(wanted))
        state = jax.block_until_ready(_typed(restored, shapes))
        marks["restore"] = time.monotonic_ns()
    state, loss = compiled(state, batches(3), key)
    jax.block_until_ready((state, loss))
    marks["first_step"] = time.monotonic_ns()
    begin = time.monotonic_ns()
    for t in range(4, 9):
        state, loss = compiled(state, batches(t), key)
    jax.block_until_ready((state, loss))
    plain = (time.monotonic_ns() - begin) / 5e9
    stages, before = {}, STARTED_NS
    for name, at in marks.items():
        stages[name], before = (at - before) / 1e9, at
    total = (marks["first_step"] - STARTED_NS) / 1e9 - plain
    print(json.dumps({"restart_secs": total, "plain_step_secs": plain, "stages": stages}))


def _plain(tree):
    return jax.tree.map(lambda x: jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)


def _typed(tree, like):
    typed = lambda x, y: jax.random.wrap_key_data(x) if jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key) else x
    return jax.tree.map(typed, tree, like)


if __name__ == "__main__":
    typer.run(main)
