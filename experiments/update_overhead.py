"""What transactions and parity cost on the GPU: the update phase, and a whole iteration, each against plain JAX in the same run.

    python experiments/update_overhead.py [--json FILE] [--millions 1073] [--part update|iteration|both]

Part update: AdamW over `--millions` float32 parameters. A round takes each way once, in turn:

    plain              donated jit of tx.update + apply_updates
    sync snapshot      the whole state to pinned host memory, then the plain update
    undo buffer        the paper's way, chunk by chunk: copy the old chunk aside, update it in place, encode it
    fused, N MiB       ours: chunks of N MiB in each lane slide to their other place, one kernel updates, encodes and sums; marks, commit

Part iteration: a transformer with gradient accumulation, so long that compute takes a second. plain: one donated jit of value_and_grad,
tx.update and apply_updates. async snapshot: the state goes to pinned host memory behind compute, the update waits for it. fused: a step of ours.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import train_lm
import typer
from _result import JsonOption, git_commit, write_result

import leto_jax as leto
from leto_jax.arena.rank import private_arenas
from leto_jax.config import GPU_PROTECTION, MIB, Protection
from leto_jax.layout import Layout
from leto_jax.rmp import matrix
from leto_jax.rmu import placed, programs
from leto_jax.rmu.device import DeviceTransaction
from leto_jax.rmu.retained import Retained
from leto_jax.shadow import executables

CHUNK_MIB = (64, 256, 512, 1024)
LEAVES = 16
CONTEXT = 1024


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-4, 100, 10_000), weight_decay=0.01)


def timed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


def protection(chunk_mib: int) -> Protection:
    return Protection(page_bytes=2 * MIB, chunk_bytes=chunk_mib * MIB, align_elements=256, align_bytes=256)


class Protected:
    """A job of ours in this process: private arenas, filled, and the time that each phase of its last step took."""

    def __init__(self, init: Callable, loss_fn: Callable, tx: optax.GradientTransformation, batch: Any, key: jax.Array, how: Protection):
        device = jax.devices()[0]
        self.job = programs.trace(init, leto.TrainStep(loss_fn, tx).spec, batch, key, how, device)
        self.run = executables.compile_all(executables.lower(self.job))
        self.arenas = private_arenas(self.job.layout, None if device.platform == "cpu" else 0)
        retained = Retained(self.job, self.arenas.device, self.arenas.host, self.arenas.metadata, device)
        self.transaction = DeviceTransaction(retained, self.run, 1, lambda *_: None)
        self.key, self.step_number = jax.random.key_data(key), 0
        self.transaction.fill(0, *self.transaction.init(self.key))

    def step(self, batch: Any) -> dict[str, float]:
        """One step; seconds of its parts. The drain of the parity runs behind whatever comes next, as in training."""
        transaction, step = self.transaction, self.step_number + 1
        marks = [time.perf_counter()]
        transaction.compute(step, jax.tree.leaves(batch), self.key)
        marks.append(time.perf_counter())
        intent = transaction.decide(step)
        marks.append(time.perf_counter())
        transaction.update(step, intent)
        transaction.commit(step, intent)
        marks.append(time.perf_counter())
        transaction.drain(step)
        self.step_number = step
        parts = dict(zip(("compute", "decide", "update"), np.diff(marks).tolist(), strict=True))
        return parts | {"total": marks[-1] - marks[0]}

    def close(self) -> None:
        self.transaction.close()
        self.arenas.close()


def undo_way(job: programs.Job) -> Callable[[], Any]:
    """The paper's update, over memory of its own: for each chunk a copy aside, an update in place, and an encode."""
    layout = job.layout
    number, chunk = layout.chunks[0]
    lanes, how = len(layout.signatures[number].lanes), layout.spec.protection
    values = [jnp.full(x.shape, 0.5, x.dtype) for x in programs.structs(layout.spec.values)]
    as_words = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint32)  # else JAX would hand the input on instead of copying it
    copy = jax.jit(lambda old, _: [as_words(x) for x in old], donate_argnums=1, keep_unused=True)
    update = jax.jit(lambda g, old: programs.elementwise_update(job, number, values, jnp.int32(programs.APPLY), g, old), donate_argnums=1)
    encode_one = placed.encoder(job, jax.devices()[0])
    encode = jax.jit(lambda new: [encode_one(placed.lane_words(x, how.data_rows)) for x in new])
    grad = jnp.full((chunk.length,), 0.01)
    held = [[jnp.full((chunk.length,), 0.1) for _ in range(lanes)] for _ in layout.chunks]
    undo = [jnp.zeros((chunk.length,), jnp.uint32) for _ in range(lanes)]

    def run() -> Any:
        nonlocal undo
        parity = None
        for index, old in enumerate(held):
            undo = copy(old, undo)
            held[index] = update(grad, old)
            parity = encode(held[index])
        return parity, held

    return run


