"""Elementwise functions in a form that a kernel's body can hold.

Mosaic GPU lowers most elementwise primitives. Those below it refuses in some cases although they are made of others; here they are written
with those others, so that the value stays the same to the bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def kernel_form(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of arrays (any tree of them), traced once more and written with primitives that Mosaic GPU has."""

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        structs = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
        results: list[Any] = []

        def flat(*xs: Any) -> Sequence[Any]:
            out, out_tree = jax.tree.flatten(function(*jax.tree.unflatten(tree, xs)))
            results.append(out_tree)
            return out

        closed = jax.make_jaxpr(flat)(*structs)
        return jax.tree.unflatten(results[0], _evaluate(closed.jaxpr, closed.consts, leaves))

    return run


def _evaluate(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True)) | dict(zip(jaxpr.invars, args, strict=True))
    read = lambda atom: atom.val if isinstance(atom, jex.Literal) else env[atom]
    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [read(atom) for atom in eqn.invars]
        if name in _CALLS:
            inner = eqn.params[_CALLS[name]]
            out = _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
        elif name in _RULES:
            out = [_RULES[name](*operands, **eqn.params)]
        else:
            out = eqn.primitive.bind(*operands, **eqn.params)
            out = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _integer_pow(x: Any, *, y: int) -> Any:
    if y == 0:
        return jnp.ones_like(x)
    if y < 0:
        return jnp.ones_like(x) / _integer_pow(x, y=-y)
    return x if y == 1 else jax.lax.integer_pow(x, y)


def _select_n(which: Any, *cases: Any) -> Any:
    # Mosaic GPU neither spreads a scalar over the cases nor takes more than two of them.
    which = jnp.broadcast_to(which, cases[0].shape)
    if which.dtype == jnp.bool_:
        return jax.lax.select_n(which, *cases)
    chosen = cases[-1]  # An index out of range is the caller's fault, as it is in `lax.select_n`.
    for number, case in reversed(list(enumerate(cases[:-1]))):
        chosen = jax.lax.select_n(which == number, chosen, case)
    return chosen


def _clamp(low: Any, x: Any, high: Any) -> Any:
    return jax.lax.min(jax.lax.max(x, jnp.broadcast_to(low, x.shape)), jnp.broadcast_to(high, x.shape))


_RULES: dict[str, Callable[..., Any]] = {"clamp": _clamp, "integer_pow": _integer_pow, "select_n": _select_n}
