"""The cut update equals the whole update, for every kind of optimizer, with chunks that cut and span leaves."""

import pathlib
import re
import subprocess
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from leto_jax.errors import UnsupportedOptimizerError, UsageError
from leto_jax.rmu import expression, slicing
from leto_jax.rmu.slicing import slice_update

SEED = 7
HERE = pathlib.Path(__file__).name
SHAPES = {"dense": {"bias": (80,), "kernel": (70, 80)}, "gain": (), "head": (72, 64), "mixer": (8, 4, 3)}
PATHS = ["['dense']['bias']", "['dense']['kernel']", "['gain']", "['head']", "['mixer']"]


def is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def structs(dtype: Any = jnp.float32, shapes: Any = SHAPES) -> Any:
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), shapes, is_leaf=is_shape)


def randoms(struct: Any, seed: int, scale: float = 1.0) -> Any:
    rng = np.random.default_rng(seed)

    def one(x: Any) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return jnp.asarray(rng.integers(1, 9, x.shape), x.dtype)
        return jnp.asarray(scale * rng.standard_normal(x.shape), x.dtype)

    return jax.tree.map(one, struct)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


def schedule() -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 20)


def labels(tree: Any) -> Any:
    return {"dense": {"bias": "frozen", "kernel": "adam"}, "gain": "sgd", "head": "frozen", "mixer": "adam"}


