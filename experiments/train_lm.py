"""Trains a byte-level language model on the sources of Python's standard library, which every machine has.

    uv run leto run experiments/train_lm.py --steps 60
    uv run python experiments/train_lm.py --steps 60
    uv run leto run --nproc-per-node 2 experiments/train_lm.py --steps 60 --cut fsdp

The first is protected. It and the second run the same programs and end with the same digest. The third shares the work over two ranks.
"""

from __future__ import annotations

import datetime
import hashlib
import json as jsonlib
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import optax
import typer
from _result import cpu_device, git_commit, versions
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import leto_jax as leto

CORPUS_BYTES = 2_000_000  # reading more would delay every shadow
HELD_OUT_BYTES = 100_000
EVAL_BATCHES = 4
SMALL = 1 << 16  # elements of a leaf that is not worth cutting
HELD_MIB = 64


class Block(nnx.Module):
    """Pre-norm transformer block: causal self-attention and MLP, dropout on both branches."""

    def __init__(self, width: int, heads: int, dropout: float, *, rngs: nnx.Rngs):
        self.heads = heads
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.drop1, self.drop2 = nnx.Dropout(dropout, rngs=rngs), nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        attended = jax.nn.dot_product_attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], is_causal=True)
        x = x + self.drop1(self.out(attended.reshape(x.shape)))
        return x + self.drop2(self.down(jax.nn.gelu(self.up(self.norm2(x)))))


class ByteLM(nnx.Module):
    """Decoder-only transformer over bytes; the embedding is also the output layer. scan: one stacked block, looped over by XLA, so that
    compiling does not take longer the deeper it is."""

    def __init__(self, width: int, depth: int, heads: int, context: int, dropout: float, *, rngs: nnx.Rngs, scan: bool = False):
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Embed(256, width, embedding_init=normal, rngs=rngs)
        self.position = nnx.Param(normal(rngs.params(), (context, width)))
        self.scan = scan
        if scan:
            stack = nnx.vmap(lambda rngs: Block(width, heads, dropout, rngs=rngs), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=depth)(stack)(rngs)
        else:
            self.blocks = nnx.List([Block(width, heads, dropout, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens) + self.position[...]
        if self.scan:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        for block in () if self.scan else self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))


def loss(model: ByteLM, batch: jax.Array) -> jax.Array:
    """Mean cross-entropy in nats per byte. batch: uint8[batch, context + 1]."""
    tokens = batch.astype("int32")
    return optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:]).mean()


def read_corpus() -> np.ndarray:
    """uint8[CORPUS_BYTES]: the modules of the standard library in order of their names, end to end."""
    parts, size = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size >= CORPUS_BYTES:
            break
        parts.append(path.read_bytes())
        size += len(parts[-1])
    return np.frombuffer(b"".join(parts)[:CORPUS_BYTES], np.uint8)


def windows(text: np.ndarray, batch: int, context: int, seed: int) -> Callable[[int], np.ndarray]:
    """f(step) -> uint8[batch, context + 1]: windows at random places of `text`, a pure function of (seed, step)."""

    def batch_of(step: int) -> np.ndarray:
        starts = np.random.default_rng([seed, step]).integers(0, len(text) - context, batch)
        return np.stack([text[start : start + context + 1] for start in starts])

    return batch_of


CUTS = ("dp", "fsdp")


def sharding(cut: str) -> leto.Sharding | None:
    """How several ranks share the work: 'dp', parameters are the same on all; 'fsdp', each keeps a part of every large one. None for one rank."""
    ranks = jax.process_count()
    if ranks == 1:
        return None
    mesh = jax.make_mesh((ranks,), ("data",), axis_types=(AxisType.Auto,))
    return leto.Sharding(mesh, (lambda _, leaf: part(leaf.shape, ranks)) if cut == "fsdp" else PartitionSpec())


def part(shape: tuple[int, ...], ranks: int) -> PartitionSpec:
    """Cuts the longest axis that can be cut, but not the first of stacked blocks: each is gathered when it is its turn."""
    axes = [axis for axis, n in enumerate(shape) if n % ranks == 0 and (axis > 0 or len(shape) < 3)]
    if math.prod(shape) < SMALL or not axes:
        return PartitionSpec()
    longest = max(axes, key=lambda axis: shape[axis])
    return PartitionSpec(*("data" if axis == longest else None for axis in range(longest + 1)))


def own_windows(batches: Callable[[int], np.ndarray]) -> Callable[[int], np.ndarray]:
    """This rank's part of each batch."""
    ranks, rank = jax.process_count(), jax.process_index()
    return lambda step: np.array_split(batches(step), ranks)[rank]


def hold_memory(held: list[jax.Array], path: Path) -> None:
    """Takes device memory until as many MiB are held as a file says."""
    wanted = int(path.read_text()) if path.exists() else 0
    while len(held) * HELD_MIB < wanted:
        held.append(jax.block_until_ready(jax.device_put(np.zeros(HELD_MIB << 20, np.uint8))))


