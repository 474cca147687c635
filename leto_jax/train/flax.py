"""Bridges from Flax models to `(init, loss_fn)`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as _linen
from flax import nnx as _nnx

from leto_jax import errors

PyTree = Any


def nnx(make_model: Callable[[_nnx.Rngs], _nnx.Module], loss: Callable) -> tuple[Callable, NnxLoss]:
    """`(init, loss_fn)` for a flax.nnx model.

    The model is split by type: its `nnx.Param` variables are the parameters, everything else that it holds (BatchNorm statistics, RNG
    keys and counts) is extras. Both are plain dicts of arrays. Before each call of `loss`, every RNG stream in the model gets a key
    derived from the step's key and a count of 0, so a step that is redone draws the same numbers.

    make_model(rngs) -> an nnx.Module in training mode, built with `rngs`; a pure function. loss(model, batch) -> a scalar, or (scalar,
    dict of metrics). `loss_fn.model(state.params, state.extras)` is the model again, for evaluation.

        init, loss_fn = leto.flax.nnx(lambda rngs: Net(width=128, rngs=rngs), lambda model, batch: jnp.mean(model(batch["x"]) ** 2))

    Raises UsageError: here for arguments of another kind, and when traced for a make_model or loss that returns something else.
    """
    if isinstance(make_model, _nnx.Module | _linen.Module):
        name = type(make_model).__name__
        raise errors.UsageError(
            f"leto.flax.nnx: make_model: expected a function of rngs, found a {name}; write lambda rngs: {name}(..., rngs=rngs)"
        )
    if not callable(make_model):
        raise errors.UsageError(f"leto.flax.nnx: make_model: expected a function of rngs, found {_kind(make_model)}")
    _require_callable("nnx", loss, "loss(model, batch)")

    def init(key):
        return _split(_build(make_model, key))

    return init, NnxLoss(make_model, loss)


class NnxLoss:
    """`loss_fn(params, extras, batch, key) -> (loss, (extras, metrics))` of an nnx model; `nnx` makes it."""

    def __init__(self, make_model: Callable[[_nnx.Rngs], _nnx.Module], loss: Callable):
        self._make_model, self._loss = make_model, loss

    def __call__(self, params: PyTree, extras: PyTree, batch: PyTree, key: jax.Array):
        model = self.model(params, extras)
        streams = {stream.key.tag for _, stream in _nnx.iter_graph(model) if isinstance(stream, _nnx.RngStream)}
        seeds: dict[str, Any] = _keys(sorted(streams), key)
        _nnx.reseed(model, policy="match_shape", **seeds)
        value, metrics = _value_and_metrics("nnx", self._loss(model, batch))
        return value, (_split(model)[1], metrics)

    def model(self, params: PyTree, extras: PyTree) -> Any:
        """The model with these values, in training mode as `make_model` left it; `model.eval()` switches.

        It shares the arrays that it is given: a model of `state.params` ends with that state, as the arrays do.
        """
        # copy: a Variable made at another trace level must not be written to (TraceContextError).
        return _nnx.merge(self._graphdef, params, extras, copy=True)

    @functools.cached_property
    def _graphdef(self):
        """The model's structure, by abstract evaluation: in this process `init` may never have run."""
        return _nnx.split(_nnx.eval_shape(lambda: _build(self._make_model, jax.random.key(0))))[0]


