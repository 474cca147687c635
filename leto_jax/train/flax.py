"""Bridges from Flax models to `(init, loss_fn)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx as _nnx

from leto_jax import errors

PyTree = Any


def nnx(make_model: Callable[[Any], Any], loss: Callable, *, streams: tuple[str, ...] = ("params", "dropout")) -> tuple[Callable, Callable]:
    """`(init, loss_fn)` for a flax.nnx model.

    make_model(rngs) -> an nnx.Module. loss(model, batch) -> scalar, or (scalar, metrics dict); it may call the model in training mode.
    streams: names of RNG streams; each step they are seeded anew from the step's key.
    Parameters are the model's `nnx.Param` variables; everything else that it holds (BatchNorm statistics, RNG state) is extras.
    """
    holder: list[Any] = []

    def init(key):
        model = make_model(_nnx.Rngs(**{name: jax.random.fold_in(key, n) for n, name in enumerate(streams)}))
        graphdef, params, extras = _nnx.split(model, _nnx.Param, ...)
        if not holder:
            holder.append(graphdef)
        return _nnx.to_pure_dict(params), _nnx.to_pure_dict(extras)

    def structure() -> tuple[Any, Any, Any]:
        """Graph and abstract states, traced when first needed: `init` may not have run in this process."""
        model = _nnx.eval_shape(lambda: make_model(_nnx.Rngs(**{name: n for n, name in enumerate(streams)})))
        return _nnx.split(model, _nnx.Param, ...)

    cached: list[tuple[Any, Any, Any]] = []

    def loss_fn(params, extras, batch, key):
        if not cached:
            cached.append(structure())
        graphdef, param_state, extra_state = cached[0]
        param_state, extra_state = jax.tree.map(lambda x: x, param_state), jax.tree.map(lambda x: x, extra_state)
        _nnx.replace_by_pure_dict(param_state, params)
        _nnx.replace_by_pure_dict(extra_state, extras)
        model = _nnx.merge(graphdef, param_state, extra_state, copy=True)
        _nnx.reseed(model, **{name: jax.random.fold_in(key, n) for n, name in enumerate(streams)})
        out = loss(model, batch)
        value, metrics = out if isinstance(out, tuple) else (out, {})
        _, _, new_extras = _nnx.split(model, _nnx.Param, ...)
        return value, (_nnx.to_pure_dict(new_extras), metrics)

    return init, loss_fn


def linen(model: Any, loss: Callable, example: PyTree, *, rngs: tuple[str, ...] = ("dropout",), method: Any = None) -> tuple[Callable, Callable]:
    """`(init, loss_fn)` for a flax.linen model.

    example: arguments with which the model is initialised, as a tuple (arrays or ShapeDtypeStructs). loss(apply, batch) -> scalar or
    (scalar, metrics dict), where `apply(*args, **kwargs)` calls the model with the current variables, collecting what its mutable
    collections become (BatchNorm). rngs: names of RNG streams besides 'params'; each step they get keys from the step's key.
    """
    if not isinstance(example, tuple):
        raise errors.UsageError(f"leto.flax.linen: example: expected a tuple of arguments for init, found {type(example).__name__}; write (x,)")

    def keys(key):
        return {name: jax.random.fold_in(key, n) for n, name in enumerate(("params", *rngs))}

    def init(key):
        arguments = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), example)
        variables = model.init(keys(key), *arguments, method=method)
        return variables["params"], {name: tree for name, tree in variables.items() if name != "params"}

    def loss_fn(params, extras, batch, key):
        current = {"extras": extras}
        streams = {name: value for name, value in keys(key).items() if name != "params"}

        def apply(*args, **kwargs):
            if not extras:
                return model.apply({"params": params}, *args, rngs=streams, **kwargs)
            out, updated = model.apply({"params": params, **current["extras"]}, *args, rngs=streams, mutable=list(extras), **kwargs)
            current["extras"] = {**current["extras"], **updated}
            return out

        out = loss(apply, batch)
        value, metrics = out if isinstance(out, tuple) else (out, {})
        return value, (current["extras"], metrics)

    return init, loss_fn