def run_chunks(sliced: slicing.Sliced, grads: Any, params: Any, states: Any, companions: Any, step: Any, loss: Any) -> Any:
    """One update the way the transaction makes it: decide, then ranges of the leaves of each signature that cut and span leaves."""
    reads = sliced.decide_reads
    some = lambda arrays, wanted: [x if i in wanted else None for i, x in enumerate(arrays)]  # noqa: E731
    new_shared, values = sliced.decide(
        some(grads, reads.grads),
        some(params, reads.params),
        some(states, reads.states),
        {},
        step if reads.step else None,
        loss if reads.loss else None,
    )
    assert [(x.shape, x.dtype) for x in new_shared + values] == [(s.shape, s.dtype) for specs in sliced.decide_specs for s in specs]
    new_params, new_states, compute = list(params), list(states), [None] * len(params)
    new_companions = {name: list(arrays) for name, arrays in companions.items()}
    for j, array in zip(sliced.shared, new_shared, strict=True):
        new_states[j] = array

    def take(i: int, kind: str) -> Any:
        name, _, rest = kind.partition(":")
        return {
            "param": lambda: params[i],
            "grad": lambda: grads[i],
            "state": lambda: states[sliced.leaves[i].states[int(rest)]],
            "companion": lambda: companions[rest][i],
        }[name]()

    def put(i: int, kind: str, array: Any) -> None:
        name, _, rest = kind.partition(":")
        if name == "param":
            new_params[i] = array
        elif name == "state":
            new_states[sliced.leaves[i].states[int(rest)]] = array
        elif name == "companion":
            new_companions[rest][i] = array
        else:
            compute[i] = array

    for signature in sliced.signatures:
        if not signature.elementwise:
            for i in signature.leaves:
                leaf = sliced.leaves[i]
                inputs = {port.kind: take(i, port.kind) for port in signature.inputs}
                assert all(port.shape == inputs[port.kind].shape for port in signature.inputs)
                outputs = sliced.apply(signature, [values[k] for k in leaf.values], inputs, leaf.shape)
                for port, array in zip(signature.outputs, outputs, strict=True):
                    assert (array.shape, array.dtype) == (port.shape, port.dtype)
                    put(i, port.kind, array)
            continue
        assert signature.values is not None
        lanes = [jnp.concatenate([take(i, port.kind).ravel() for i in signature.leaves]) for port in signature.inputs]
        assert [lane.dtype for lane in lanes] == [port.dtype for port in signature.inputs]
        n = lanes[0].size
        cuts = sorted({0, min(3, n), n // 3, max(n - 5, 0), n})
        pieces = [
            sliced.apply(signature.index, [values[k] for k in signature.values], [lane[a:b] for lane in lanes], (b - a,))
            for a, b in zip(cuts, cuts[1:])
        ]
        for port, *parts in zip(signature.outputs, *pieces, strict=True):
            lane, at = jnp.concatenate(parts), 0
            assert lane.shape == (n,) and lane.dtype == port.dtype
            for i in signature.leaves:
                size = int(np.prod(sliced.leaves[i].shape))
                put(i, port.kind, lane[at : at + size].reshape(sliced.leaves[i].shape))
                at += size
    return new_params, new_states, new_companions, compute


def assert_close(found: Any, expected: Any, what: str, ulps: float) -> None:
    """Integers and bytes equal, floating numbers within some ulp (of the larger of the number and the array's mean size)."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype), what
    if not jnp.issubdtype(found.dtype, jnp.floating):
        np.testing.assert_array_equal(found, expected, err_msg=what)
        return
    eps = float(jnp.finfo(found.dtype).eps)
    a, b = found.astype(np.float64), expected.astype(np.float64)
    typical = np.sum(np.abs(b), where=np.isfinite(b)) / max(b.size, 1)
    bound = ulps * eps * (np.abs(b) + typical)
    np.testing.assert_array_equal(np.isfinite(a), np.isfinite(b), err_msg=what)
    worst = np.max(np.where(np.isfinite(b), np.abs(a - b) - bound, 0.0), initial=0.0)
    assert worst <= 0, f"{what}: off by {np.max(np.abs(a - b))}, seed {SEED}"


def check(
    tx: Any, struct: Any = None, *, steps: int = 3, ulps: float = 4, bad_step: int | None = None, grad_scale: float = 1.0, **options: Any
) -> Any:
    """Runs an optimizer whole, as a user would, and cut; compares after each step."""
    struct = structs() if struct is None else struct
    sliced = slice_update(tx, struct, **options)
    params = randoms(struct, SEED)
    opt_state = tx.init(params)
    after = options.get("after_update") or {}
    companions = {name: jax.tree.map(init, params) for name, (init, _) in after.items()}
    extended = optax.with_extra_args_support(tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx)

    @jax.jit
    def plain(grads, params, opt_state, companions, step, loss):  # type: ignore[no-untyped-def]
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        try:
            updates, opt_state = extended.update(grads, opt_state, params, value=loss)
        except TypeError:
            updates, opt_state = extended.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        companions = {name: jax.tree.map(lambda p, c, f=f: f(p, c, step), params, companions[name]) for name, (_, f) in after.items()}
        return params, opt_state, companions

    cut = jax.jit(lambda *args: run_chunks(sliced, *args))
    flat = sliced.params_treedef.flatten_up_to
    for step in range(1, steps + 1):
        grads = randoms(struct, SEED + step, grad_scale)
        dtypes = options.get("grad_dtypes") or [x.dtype for x in flat(struct)]
        grads = sliced.params_treedef.unflatten([g.astype(d) for g, d in zip(flat(grads), dtypes, strict=True)])
        grads = jax.tree.map(lambda g, s: g if jnp.issubdtype(s.dtype, jnp.inexact) else jnp.zeros_like(g), grads, struct)
        if step == bad_step:
            grads = jax.tree.map(lambda g: g * jnp.nan, grads)
        loss = jnp.float32(3.0 if step == 2 else 1.0 / step)
        args = (flat(grads), flat(params), sliced.flatten_state(opt_state), {name: flat(tree) for name, tree in companions.items()})
        new_params, new_states, new_companions, compute = cut(*args, jnp.int32(step), loss)
        params, opt_state, companions = plain(grads, params, opt_state, companions, jnp.int32(step), loss)
        for path, a, b in zip(PATHS, new_params, flat(params), strict=False):
            assert_close(a, b, f"step {step}, params{path}", ulps)
        for path, a, b in zip(sliced.state_paths, new_states, sliced.flatten_state(opt_state), strict=True):
            assert_close(a, b, f"step {step}, state{path}", ulps)
        for name in companions:
            for i, (a, b) in enumerate(zip(new_companions[name], flat(companions[name]), strict=True)):
                if not sliced.leaves[i].frozen:
                    assert_close(a, b, f"step {step}, {name} {i}", ulps)
        for leaf, p, c in zip(sliced.leaves, new_params, compute, strict=True):
            assert (c is None) == (leaf.compute_dtype is None or leaf.frozen)
            if c is not None:
                np.testing.assert_array_equal(c, p.astype(leaf.compute_dtype))
    assert sorted([*sliced.shared, *sliced.passthrough, *(j for leaf in sliced.leaves for j in leaf.states)]) == list(
        range(len(sliced.state_specs))
    )
    rebuilt = sliced.unflatten_state(new_states)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(opt_state)
    assert [x.dtype for x in jax.tree.leaves(rebuilt)] == [x.dtype for x in jax.tree.leaves(opt_state)]
    return sliced


class Case(NamedTuple):
    tx: Any
    elementwise: int  # signatures
    whole: int  # leaves
    frozen: int = 0  # leaves
    options: dict[str, Any] = {}


def with_mask(mask: Any) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule(), weight_decay=0.1, mask=mask))


CASES = {
    "adamw, clip, schedule, mask callable": lambda: Case(with_mask(matrices), 2, 0),
    "adamw, clip, schedule, mask tree": lambda: Case(with_mask(matrices(randoms(structs(), 0))), 2, 0),
    "adam, then clip": lambda: Case(optax.chain(optax.adam(0.1), optax.clip_by_global_norm(0.5)), 1, 0),
    "masked": lambda: Case(optax.masked(optax.adam(0.1), matrices), 2, 0),
    "multi_transform": lambda: Case(
        optax.multi_transform({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1), "frozen": optax.set_to_zero()}, labels), 2, 0, frozen=2
    ),
    "inject_hyperparams": lambda: Case(optax.inject_hyperparams(optax.adamw)(learning_rate=schedule(), weight_decay=0.1), 1, 0),
    "MultiSteps": lambda: Case(optax.MultiSteps(optax.adamw(0.1), 2), 1, 0, options={"steps": 4}),
    "MultiSteps, skipping": lambda: Case(
        optax.MultiSteps(optax.adam(0.1), 2, should_skip_update_fn=optax.skip_not_finite), 1, 0, options={"steps": 4, "bad_step": 2}
    ),
    "lion": lambda: Case(optax.lion(0.1), 1, 0),
    "sgd": lambda: Case(optax.sgd(schedule()), 1, 0),
    "sgd momentum": lambda: Case(optax.sgd(0.1, momentum=0.9), 1, 0),
    "sgd nesterov": lambda: Case(optax.sgd(0.1, momentum=0.9, nesterov=True), 1, 0),
    "rmsprop": lambda: Case(optax.rmsprop(0.1, centered=True, momentum=0.9), 1, 0),
    "nadam": lambda: Case(optax.chain(optax.clip_by_global_norm(1.0), optax.nadam(schedule())), 1, 0),
    "lamb": lambda: Case(optax.lamb(0.1), 0, 5, options={"ulps": 32}),
    "adafactor": lambda: Case(optax.adafactor(0.1, min_dim_size_to_factor=32), 0, 5, options={"ulps": 32}),
    "muon": lambda: Case(contrib.muon(0.1), 1, 2, options={"ulps": 1024}),
    "schedule_free": lambda: Case(contrib.schedule_free_adamw(0.1, warmup_steps=2), 1, 0),
    "reduce_on_plateau": lambda: Case(optax.chain(optax.adam(0.1), contrib.reduce_on_plateau(patience=1, accumulation_size=1)), 1, 0),
    "sam": lambda: Case(
        contrib.sam(optax.adam(0.1), optax.chain(contrib.normalize(), optax.sgd(0.05)), sync_period=2), 1, 0, options={"steps": 4}
    ),
    "prodigy": lambda: Case(contrib.prodigy(0.1), 1, 0, options={"ulps": 16}),
    "apply_if_finite": lambda: Case(optax.apply_if_finite(optax.adam(0.1), 3), 1, 0, options={"bad_step": 2}),
    "add_noise": lambda: Case(optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.1)), 1, 4),
    "novograd": lambda: Case(optax.chain(optax.clip_by_global_norm(1.0), optax.novograd(0.1)), 0, 5, options={"ulps": 16}),
    "mechanize": lambda: Case(contrib.mechanize(optax.adam(0.1)), 1, 0, options={"ulps": 64}),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_whole(name: str) -> None:
    case = CASES[name]()
    sliced = check(case.tx, **case.options)
    counts = (
        sum(s.elementwise for s in sliced.signatures),
        sum(len(s.leaves) for s in sliced.signatures if not s.elementwise),
        len(sliced.frozen),
    )
    assert counts == (case.elementwise, case.whole, case.frozen), [s.reason for s in sliced.signatures]
    assert all((s.reason is None) == s.elementwise for s in sliced.signatures)


if __name__ == "__main__":  # Prints what another process must find, too.
    for case_name, make in CASES.items():
        found = slice_update(make().tx, structs())
        print(case_name, found.fingerprint, *(s.fingerprint for s in found.signatures))
