"""A training script that is small, and that misbehaves on request. Everything before `session` is idempotent, as a shadow runs it too."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.backend import clear_backends
from jax.sharding import PartitionSpec as P

import leto_jax as leto

CLASSES, INPUTS, BATCH = 10, 64, 8
CUTS = {
    "same": P(),
    "rows": P("data"),  # optimizer state and parameters, each rank its part
    "tensor": {"w0": P(None, "data"), "w1": P("data", None), "w2": P(), "b": P("data")},
    "mixed": lambda path, leaf: P("data") if leaf.ndim == 2 and leaf.shape[0] > INPUTS else P(),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--data", choices=("function", "grain"), default="function")
    parser.add_argument("--non-finite", default="stop")
    parser.add_argument("--pause-secs", type=float, default=0.0, help="after each step that is not replayed")
    parser.add_argument("--limit", type=Path, help="file with a number: the body of that step waits until it is raised")
    parser.add_argument("--wait-in-section", action="store_true", help="there a body has no limit")
    parser.add_argument(
        "--workers", action="store_true", help="data workers: forked, forked into a session of its own, started and left alone"
    )
    parser.add_argument("--frozen-gib", type=int, default=0, help="a leaf so large that is never changed, and never made")
    for name in ("nan", "odd-batch", "clear-backends", "sleep", "section", "dead-state", "no-step", "child"):
        parser.add_argument(f"--{name}-at", type=int, default=0, metavar="STEP")
    parser.add_argument("--raise-at", type=int, default=-1, metavar="STEP", help="0: before the session")
    parser.add_argument("--sleep-secs", type=float, default=0.0)
    parser.add_argument("--ask", action="store_true", help="after the first step, a line from the terminal")
    parser.add_argument("--no-session", choices=("wait", "end"))
    parser.add_argument("--distributed", action="store_true")
    parser.add_argument("--cut", choices=CUTS, default="same", help="how parameters lie on several ranks")
    parser.add_argument("--peer-parity", type=int, default=0)
    parser.add_argument("--on-rank", type=int, default=0, help="the one that misbehaves")
    parser.add_argument("--own-key", action="store_true", help="each rank its own")
    parser.add_argument("--own-weight", action="store_true", help="a scalar in the batch, each rank its own")
    parser.add_argument("--more-steps-on", type=int, default=-1, metavar="RANK")
    parser.add_argument("--other-width-on", type=int, default=-1, metavar="RANK")
    return parser.parse_args()


def behave_by_rank(args: argparse.Namespace) -> None:
    """Only one of several ranks misbehaves."""
    if jax.process_index() != args.on_rank:
        for name in ("nan_at", "raise_at", "sleep_at", "section_at", "child_at"):
            setattr(args, name, -1)
    if jax.process_index() == args.other_width_on:
        args.width *= 2
    if jax.process_index() == args.more_steps_on:
        args.steps += 1


def model(width: int, frozen_gib: int):
    def init(key):
        keys = jax.random.split(key, 3)
        sizes = (INPUTS, width, width, CLASSES)
        params = {f"w{n}": jax.random.normal(k, pair) * 0.1 for n, (k, pair) in enumerate(zip(keys, itertools.pairwise(sizes)))}
        params["b"] = jnp.zeros((width,))
        if frozen_gib:
            params["frozen"] = jnp.zeros((frozen_gib, 1 << 28))
        return params, {"steps": jnp.zeros((), jnp.int32)}

    def loss_fn(params, extras, batch, key):
        hidden = jnp.tanh(batch["x"] @ params["w0"] + params["b"])
        hidden = jnp.tanh(hidden @ params["w1"]) * jax.random.bernoulli(key, 0.9, (width,))
        loss = jnp.mean((hidden @ params["w2"] - batch["y"]) ** 2) * batch.get("weight", 1.0)
        return loss, ({"steps": extras["steps"] + 1}, {"double": 2 * loss})

    return init, loss_fn


def optimizer(args: argparse.Namespace):
    if args.optimizer == "sgd":
        return optax.sgd(args.rate)
    decayed = optax.adamw(optax.linear_schedule(0.0, args.rate, 8), mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params))
    tx = optax.chain(optax.clip_by_global_norm(1.0), decayed)
    if not args.frozen_gib:
        return tx
    labels = lambda params: {name: "frozen" if name == "frozen" else "trained" for name in params}
    return optax.multi_transform({"trained": tx, "frozen": optax.set_to_zero()}, labels)


def dataset(args: argparse.Namespace):
    def batch(step: int):
        rng = np.random.default_rng([step, jax.process_index()] if jax.process_count() > 1 else step)
        count = BATCH - 1 if step == args.odd_batch_at else BATCH
        x, y = rng.normal(size=(count, INPUTS)).astype(np.float32), rng.normal(size=(count, CLASSES)).astype(np.float32)
        if step == args.nan_at:
            x[0, 0] = np.nan
        return {"x": x, "y": y} | ({"weight": np.float32(1 + jax.process_index())} if args.own_weight else {})

    if args.data == "function":
        return batch
    import grain.python as grain

    return grain.MapDataset.range(1, 1000).shuffle(seed=1).map(batch).to_iter_dataset()


def fork_worker(own_session: bool) -> None:
    if os.fork() == 0:
        if own_session:
            os.setsid()
        time.sleep(600)
        os._exit(0)


def start_workers() -> None:
    """What data pipelines start: processes that know nothing of leto and sleep on. One is forked by a thread that ends."""
    thread = threading.Thread(target=fork_worker, args=(False,))
    thread.start()
    thread.join()
    fork_worker(True)
    forget = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    subprocess.run([sys.executable, "-S", "-c", forget], check=True, start_new_session=True)


def wait_for_limit(path: Path, step: int) -> None:
    while not (path.exists() and int(path.read_text() or 0) > step):
        time.sleep(0.005)


def main() -> None:
    args = options()
    if args.raise_at == 0:
        raise ValueError("raised before the session")
    if args.no_session:
        time.sleep(600 if args.no_session == "wait" else 0)
        return
    if args.distributed:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        jax.distributed.initialize(f"localhost:{port}", num_processes=1, process_id=0)
    behave_by_rank(args)
    if args.workers:
        start_workers()
    init, loss_fn = model(args.width, args.frozen_gib)
    step = leto.TrainStep(loss_fn, optimizer(args), non_finite=args.non_finite)
    sharding = None
    if jax.process_count() > 1:
        sharding = leto.Sharding(jax.make_mesh((jax.device_count(),), ("data",)), CUTS[args.cut])
    protection = leto.Protection(chunk_bytes=1 << 30 if args.frozen_gib else 1 << 17, peer_parity=args.peer_parity)
    with leto.session(
        init,
        step,
        dataset(args),
        key=jax.random.key(jax.process_index() * args.own_key),
        steps=args.steps,
        protection=protection,
        sharding=sharding,
    ) as s:
        state = s.state
        for t, batch in s:
            if t == args.clear_backends_at:
                clear_backends()
            if t == args.no_step_at:
                continue
            before = state
            state, metrics = s.step(state, batch)
            if t == args.dead_state_at:
                s.step(before, batch)
            print(f"step {t} loss {float(metrics['loss'])!r}", flush=True)
            if args.ask and t == 1:
                print(f"answer {input()!r}", flush=True)
            if t == args.raise_at:
                raise ValueError(f"raised in the body of step {t}")
            if t == args.sleep_at and not s.replayed:
                time.sleep(args.sleep_secs)
            if t == args.section_at:
                with s.section("evaluation", timeout_secs=600):
                    time.sleep(args.sleep_secs)
            if t == args.child_at and not s.replayed:
                subprocess.Popen(["sleep", "600"], start_new_session=True)
            if not s.replayed:
                time.sleep(args.pause_secs)
                if args.limit is not None:
                    with s.section("wait", timeout_secs=3600) if args.wait_in_section else contextlib.nullcontext():
                        wait_for_limit(args.limit, t)


if __name__ == "__main__":
    main()
