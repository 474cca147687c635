"""How fast the GPU kernels move bytes: encode, decode, page checksums and the fused update, against a copy on the same device.

    python experiments/parity_bandwidth.py [--json FILE] [--gib 4] [--log2-elements 28]

A rate counts every byte that must move, read and written alike, as the copy's does; `data_gbs` counts the protected data only. The fused
update is AdamW with a schedule, sliced as in training; `ratio` is its time over that of a plain donated optax update of the same size. With
H = 4 the parity of an update takes a second pass over the new values, whose bytes are not counted.

The target, `encode_copy_fraction`, is the lowest rate of encode for D in {16, 32} and H <= 2, as a share of the copy's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from _result import JsonOption, git_commit, result_path, write_result

from leto_jax.pallas import dispatch, fused, parity, shapes
from leto_jax.rmp import checksum, matrix
from leto_jax.rmp import reference as truth
from leto_jax.rmu import slicing

ROWS, PARITY = (8, 16, 32, 64), (1, 2, 4)
TARGET_ROWS, TARGET_PARITY = (16, 32), (1, 2)
SAMPLE_WORDS = 1 << 14


def coefficients(array: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in array)


def seconds(call: Callable[[], Any], calls: int, rounds: int = 5) -> float:
    """Median over rounds of the time of one call, calls queued one after the other."""
    jax.block_until_ready(call())
    jax.block_until_ready(call())
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        results = [call() for _ in range(calls)][-1]
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


class Bench:
    """Collects rows; the first must be the copy that the others are compared with."""

    def __init__(self, calls: int):
        self.calls, self.rows, self.copy_rate = calls, [], 0.0

    def add(self, operation: str, call: Callable[[], Any], traffic: float, data: float, **more: Any) -> float:
        start = time.perf_counter()
        jax.block_until_ready(call())
        first = time.perf_counter() - start
        taken = seconds(call, self.calls)
        rate = traffic / taken
        self.copy_rate = self.copy_rate or rate
        row = {
            "operation": operation,
            **more,
            "ms": taken * 1e3,
            "gbs": rate / 1e9,
            "data_gbs": data / taken / 1e9,
            "copy_fraction": rate / self.copy_rate,
        }
        self.rows.append(row | {"first_call_secs": first})
        named = " ".join(f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items())
        print(f"{named} first_call_secs={first:.1f}", flush=True)
        return taken


def expect(what: str, found: Any, wanted: np.ndarray) -> None:
    if not np.array_equal(np.asarray(found), wanted):
        raise SystemExit(f"{what}: expected the bits of the NumPy reference, found others")


def check_piece(data: jax.Array, rows: Any, sums: Any, shape: shapes.ParityShape) -> None:
    """A sample of the result, against NumPy: the first words of the parity rows, the first and the last page's checksum."""
    if rows is not None and shape.parity_rows:
        sample = np.ascontiguousarray(data[:, :SAMPLE_WORDS]).view(np.uint8)
        expect(f"parity {shape.name}", rows[:, :SAMPLE_WORDS], truth.encode(sample, shape.parity_rows).view(np.uint32))
    if sums is not None:
        ends = np.stack([data[0, : shape.page_words], data[-1, -shape.page_words :]])
        expect(f"checksums {shape.name}", np.stack([sums[0], sums[-1]]), checksum.page_checksums_np(ends))


