"""A failure in the update phase every ten steps: what the loss does with retained memory alone, and with transactions as well.

    python experiments/loss_curve_gpu.py [--json FILE] [--steps 100] [--device gpu]

    reference     the script by itself, nothing fails
    RMP only      retained memory without transactions: each failure leaves the first half of the leaves updated and the other half not, and the
                  step is done again on that. In one process, plain JAX: this is what would be left, not how fast it would go on
    RMP + RMU     `leto run`, a real SIGKILL between two marks of the update every ten steps, each time with a ready shadow

bit_identical is 1 if losses and final state of the last are those of the first. With XLA's flag for repeatable programs.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax
import train_lm
import typer
from _result import JsonOption, cpu_device, git_commit, write_result

import leto_jax as leto
from leto_jax.agent import client
from leto_jax.config import deterministic, state_root
from leto_jax.errors import LetoError
from leto_jax.goodput import journal

SHAPES = {
    "gpu": {"width": 1024, "depth": 8, "heads": 16, "context": 256, "batch": 16},
    "cpu": {"width": 128, "depth": 2, "heads": 4, "context": 64, "batch": 8},
}
EVERY = 10
PAUSE_SECS = {"gpu": 2.0, "cpu": 1.0}  # so that a shadow gets ready within ten steps
DEADLINE_SECS = 120.0
FINAL = re.compile(r"^final step=(\d+) loss=(\S+) digest=sha256:([0-9a-f]{64})$", re.MULTILINE)
LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)


def script(device: str, steps: int, seed: int) -> list[str]:
    options = [word for name, value in SHAPES[device].items() for word in (f"--{name}", str(value))]
    return [str(Path(train_lm.__file__)), *options, "--steps", str(steps), "--seed", str(seed), "--device", device]


def reference(device: str, steps: int, seed: int) -> str:
    done = subprocess.run(
        [sys.executable, *script(device, steps, seed)], env=deterministic(os.environ), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the reference run ended with exit code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def protected(device: str, steps: int, seed: int, failures: list[int]) -> tuple[str, list[dict[str, Any]]]:
    """Output and takeovers of a run that is killed in the update of each step in `failures`."""
    job = f"curve-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="leto-curve-") as directory:
        pausing, out = Path(directory) / "pausing", Path(directory) / "out"
        pauses = ["--sleep-secs", str(PAUSE_SECS[device]), "--sleep-while", str(pausing)]
        command = [sys.executable, "-m", "leto_jax.cli", "run", "--job", job, "--deterministic", *script(device, steps, seed), *pauses]
        with open(out, "w") as stdout, subprocess.Popen(command, stdout=stdout) as process:
            try:
                for step in failures:
                    pausing.touch()
                    _wait_for_shadow(job, process)
                    kill = {"op": "inject", "kind": "sigkill", "phase": "update", "step": step, "when_ready": True}
                    with ThreadPoolExecutor(1) as pool:
                        fired = pool.submit(client.ask, job, {**kill, "deadline_secs": DEADLINE_SECS}, DEADLINE_SECS + 5)
                        time.sleep(0.5)  # it is armed by then, and on we go to that step
                        pausing.unlink()
                        fired.result()
                    print(f"killed in the update of step {step}", file=sys.stderr, flush=True)
                process.wait(DEADLINE_SECS)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
        events = journal.read(state_root() / job / "journal.jsonl")
        return out.read_text(), [event for event in events if event["event"] == "takeover"]


def _wait_for_shadow(job: str, process: subprocess.Popen) -> None:
    end = time.monotonic() + DEADLINE_SECS
    while time.monotonic() < end and process.poll() is None:
        try:
            if any(rank["role"] == "shadow" and rank["phase"] == "ready" for rank in client.ask(job, {"op": "status"})["ranks"]):
                return
        except LetoError:
            pass  # it does not answer yet
        time.sleep(0.1)
    raise TimeoutError(f"no shadow of {job} was ready within {DEADLINE_SECS:.0f} s")


def retained_only(device: str, steps: int, seed: int, failures: list[int]) -> dict[int, float]:
    """Losses of plain training in which each failure leaves half of the leaves updated, and the step is done again on that."""
    shape = SHAPES[device]
    init, loss_fn = leto.flax.nnx(
        lambda rngs: train_lm.ByteLM(shape["width"], shape["depth"], shape["heads"], shape["context"], 0.1, rngs=rngs), train_lm.loss
    )
    tx, key = train_lm.optimizer(steps, 1e-3), jax.random.key(seed)
    batches = train_lm.windows(train_lm.read_corpus()[: -train_lm.HELD_OUT_BYTES], shape["batch"], shape["context"], seed)

    @jax.jit
    def step(state, batch, key):
        params, opt_state, extras = state
        (loss, (extras, _)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, extras, batch, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, extras), loss

    params, extras = jax.jit(init)(key)
    state, losses = (params, tx.init(params), extras), {}
    for t in range(1, steps + 1):
        if t in failures:
            new, _ = step(state, batches(t), jax.random.fold_in(key, t))
            old_leaves, tree = jax.tree.flatten(state[:2])
            new_leaves = jax.tree.leaves(new[:2])
            large = [i for i, x in enumerate(old_leaves) if x.size > 1]
            torn = set(large[: len(large) // 2])
            state = (
                *jax.tree.unflatten(tree, [n if i in torn else o for i, (o, n) in enumerate(zip(old_leaves, new_leaves, strict=True))]),
                state[2],
            )
        state, loss = step(state, batches(t), jax.random.fold_in(key, t))
        losses[t] = float(loss)
    return losses


def losses_of(text: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in LOSS.findall(text)}


def draw(curves: dict[str, dict[int, float]], failures: list[int], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for (name, losses), (colour, width, style) in zip(
        curves.items(), (("#8c8c8c", 5, "-"), ("#c44e52", 1.2, "-"), ("#4c72b0", 1.5, "--")), strict=True
    ):
        axes.plot(list(losses), list(losses.values()), label=name, color=colour, linewidth=width, linestyle=style)
    for step in failures:
        axes.axvline(step, color="#dddddd", linewidth=0.8, zorder=0)
    axes.set_xlabel("step (a line: a failure in its update)")
    axes.set_ylabel("loss, nats per byte")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main(
    steps: Annotated[int, typer.Option(min=20)] = 100,
    device: Annotated[str, typer.Option(help="gpu, or cpu to try the script.")] = "gpu",
    seed: int = 0,
    commit: Annotated[str | None, typer.Option(help="Commit to note, where there is no repository.")] = None,
    json_path: JsonOption = None,
) -> None:
    os.environ.update({**deterministic(os.environ), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"})
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[device])
    failures = list(range(EVERY, steps, EVERY))
    alone = reference(device, steps, seed)
    shadowed, takeovers = protected(device, steps, seed, failures)
    curves = {
        "reference": losses_of(alone),
        "RMP only (half of the update lost at each failure)": retained_only(device, steps, seed, failures),
        "RMP + RMU": losses_of(shadowed),
    }
    names = list(curves)
    identical = curves[names[0]] == curves[names[2]] and FINAL.findall(alone)[-1:] == FINAL.findall(shadowed)[-1:] != []
    identical = identical and [item["step"] + 1 for item in takeovers] == failures
    apart = float(np.mean([abs(curves[names[1]][t] - curves[names[0]][t]) for t in curves[names[0]] if t > failures[0]]))
    rows = [
        {
            "step": t,
            "reference": curves[names[0]][t],
            "rmp_only": curves[names[1]][t],
            "rmp_rmu": curves[names[2]][t],
            "failure": t in failures,
        }
        for t in sorted(curves[names[0]])
    ]
    settings = {"steps": steps, "every": EVERY, **SHAPES[device], "takeovers": len(takeovers), "rmp_only_mean_difference": apart}
    name = cpu_device() if device == "cpu" else jax.devices()[0].device_kind
    print(json.dumps({"takeover_secs": [round(item["takeover_secs"], 3) for item in takeovers], "rmp_only_mean_difference": apart}))
    path = write_result(
        "loss_curve_gpu", None, rows, settings, seed, {"bit_identical": float(identical)}, json_path, name, commit or git_commit()
    )
    draw(curves, failures, path.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