def snapshot_target() -> Any:
    """Where snapshots go: pinned memory of the host."""
    return jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")


def measure_update(
    millions: float, rounds: int, seed: int, how: Callable[[int], Protection], sizes: tuple[int, ...]
) -> list[dict[str, Any]]:
    each = round(millions * 1e6) // LEAVES // 1024 * 1024
    tx, key = optimizer(), jax.random.key(seed)

    def init(key):
        return {f"w{n}": 0.02 * jax.random.normal(jax.random.fold_in(key, n), (each,)) for n in range(LEAVES)}, {}

    def loss_fn(params, extras, batch, key):
        return sum(jnp.mean(jnp.square(p) * (1 + batch["x"][0])) for p in jax.tree.leaves(params)), (extras, {})

    batch = {"x": np.ones(1, np.float32)}
    params = jax.jit(lambda k: init(k)[0])(key)
    held: list[Any] = [params, jax.jit(tx.init)(params)]
    grads = jax.tree.map(lambda x: x + 0, params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def plain_update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def plain() -> Any:
        held[:] = plain_update(*held, grads)
        return held

    def snapshot() -> Any:
        jax.block_until_ready(jax.device_put(held, snapshot_target()))
        return plain()

    ways: dict[str, Callable[[], float]] = {"plain": lambda: timed(plain), "sync snapshot": lambda: timed(snapshot)}
    found: dict[str, list[float]] = {name: [] for name in ways}
    bytes_of_state = 12 * each * LEAVES
    rows: list[dict[str, Any]] = []

    def measure(names: list[str], rounds: int) -> None:
        for name in names:
            ways[name]()
            ways[name]()
        for _ in range(rounds):
            for name in names:
                found.setdefault(name, []).append(ways[name]())

    def row(name: str, base: list[float], **more: Any) -> None:
        taken, plain_secs = statistics.median(found[name]), statistics.median(base)
        rows.append(
            {"part": "update", "way": name, "update_ms": 1e3 * taken, "plain_ms": 1e3 * plain_secs, "ratio": taken / plain_secs, **more}
        )
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True)

    measure(["plain", "sync snapshot"], 3)
    row("plain", found["plain"], parameters=each * LEAVES, gbs=28 / 12 * bytes_of_state / statistics.median(found["plain"]) / 1e9)
    row("sync snapshot", found["plain"])
    for mib in sizes:
        ours = Protected(init, loss_fn, tx, batch, key, how(mib))

        decided: list[float] = []

        def fused(ours: Protected = ours, decided: list[float] = decided) -> float:
            parts = ours.step(batch)
            ours.transaction.wait_drained()
            decided.append(parts["decide"])
            return parts["update"]

        name = f"fused, {mib} MiB"
        ways[name], before = fused, len(found["plain"])
        measure(["plain", name], rounds)
        layout: Layout = ours.job.layout
        decide = statistics.median(decided[-rounds:])
        both = (decide + statistics.median(found[name])) / statistics.median(found["plain"][before:])
        shape = {"chunk_mib": mib, "chunks": len(layout.chunks), "data_rows": layout.spec.protection.data_rows}
        row(name, found["plain"][before:], **shape, decide_ms=1e3 * decide, ratio_with_decide=both)
        if mib == sizes[len(sizes) // 2]:
            ways["undo buffer"], before = functools.partial(timed, undo_way(ours.job)), len(found["plain"])
            measure(["plain", "undo buffer"], rounds)
            row("undo buffer", found["plain"][before:], chunk_mib=mib)
            del ways["undo buffer"]
        del ways[name]
        ours.close()
    return rows


def measure_iteration(width: int, depth: int, micro: int, rounds: int, seed: int, how: Protection) -> list[dict[str, Any]]:
    key, tx = jax.random.key(seed), train_lm.optimizer(1000, 1e-4)
    context = min(CONTEXT, 16 * width)
    init, one_loss = leto.flax.nnx(
        lambda rngs: train_lm.ByteLM(width, depth, max(1, width // 64), context, 0.0, rngs=rngs, scan=True), train_lm.loss
    )
    batch = np.random.default_rng(seed).integers(0, 256, (micro, 4, context + 1), np.uint8)

    def loss_fn(params, extras, batch, key):
        """Gradient accumulation over the first axis: nothing of a microbatch is kept but its loss."""
        one = jax.checkpoint(lambda part: one_loss(params, extras, part, key)[0])
        return jnp.mean(jax.lax.map(one, batch)), (extras, {})

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def plain_step(params, state, extras, batch, key):
        (loss, (extras, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, extras, batch, key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, extras, loss

    params, extras = jax.jit(init)(key)
    held: list[Any] = [params, jax.jit(tx.init)(params), extras]
    parameters = sum(x.size for x in jax.tree.leaves(params))
    del params, extras

    def plain() -> Any:
        *held[:], loss = plain_step(*held, batch, key)
        return held, loss

    @jax.jit
    def gradients(params, extras, batch, key):
        return jax.value_and_grad(loss_fn, has_aux=True)(params, extras, batch, key)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def plain_update(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def snapshot() -> Any:
        """The copy runs beside the gradients; the update, which overwrites what is copied, waits for both."""
        copy = jax.device_put(held[:2], snapshot_target())
        (_, (held[2], _)), grads = gradients(held[0], held[2], batch, key)
        jax.block_until_ready(copy)
        held[:2] = plain_update(held[0], held[1], grads)
        return held

    ours = Protected(init, loss_fn, tx, batch, key, how)
    times: dict[str, list[float]] = {"plain": [], "fused": [], "async snapshot": []}
    parts: list[dict[str, float]] = []
    for round_number in range(rounds + 2):
        kept = round_number >= 2
        ours.transaction.wait_drained()
        times["plain"] += [taken] if (taken := timed(plain)) and kept else []
        ours.step(batch)
        found = ours.step(batch)  # behind a step of its own, whose drain it carries
        if kept:
            parts.append(found)
            times["fused"].append(found["total"])
    ours.transaction.wait_drained()
    times["async snapshot"] = [timed(snapshot) for _ in range(4)][1:]
    base = statistics.median(times["plain"])
    rows = []
    for name, values in times.items():
        taken = statistics.median(values)
        rows.append({"part": "iteration", "way": name, "total_ms": 1e3 * taken, "ratio": taken / base, "parameters": parameters})
        if name == "fused":
            rows[-1] |= {f"{part}_ms": 1e3 * statistics.median(p[part] for p in parts) for part in ("compute", "decide", "update")}
        print({key: round(value, 4) if isinstance(value, float) else value for key, value in rows[-1].items()}, flush=True)
    ours.close()
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["part"] == "update"]
    figure, axes = pyplot.subplots(figsize=(8, 0.45 * len(shown) + 1.5), layout="constrained")
    axes.barh(
        range(len(shown)), [row["ratio"] for row in shown], color=["#4c72b0" if "fused" in row["way"] else "#8c8c8c" for row in shown]
    )
    axes.set_yticks(range(len(shown)), [row["way"] for row in shown])
    for number, row in enumerate(shown):
        axes.text(row["ratio"], number, f" {row['ratio']:.2f}", va="center")
    axes.axvline(1.15, color="#c44e52", linestyle="--", linewidth=1)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("time of the update phase / plain donated optax (dashed: the target; log scale)")
    axes.set_title("Update with transactions and parity, AdamW, float32", loc="left")
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main(
    millions: Annotated[float, typer.Option(help="Parameters of part update, in millions.")] = 1073.0,
    width: Annotated[int, typer.Option(help="Width of the transformer of part iteration.")] = 2048,
    depth: Annotated[int, typer.Option(help="Its blocks.")] = 21,
    micro: Annotated[int, typer.Option(help="Microbatches of 4 x 1024 tokens in a step.")] = 4,
    rounds: Annotated[int, typer.Option(min=1)] = 10,
    part: Annotated[str, typer.Option(help="update, iteration or both.")] = "both",
    small: Annotated[bool, typer.Option("--small", help="Try the script without a GPU: its figures mean nothing.")] = False,
    seed: int = 0,
    commit: Annotated[str | None, typer.Option(help="Commit to note, where there is no repository.")] = None,
    json_path: JsonOption = None,
) -> None:
    if small:
        millions, width, depth, micro, rounds = 0.5, 32, 1, 2, 2
    device = jax.devices()[0]
    how = (lambda mib: Protection(4, 2, 0, 4096, mib * 1024)) if small else protection
    rows: list[dict[str, Any]] = []
    values: dict[str, float] = {}
    if part in ("update", "both"):
        rows += measure_update(millions, rounds, seed, how, CHUNK_MIB)
        values["update_ratio_fused"] = min(row["ratio"] for row in rows if row["way"].startswith("fused, 512"))
    if part in ("iteration", "both"):
        rows += measure_iteration(width, depth, micro, rounds, seed, how(512) if small else GPU_PROTECTION)
        ratio = next(row["ratio"] for row in rows if row["part"] == "iteration" and row["way"] == "fused")
        values["iteration_overhead_pct"] = 100 * (ratio - 1)
    factors = matrix.parity_matrix(GPU_PROTECTION.data_rows, GPU_PROTECTION.parity_rows).shape
    settings = {
        "millions": millions,
        "width": width,
        "depth": depth,
        "micro": micro,
        "rounds": rounds,
        "code": f"{factors[0]} of {factors[1]}",
    }
    path = write_result("update_overhead", None, rows, settings, seed, values, json_path, device.device_kind, commit or git_commit())
    if any(row["part"] == "update" for row in rows):
        draw(rows, path.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(typer.run(main))
