"""Trains a small convolutional net on scikit-learn's digits: BatchNorm, dropout, a Grain dataset, and an average of the parameters.

    uv run --extra experiments leto run experiments/train_digits.py

Without Grain the data is a function of the step.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import linen as nn

import leto_jax as leto

BATCH = 64
TEST_IMAGES = 6 * BATCH  # whole batches, so that one compiled evaluation serves all
Arrays = dict[str, Any]


class Net(nn.Module):
    """Two convolutions with BatchNorm, then a hidden layer with dropout. images: float32[batch, 8, 8, 1] -> logits float32[batch, 10]."""

    dropout: float

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        x = images
        for width in (16, 32):
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Conv(width, (3, 3), use_bias=False)(x)))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(self.dropout, deterministic=not train)(x))


def loss(apply: Callable, batch: Arrays) -> tuple[jax.Array, Arrays]:
    """Mean cross-entropy, and the share of right answers."""
    logits = apply(batch["image"], train=True)
    accuracy = (logits.argmax(-1) == batch["label"]).mean()
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), {"accuracy": accuracy}


def digits() -> tuple[Arrays, Arrays]:
    """(training, test) images float32[n, 8, 8, 1] in 0..1 and labels int32[n]; the order is fixed."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    whole = {"image": (images[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1), "label": labels[order].astype(np.int32)}
    return {name: x[TEST_IMAGES:] for name, x in whole.items()}, {name: x[:TEST_IMAGES] for name, x in whole.items()}


def grain_dataset(train: Arrays, seed: int) -> Any:
    """An endless Grain dataset of shuffled batches."""
    import grain

    numbers = grain.MapDataset.source(range(len(train["label"]))).shuffle(seed=seed).repeat()
    return numbers.map(lambda n: {name: x[n] for name, x in train.items()}).batch(BATCH, drop_remainder=True)


def function_dataset(train: Arrays, seed: int) -> Callable[[int], Arrays]:
    """f(step) -> batch of random images, a pure function of (seed, step)."""

    def batch_of(step: int) -> Arrays:
        chosen = np.random.default_rng([seed, step]).integers(0, len(train["label"]), BATCH)
        return {name: x[chosen] for name, x in train.items()}

    return batch_of


def main(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of initial values, dropout and batches.")] = 0,
    dropout: Annotated[float, typer.Option(min=0.0, max=0.9, help="Dropout rate.")] = 0.3,
    data: Annotated[str | None, typer.Option(help="grain or function; by default grain where it is installed.")] = None,
    device: Annotated[str, typer.Option(help="cpu or gpu.")] = "cpu",
    log_every: Annotated[int, typer.Option(min=1, help="Steps between printed losses.")] = 50,
) -> None:
    """Trains a small convolutional net on scikit-learn's digits and prints its accuracy on held-out images."""
    if device not in ("cpu", "gpu"):
        raise typer.BadParameter(f"expected cpu or gpu, found {device!r}", param_hint="--device")
    jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[device])
    has_grain = importlib.util.find_spec("grain") is not None
    data = data or ("grain" if has_grain else "function")
    if data not in ("grain", "function"):
        raise typer.BadParameter(f"expected grain or function, found {data!r}", param_hint="--data")
    if data == "grain" and not has_grain:
        raise typer.BadParameter("Grain is not installed; install it (pip install grain) or use --data function", param_hint="--data")

    train, test = digits()
    net = Net(dropout)
    example = (jax.ShapeDtypeStruct((BATCH, 8, 8, 1), jnp.float32),)
    init, loss_fn = leto.flax.linen(net, loss, example, train=True)
    average = (lambda p: p, lambda new, old, step: 0.95 * old + 0.05 * new)
    step = leto.TrainStep(loss_fn, optax.adamw(2e-3), after_update={"ema": average})
    dataset = grain_dataset(train, seed) if data == "grain" else function_dataset(train, seed)

    @jax.jit
    def evaluate(state: leto.State, batch: Arrays) -> jax.Array:
        """How many images the averaged parameters get right."""
        logits: Any = net.apply({"params": state.companions["ema"], **state.extras}, batch["image"], train=False)
        return (logits.argmax(-1) == batch["label"]).sum()

    with leto.session(init, step, dataset, key=jax.random.key(seed), steps=steps, warm=[evaluate]) as s:
        state = s.state
        for t, batch in s:
            state, metrics = s.step(state, batch)
            if t % log_every == 0 or t == steps:
                print(f"step {t} loss {float(metrics['loss'])!r} accuracy {float(metrics['accuracy']):.4f}", flush=True)
        with s.section("test", timeout_secs=60):
            right = sum(int(evaluate(state, {name: x[n : n + BATCH] for name, x in test.items()})) for n in range(0, TEST_IMAGES, BATCH))
        print(f"test accuracy {right / TEST_IMAGES:.4f}", flush=True)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