def optimizer(steps: int, rate: float) -> optax.GradientTransformation:
    """AdamW with clipping by global norm and a warm-up cosine schedule; biases and norms are not decayed."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, min(20, steps // 2 + 1), max(steps, 2), rate / 10)
    matrices = lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices))


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    width: Annotated[int, typer.Option(min=1, help="Width of the residual stream, a multiple of --heads.")] = 320,
    depth: Annotated[int, typer.Option(min=1, help="Transformer blocks.")] = 8,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 5,
    context: Annotated[int, typer.Option(min=1, max=HELD_OUT_BYTES // 2, help="Bytes that the model sees.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Windows in a batch.")] = 16,
    rate: Annotated[float, typer.Option(min=0.0, help="Peak learning rate.")] = 1e-3,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.9, help="Dropout rate.")] = 0.1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of initial values, dropout and batches.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu",
    cut: Annotated[str, typer.Option(help="On several ranks: dp (the same parameters on all) or fsdp (each keeps a part).")] = "dp",
    scan: Annotated[bool, typer.Option("--scan", help="Stack the blocks and loop over them: compiles in seconds at any depth.")] = False,
    log_every: Annotated[int, typer.Option(min=1, help="Steps between printed losses.")] = 1,
    eval_every: Annotated[int, typer.Option(min=0, help="Steps between evaluations on held-out text; 0: none.")] = 0,
    sleep_secs: Annotated[float, typer.Option(min=0.0, help="Pause after each step, for demonstrations.")] = 0.0,
    sleep_while: Annotated[Path | None, typer.Option(help="Pause only while this file exists.")] = None,
    hold: Annotated[
        Path | None, typer.Option(help="File with a number: MiB of memory that the loop body takes beside the training.")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the result to this file.")] = None,
) -> None:
    """Trains a byte-level language model on the sources of Python's standard library."""
    settings = {name: value for name, value in locals().items() if name not in ("json", "sleep_while", "hold")}
    if device not in ("cpu", "gpu"):
        raise typer.BadParameter(f"expected cpu or gpu, found {device!r}", param_hint="--device")
    if width % heads:
        raise typer.BadParameter(f"expected a multiple of --heads {heads}, found {width}", param_hint="--width")
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[device])
    if cut not in CUTS:
        raise typer.BadParameter(f"expected {' or '.join(CUTS)}, found {cut!r}", param_hint="--cut")
    if batch % jax.process_count():
        raise typer.BadParameter(f"expected a multiple of the {jax.process_count()} ranks, found {batch}", param_hint="--batch")

    corpus = read_corpus()
    train, held_out = corpus[:-HELD_OUT_BYTES], corpus[-HELD_OUT_BYTES:]
    init, loss_fn = leto.flax.nnx(lambda rngs: ByteLM(width, depth, heads, context, dropout, rngs=rngs, scan=scan), loss)
    step = leto.TrainStep(loss_fn, optimizer(steps, rate))

    @jax.jit
    def evaluate(state: leto.State, batch: jax.Array) -> jax.Array:
        model = loss_fn.model(state.params, state.extras)
        model.eval()
        return loss(model, batch)

    parameters = sum(x.size for x in jax.tree.leaves(jax.eval_shape(init, jax.random.key(seed))[0]))
    warm = [evaluate] if eval_every else []
    examples = windows(held_out, batch, context, seed)
    data = own_windows(windows(train, batch, context, seed))
    with leto.session(init, step, data, key=jax.random.key(seed), steps=steps, warm=warm, sharding=sharding(cut)) as s:
        state, rows, sha256 = s.state, [], hashlib.sha256(corpus).hexdigest()
        held: list[jax.Array] = []
        print(f"train_lm: {parameters / 1e6:.2f} M parameters, corpus sha256:{sha256} ({len(corpus)} bytes)", file=sys.stderr, flush=True)
        for t, tokens in s:
            state, metrics = s.step(state, tokens)
            if not s.replayed:
                rows.append({"step": t, "loss": float(metrics["loss"]), "secs": s.step_secs[-1]})
            if t % log_every == 0 or t == steps:
                print(f"step {t} loss {float(metrics['loss'])!r}", flush=True)
            if eval_every and t % eval_every == 0:
                with s.section("eval", timeout_secs=600):
                    losses = [float(evaluate(state, examples(n))) for n in range(EVAL_BATCHES)]
                print(f"step {t} held-out loss {sum(losses) / EVAL_BATCHES!r}", flush=True)
            if hold is not None:
                hold_memory(held, hold)
            if not s.replayed and (sleep_while is None or sleep_while.exists()):
                time.sleep(sleep_secs)
    if json is not None and jax.process_index() == 0:
        found = {
            "name": "train_lm",
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "commit": git_commit(),
            "versions": versions(),
            "device": cpu_device() if device == "cpu" else jax.devices()[0].device_kind,
            "seed": seed,
            "settings": settings,
            "parameters": parameters,
            "corpus": {"sha256": sha256, "bytes": len(corpus)},
            "rows": rows,  # the steps that this process ran; a trainer that died took its own with it
            "targets": [],
        }
        json.parent.mkdir(parents=True, exist_ok=True)
        json.write_text(jsonlib.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