def linen(
    model: _linen.Module, loss: Callable, example: tuple, *, rngs: tuple[str, ...] = ("dropout",), **init_options: Any
) -> tuple[Callable, Callable]:
    """`(init, loss_fn)` for a flax.linen model.

    The collection 'params' is the parameters, the other collections that `model.init` makes ('batch_stats') are extras.

    loss(apply, batch) -> a scalar, or (scalar, dict of metrics), where `apply(*args, **kwargs)` is the model with the current variables
    and RNG keys derived from the step's key, keeping what its mutable collections become. example: arguments with which the model is
    initialised, a tuple; arrays may be jax.ShapeDtypeStructs (zeros then). rngs: RNG streams besides 'params'. init_options: keywords
    for `model.init` (train=True, method=...). For evaluation call `model.apply({"params": state.params, **state.extras}, ...)`.

        init, loss_fn = leto.flax.linen(net, lambda apply, batch: jnp.mean(apply(batch["x"], train=True) ** 2), (batch["x"],), train=True)

    Raises UsageError: here for arguments of another kind, and when traced for a loss that returns something else.
    """
    if not isinstance(model, _linen.Module):
        raise errors.UsageError(
            f"leto.flax.linen: model: expected a flax.linen.Module, found {_kind(model)}; nnx models go to leto.flax.nnx"
        )
    _require_callable("linen", loss, "loss(apply, batch)")
    if not isinstance(example, tuple):
        raise errors.UsageError(f"leto.flax.linen: example: expected a tuple of arguments for init, found {_kind(example)}; write (x,)")
    if isinstance(rngs, str) or "params" in rngs:
        raise errors.UsageError(f"leto.flax.linen: rngs: expected a tuple of stream names besides 'params', found {rngs!r}")

    def init(key):
        arguments = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x, example)
        variables = model.init(_keys(("params", *rngs), key), *arguments, **init_options)
        return variables.get("params", {}), {name: tree for name, tree in variables.items() if name != "params"}

    def loss_fn(params, extras, batch, key):
        collections, calls = dict(extras), 0

        def apply(*args, **kwargs):
            nonlocal calls
            clash = sorted({"rngs", "mutable"} & kwargs.keys())
            if clash:
                advice = "name RNG streams in leto.flax.linen(rngs=...); mutable are the collections that init makes"
                raise errors.UsageError(f"leto.flax.linen: apply: expected no {clash[0]!r}, it is set here; {advice}")
            streams = _keys(rngs, jax.random.fold_in(key, calls))
            calls += 1
            out, updated = model.apply({"params": params, **collections}, *args, rngs=streams, mutable=list(extras), **kwargs)
            collections.update(updated)
            return out

        value, metrics = _value_and_metrics("linen", loss(apply, batch))
        return value, (collections, metrics)

    return init, loss_fn


def _build(make_model: Callable[[_nnx.Rngs], _nnx.Module], key: jax.Array) -> _nnx.Module:
    model = make_model(_nnx.Rngs(key))
    if not isinstance(model, _nnx.Module):
        raise errors.UsageError(f"leto.flax.nnx: make_model(rngs): expected an nnx.Module, found {_kind(model)}")
    return model


def _split(model: _nnx.Module) -> tuple[PyTree, PyTree]:
    """(parameters, extras) of a model as plain dicts of arrays."""
    params, extras = _nnx.state(model, _nnx.Param, ...)
    return _nnx.to_pure_dict(params), _nnx.to_pure_dict(extras)


def _keys(names: Sequence[str], key: jax.Array) -> dict[str, jax.Array]:
    return {name: jax.random.fold_in(key, n) for n, name in enumerate(names)}


def _require_callable(bridge: str, loss: Any, form: str) -> None:
    if not callable(loss):
        raise errors.UsageError(f"leto.flax.{bridge}: loss: expected a function {form}, found {_kind(loss)}")


def _value_and_metrics(bridge: str, out: Any) -> tuple[jax.Array, dict[str, Any]]:
    """What the user's loss returned, as (scalar, metrics)."""
    value, metrics = out if isinstance(out, tuple) and len(out) == 2 else (out, {})
    if not isinstance(value, jax.Array) or not isinstance(metrics, Mapping):
        found = f"a tuple of {len(out)} ({', '.join(map(_kind, out))})" if isinstance(out, tuple) else _kind(out)
        raise errors.UsageError(f"leto.flax.{bridge}: loss: expected a scalar or (scalar, dict of metrics), found {found}")
    return value, dict(metrics)


def _kind(x: Any) -> str:
    return f"class {x.__name__}" if isinstance(x, type) else type(x).__name__
