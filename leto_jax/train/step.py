"""`TrainStep`: what one step consists of, as functions of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from leto_jax import errors
from leto_jax.rmu.programs import NON_FINITE, StepSpec


class TrainStep:
    """A training step: a loss (or gradients) and an optax transformation.

    loss_fn(params, extras, batch, key) -> (loss, (extras, metrics)): loss is a floating scalar, metrics a dict; extras come back with the
        structure, shapes and dtypes they went in with.
    tx: any optax transformation; it is traced once on the whole tree and cut into chunks. It gets the loss as extra argument `value`.
    grad_fn(params, extras, batch, key) -> (grads, extras, metrics): instead of loss_fn, for microbatches and the like; metrics has 'loss'.
    after_update: name -> (init_leaf, f): companions of every parameter leaf, such as an average; `init_leaf(param)` gives the first
        value, `f(new_param, companion, step)` the next one, elementwise or over the whole leaf.
    compute_dtype: keep parameters in their own dtype and hand the loss a copy in this one, written with each update.
    non_finite: what to do when the loss or a gradient is not finite: 'stop' (exit code 3, state kept), 'skip' (the step changes
        nothing, step number and data go on) or 'continue'.

    Raises UsageError or UnsupportedOptimizerError when the session traces it.
    """

    def __init__(
        self,
        loss_fn: Callable | None = None,
        tx: optax.GradientTransformation | None = None,
        *,
        grad_fn: Callable | None = None,
        after_update: Mapping[str, tuple[Callable, Callable]] | None = None,
        compute_dtype: Any = None,
        non_finite: str = "stop",
    ):
        if (loss_fn is None) == (grad_fn is None):
            raise errors.UsageError("TrainStep: expected exactly one of loss_fn and grad_fn")
        if not (isinstance(tx, tuple) and hasattr(tx, "init") and hasattr(tx, "update")):
            raise errors.UsageError(f"TrainStep: tx: expected an optax.GradientTransformation, found {type(tx).__name__}")
        if non_finite not in NON_FINITE:
            raise errors.UsageError(f"TrainStep: non_finite: expected one of {', '.join(NON_FINITE)}, found {non_finite!r}")
        if compute_dtype is not None and not jnp.issubdtype(jnp.dtype(compute_dtype), jnp.floating):
            raise errors.UsageError(f"TrainStep: compute_dtype: expected a floating dtype, found {jnp.dtype(compute_dtype).name}")
        for name, pair in (after_update or {}).items():
            if not (isinstance(pair, tuple) and len(pair) == 2 and all(callable(f) for f in pair)):
                raise errors.UsageError(f"TrainStep: after_update[{name!r}]: expected (init_leaf, f), found {pair!r}")
        self.spec = StepSpec(loss_fn, grad_fn, tx, dict(after_update or {}), compute_dtype, non_finite)