def measure_parity(bench: Bench, nbytes: int, seed: int) -> None:
    flat = jax.jit(lambda key: jax.random.bits(key, (nbytes // 4,), jnp.uint32))(jax.random.key(seed))
    spare = [jnp.zeros_like(flat)]
    copy = jax.jit(lambda x, _: x ^ jnp.uint32(1), donate_argnums=1, keep_unused=True)

    def run_copy() -> jax.Array:
        spare[0] = copy(flat, spare[0])
        return spare[0]

    bench.add("copy", run_copy, 2 * nbytes, nbytes)
    spare.clear()
    for d in ROWS:
        base = shapes.bandwidth_parity(d, 0, nbytes)
        data = flat[: d * base.row_words].reshape(d, base.row_words)
        jax.block_until_ready(data)

        sums_of = jax.jit(lambda x, s=base: parity.page_checksums(x, s.page_words))
        check_piece(data, None, sums_of(data), base)
        bench.add("checksum", lambda run=sums_of, x=data: run(x), base.nbytes, base.nbytes, D=d)
        for h in PARITY:
            shape = shapes.bandwidth_parity(d, h, nbytes)
            factors = coefficients(matrix.parity_matrix(d, h))
            traffic = shape.nbytes * (1 + h / d)
            for operation, page_words in (("encode", None), ("encode + checksum", shape.page_words)):
                encode = jax.jit(lambda x, f=factors, p=page_words: parity.encode(x, f, page_words=p))
                rows, sums = encode(data)
                check_piece(data, rows, sums, shape)
                bench.add(operation, lambda run=encode, x=data: run(x), traffic, shape.nbytes, D=d, H=h)
            lost = tuple(range(h))
            plan = matrix.decode_matrix(d, h, lost, range(h))
            solved = coefficients(plan.coefficients)
            decode = jax.jit(lambda x, p, s=plan.survivors, f=solved: parity.decode(x, p, s, f))
            found = decode(data, rows)
            expect(f"decode {shape.name}", found[:, :SAMPLE_WORDS], np.asarray(data[:h, :SAMPLE_WORDS]))
            bench.add("decode", lambda run=decode, x=data, p=rows: run(x, p), traffic, shape.nbytes, D=d, H=h)


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 10_000), weight_decay=0.01)


def measure_update(bench: Bench, elements: int, dtype: str, cases: list[tuple[int, int]], seed: int) -> None:
    """The plain update, then the fused one for each (D, H). Both are donated, so neither allocates."""
    tx, size = optimizer(), jnp.dtype(dtype).itemsize
    keys = jax.random.split(jax.random.key(seed), 2)
    params = jax.jit(lambda k: 0.1 * jax.random.normal(k, (elements,), dtype))(keys[0])
    grad = jax.jit(lambda k: jax.random.normal(k, (elements,), dtype))(keys[1])
    sliced = slicing.slice_update(
        tx, {"a": jax.ShapeDtypeStruct((elements // 2,), dtype), "b": jax.ShapeDtypeStruct((elements // 2,), dtype)}
    )
    signature = sliced.signatures[0]
    kinds = [port.kind for port in signature.inputs if port.kind != "grad"]

    def update(scalars: Any, grad: Any, lanes: Any) -> Any:
        pieces = dict(zip(kinds, lanes, strict=True)) | {"grad": grad}
        return sliced.apply(signature, scalars, [pieces[port.kind] for port in signature.inputs], grad.shape)

    def plain(params: Any, state: Any, grad: Any) -> Any:
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    run_plain = jax.jit(plain, donate_argnums=(0, 1))
    held = [(params + 0, tx.init(params))]

    def step_plain() -> Any:
        held[0] = run_plain(*held[0], grad)
        return held[0]

    plain_secs = bench.add("plain update", step_plain, 7 * size * elements, 3 * size * elements, dtype=dtype, ratio=1.0)
    state = held.pop()[1]
    moments = [x for x in jax.tree.leaves(state) if x.shape == params.shape]
    scalars = tuple(jnp.asarray(0.5, spec.dtype) for spec in signature.value_specs)
    lanes = (params, *moments)
    for d, h in cases:
        shape = shapes.bandwidth_update(d, h, elements, dtype)
        settings = {"data_rows": d, "coefficients": coefficients(matrix.parity_matrix(d, h)), "page_bytes": shape.page_bytes}
        run_fused = jax.jit(lambda s, g, old, _, k=settings: fused.fused_update(update, s, g, old, **k), donate_argnums=3, keep_unused=True)
        words = shape.row * size // 4
        target = fused.Updated(
            tuple(jnp.zeros_like(x) for x in lanes),
            tuple(jnp.zeros((h, words), jnp.uint32) for _ in lanes),
            tuple(jnp.zeros((elements * size // shape.page_bytes, 2), jnp.uint32) for _ in lanes),
        )
        both = [tuple(x + 0 for x in lanes), target]

        def step_fused(both: list[Any] = both, run: Any = run_fused) -> Any:
            updated = run(scalars, grad, *both)
            both[:] = updated.lanes, fused.Updated(both[0], updated.parity, updated.checksums)
            return updated.lanes

        new = step_fused()
        piece = shapes.ParityShape(shape.name, d, h, words, shape.page_bytes // 4)
        for lane, rows, sums in zip(new, both[1].parity, both[1].checksums, strict=True):
            ends = np.asarray(lane.reshape(d, -1)[:, : SAMPLE_WORDS * 4 // size]).view(np.uint32)
            expect(
                f"parity of {shape.name}",
                rows[:, :SAMPLE_WORDS],
                truth.encode(np.ascontiguousarray(ends).view(np.uint8), h).view(np.uint32),
            )
            first = np.asarray(lane[: shape.page_bytes // size]).view(np.uint32)
            expect(f"checksum of {shape.name}", sums[:1], checksum.page_checksums_np(first[None]))
        del new, rows, sums, lane
        traffic = size * elements * (7 + 3 * h / d)
        taken = bench.add("fused update", step_fused, traffic, 3 * size * elements, D=d, H=h, dtype=dtype)
        bench.rows[-1]["ratio"] = taken / plain_secs
        print(f"  ratio to plain {taken / plain_secs:.4f}, {piece.nbytes / 2**20:.0f} MiB a lane", flush=True)


def plot(rows: list[dict[str, Any]], device: str, path: Any) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(15, 3.8), sharey=True, layout="constrained")
    for axis, operation in zip(axes, ("encode", "encode + checksum", "decode", "fused update"), strict=True):
        for k, h in enumerate(PARITY):
            chosen = {r["D"]: r for r in rows if r["operation"] == operation and r.get("H") == h and r.get("dtype", "float32") == "float32"}
            heights = [100 * chosen[d]["copy_fraction"] for d in ROWS]
            bars = axis.bar(
                [x + 0.27 * (k - 1) for x in range(len(ROWS))], heights, 0.25, label=f"H = {h}", color=("#9ecae1", "#4292c6", "#08519c")[k]
            )
            if operation == "fused update":
                axis.bar_label(
                    bars,
                    [f"{chosen[d]['ratio']:.2f}x" for d in ROWS],
                    fontsize=7,
                    rotation=90,
                    padding=2,
                    label_type="center",
                    color=("black", "black", "white")[k],
                )
        axis.axhline(90, color="#d94801", linewidth=1, linestyle="--")
        axis.set_xticks(range(len(ROWS)), [f"D = {d}" for d in ROWS])
        axis.set_title(operation + (" (x: time over plain)" if operation == "fused update" else ""), fontsize=10)
    axes[0].set_ylabel("% of copy bandwidth")
    axes[0].set_ylim(0, 115)
    axes[0].legend(loc="lower left", fontsize=8, framealpha=1, ncols=3)
    copy = next(r for r in rows if r["operation"] == "copy")
    figure.suptitle(f"Bytes read and written, share of a copy ({copy['gbs'] / 1000:.2f} TB/s), {device}", fontsize=11)
    figure.savefig(path, dpi=130)


def main(
    json_path: JsonOption = None,
    gib: Annotated[float, typer.Option(help="Data of encode, decode and checksum, GiB. Several times the L2 cache.")] = 4.0,
    log2_elements: Annotated[int, typer.Option(help="Elements of each lane of the update, as a power of two.")] = 28,
    calls: Annotated[int, typer.Option(help="Calls in a row for one time.")] = 20,
    seed: int = 0,
    commit: Annotated[str | None, typer.Option(help="Commit to note, where this is a copy without a repository.")] = None,
) -> None:
    device = jax.devices()[0]
    choice = dispatch.device_choice(device)
    if not choice.kernel:
        print(f"parity_bandwidth needs a GPU that runs the kernels; {choice.reason}")
        raise typer.Exit(2)
    noted = commit or git_commit()
    bench = Bench(calls)
    measure_parity(bench, int(gib * 2**30), seed)
    elements = 1 << log2_elements
    measure_update(bench, elements, "float32", [(d, h) for d in ROWS for h in PARITY], seed)
    measure_update(bench, elements, "bfloat16", [(32, 2)], seed)
    worst = min(
        row["copy_fraction"] for row in bench.rows if row["operation"] == "encode" and row["D"] in TARGET_ROWS and row["H"] in TARGET_PARITY
    )
    settings = {"gib": gib, "elements": elements, "calls": calls, "page_bytes": 2 << 20, "copy_gbs": bench.copy_rate / 1e9}
    values = {"encode_copy_fraction": worst}
    write_result("parity_bandwidth", None, bench.rows, settings, seed, values, json_path, device.device_kind, noted)
    plot(bench.rows, device.device_kind, result_path("parity_bandwidth", None, json_path).with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
