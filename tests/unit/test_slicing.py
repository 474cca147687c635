"""The cut update equals the whole update, for every kind of optimizer, with chunks that cut and span leaves."""

import itertools
import os
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
from leto_jax.rmu import slicing
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
    some = lambda arrays, wanted: [x if i in wanted else None for i, x in enumerate(arrays)]
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
        cuts = sorted({0, min(3, n), n // 3, n})
        pieces = [
            sliced.apply(signature.index, [values[k] for k in signature.values], [lane[a:b] for lane in lanes], (b - a,))
            for a, b in itertools.pairwise(cuts)
        ]
        for port, *parts in zip(signature.outputs, *pieces, strict=True):
            lane, at = jnp.concatenate(parts), 0
            assert (lane.shape, lane.dtype) == ((n,), port.dtype)
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
    opt_state = strong(tx.init(params))
    after = options.get("after_update") or {}
    companions = {name: jax.tree.map(init, params) for name, (init, _) in after.items()}
    extended = optax.with_extra_args_support(tx.gradient_transformation() if isinstance(tx, optax.MultiSteps) else tx)

    def whole(grads, params, opt_state, companions, step, loss):
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)
        try:
            updates, opt_state = extended.update(grads, opt_state, params, value=loss)
        except TypeError:
            updates, opt_state = extended.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        companions = {name: jax.tree.map(lambda p, c, f=f: f(p, c, step), params, companions[name]) for name, (_, f) in after.items()}
        return params, opt_state, companions

    cut = plain = None
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
        args = (*args, jnp.int32(step), loss)
        plain_args = (grads, params, opt_state, companions, jnp.int32(step), loss)
        if cut is None or plain is None:
            cut, plain = compiled(lambda *args: run_chunks(sliced, *args), *args), compiled(whole, *plain_args)
        new_params, new_states, new_companions, compute = cut(*strong(args))
        params, opt_state, companions = strong(plain(*plain_args))
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
                assert_close(c, p.astype(leaf.compute_dtype), f"step {step}, compute copy of {leaf.path}", 1)
    assert sorted([*sliced.shared, *sliced.passthrough, *(j for leaf in sliced.leaves for j in leaf.states)]) == list(
        range(len(sliced.state_specs))
    )
    rebuilt = sliced.unflatten_state(new_states)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(opt_state)
    assert [x.dtype for x in jax.tree.leaves(rebuilt)] == [x.dtype for x in jax.tree.leaves(opt_state)]
    return sliced


def strong(tree: Any) -> Any:
    """The same arrays without weak types, which no retained array has."""
    return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x, tree)


def compiled(function: Any, *args: Any) -> Any:
    """A compiled function. Less optimized than by default, since compilers take nearly all of the time of these tests."""
    return jax.jit(function).lower(*strong(args)).compile(compiler_options={"xla_backend_optimization_level": 0})


class Case(NamedTuple):
    tx: Any
    elementwise: int  # signatures
    whole: int  # leaves
    frozen: int = 0  # leaves
    options: dict[str, Any] | None = None


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
    sliced = check(case.tx, **(case.options or {}))
    counts = (
        sum(s.elementwise for s in sliced.signatures),
        sum(len(s.leaves) for s in sliced.signatures if not s.elementwise),
        len(sliced.frozen),
    )
    assert counts == (case.elementwise, case.whole, case.frozen), [s.reason for s in sliced.signatures]
    assert all((s.reason is None) == s.elementwise for s in sliced.signatures)


def ema(param: Any, companion: Any, step: Any) -> Any:
    return companion + (param - companion) / jnp.minimum(1.0 + step, 100.0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_mixed_precision_with_companions(dtype: Any) -> None:
    after = {"ema": (lambda p: p, ema), "sum": (lambda p: jnp.zeros(p.shape, jnp.float32), lambda p, c, step: c + p)}
    sliced = check(with_mask(matrices), grad_dtypes=[dtype] * 5, after_update=after, compute_dtype=jnp.bfloat16)
    assert sliced.companions == ("ema", "sum")
    assert len(sliced.signatures) == 2
    for signature in sliced.signatures:
        assert [p.kind for p in signature.inputs] == ["param", "grad", "state:0", "state:1", "companion:ema", "companion:sum"]
        assert [p.kind for p in signature.outputs] == ["param", "state:0", "state:1", "companion:ema", "companion:sum", "compute"]
        assert [p.dtype for p in signature.inputs][:2] == [jnp.float32, dtype]
        assert signature.outputs[-1].dtype == jnp.bfloat16


def test_low_precision_parameters() -> None:
    sliced = check(with_mask(matrices), structs(jnp.bfloat16), compute_dtype=jnp.bfloat16)
    assert all(leaf.compute_dtype is None for leaf in sliced.leaves)  # The parameters are what compute reads.


def test_whole_leaf_companion() -> None:
    normed = {"unit": (lambda p: p, lambda p, c, step: p / jnp.sqrt(jnp.sum(jnp.square(p)) + 1.0))}
    sliced = check(optax.sgd(0.1), after_update=normed, ulps=8)
    assert not any(s.elementwise for s in sliced.signatures)


@pytest.mark.parametrize("count", [3, 12])
def test_two_signatures_whatever_the_number_of_leaves(count: int) -> None:
    shapes = {f"layer{i}": {"kernel": (8 + i, 700), "bias": (8 + i,)} for i in range(count)}
    sliced = slice_update(with_mask(matrices), structs(shapes=shapes))
    biases = tuple(range(0, 2 * count, 2))
    assert [s.leaves for s in sliced.signatures] == [biases, tuple(i + 1 for i in biases)]
    assert [s.fingerprint for s in sliced.signatures] == [s.fingerprint for s in slice_update(with_mask(matrices), structs()).signatures]
    assert sliced.decide_reads.grads == tuple(range(2 * count))
    assert sliced.decide_reads.params == ()
    assert [sliced.state_paths[j] for j in sliced.decide_reads.states] == ["[1][0].count", "[1][2].count"]
    assert len(sliced.decide_specs[1]) == 5  # two bias corrections, learning rate, whether to clip and by what


def test_decide_reads_no_arrays_without_need() -> None:
    sliced = slice_update(optax.adamw(0.1), structs())
    assert sliced.decide_reads == slicing.Reads(grads=(), params=(), states=(0,), step=False, loss=False)
    assert all(leaf.needs_grad for leaf in sliced.leaves)


@pytest.mark.parametrize(
    "shapes",
    [
        {"a": (3,), "b": (2, 2), "z": ()},
        {"a": (70, 80), "b": (70, 80), "z": ()},
        [(1,), (1, 1), (), (4097,), (4096,)],
        [(0,), (70, 80), (2, 3)],
    ],
    ids=["small", "a number last", "edges", "empty"],
)
def test_other_trees(shapes: Any) -> None:
    for name in ("adamw, clip, schedule, mask callable", "prodigy"):
        case = CASES[name]()
        sliced = check(case.tx, structs(shapes=shapes), steps=2, ulps=16)
        assert all(s.elementwise for s in sliced.signatures)
        assert len(sliced.signatures) <= case.elementwise
    for name in CASES:
        case = CASES[name]()
        if case.frozen or "tree" in name:
            continue  # Made for the other tree.
        sliced = slice_update(case.tx, structs(shapes=shapes))
        if not case.whole:
            assert all(s.elementwise for s in sliced.signatures), name
            assert len(sliced.signatures) <= case.elementwise


@pytest.mark.parametrize("tx", [with_mask(True), contrib.prodigy(0.1), optax.novograd(0.1)], ids=["clip", "prodigy", "novograd"])
def test_a_single_array_is_cut_too(tx: Any) -> None:
    sliced = check(tx, jax.ShapeDtypeStruct((70, 80), jnp.float32), ulps=16)
    assert [s.elementwise for s in sliced.signatures] == [True]


def test_equal_whole_leaves_share_a_program() -> None:
    shapes = [(70, 80), (80,), (70, 80), (80,), (70, 80)]
    sliced = check(optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(0.1)), structs(shapes=shapes))
    assert [s.leaves for s in sliced.signatures] == [(0, 2, 4), (1, 3)]
    assert len({sliced.leaves[i].values for i in (0, 2, 4)}) == 3  # each its own key
    assert "random_bits" in sliced.signatures[0].reason
    assert "_random.py:" in sliced.signatures[0].reason


def test_raw_and_typed_keys() -> None:
    typed = slice_update(CASES["add_noise"]().tx, structs())
    assert [(typed.state_paths[j], typed.state_specs[j].dtype) for j in typed.shared] == [
        ("[0].count", jnp.int32),
        ("[0].rng_key", jnp.uint32),
    ]
    state = CASES["add_noise"]().tx.init(randoms(structs(), SEED))
    rebuilt = typed.unflatten_state(typed.flatten_state(state))
    assert jax.tree.map(lambda a, b: a.dtype == b.dtype, state, rebuilt)

    def init(params: Any) -> Any:
        return {"key": jax.random.PRNGKey(5)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        key, draw = jax.random.split(state["key"])
        leaves, treedef = jax.tree.flatten(updates)
        keys = jax.random.split(draw, len(leaves))
        noisy = [g + jax.random.normal(k, g.shape) for g, k in zip(leaves, keys, strict=True)]
        return treedef.unflatten(noisy), {"key": key}

    sliced = check(optax.GradientTransformation(init, update))
    assert sliced.shared == (0,)


def test_frozen_leaves() -> None:
    after = {"ema": (lambda p: p, ema)}
    sliced = check(CASES["multi_transform"]().tx, after_update=after, compute_dtype=jnp.bfloat16)
    assert sliced.frozen == ("['dense']['bias']", "['head']")
    for leaf in sliced.leaves:
        assert leaf.frozen == (leaf.signature is None) == (not leaf.needs_grad)
        assert leaf.compute_dtype == jnp.bfloat16

    counted = slice_update(optax.chain(optax.clip_by_global_norm(1.0), CASES["multi_transform"]().tx), structs())
    assert counted.frozen == sliced.frozen
    assert all(leaf.needs_grad for leaf in counted.leaves)  # The norm is over all gradients, as in optax.

    scaled = slice_update(optax.chain(optax.freeze(matrices(randoms(structs(), 0))), optax.sgd(schedule())), structs())
    assert scaled.frozen == ("['dense']['kernel']", "['head']", "['mixer']")

    kept = check(optax.MultiSteps(CASES["multi_transform"]().tx, 2))
    assert kept.frozen == ()  # It accumulates their gradients, and users see its state.


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1)], ids=["sgd", "adam"])
def test_leaves_that_are_not_floating_point(tx: Any) -> None:
    struct = {
        "flags": jax.ShapeDtypeStruct((5,), jnp.bool_),
        "table": jax.ShapeDtypeStruct((5000,), jnp.int32),
        "w": jax.ShapeDtypeStruct((70, 80), jnp.float32),
    }
    sliced = slice_update(tx, struct)
    assert [(leaf.frozen, leaf.needs_grad) for leaf in sliced.leaves] == [(True, False), (True, False), (False, True)]
    params = randoms(struct, SEED)
    flat = sliced.params_treedef.flatten_up_to
    states = sliced.flatten_state(tx.init(params))
    grads = [None, None, flat(randoms(struct, SEED + 1))[2]]
    found = run_chunks(sliced, grads, flat(params), states, {}, 1, 0.0)
    expected = sliced.whole_tree(grads, flat(params), states, {}, 1, 0.0)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(a, b, "whole tree", 8)
    np.testing.assert_array_equal(found[0][1], params["table"])


def test_whole_tree_is_the_uncut_update() -> None:
    tx = with_mask(matrices)
    sliced = slice_update(tx, structs(), after_update={"ema": (lambda p: p, ema)}, compute_dtype=jnp.bfloat16)
    params, grads = randoms(structs(), SEED), randoms(structs(), SEED + 1)
    flat = sliced.params_treedef.flatten_up_to
    args = (flat(grads), flat(params), sliced.flatten_state(tx.init(params)), {"ema": flat(params)}, 1, 0.5)
    whole, cut = jax.jit(sliced.whole_tree)(*args), compiled(lambda *args: run_chunks(sliced, *args), *args)(*args)
    assert jax.tree.structure(whole) == jax.tree.structure(tuple(cut))
    for a, b in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True):
        assert_close(a, b, "whole tree", 4)


def test_programs_of_their_own() -> None:
    """As in a real step: decide and each chunk compiled apart, equal chunks by one executable."""
    tx = with_mask(matrices)
    sliced = slice_update(tx, structs())
    params, grads = randoms(structs(), SEED), randoms(structs(), SEED + 1)
    opt_state = tx.init(params)
    updates, _ = jax.jit(tx.update)(grads, opt_state, params)
    expected = sliced.params_treedef.flatten_up_to(optax.apply_updates(params, updates))
    flat = sliced.params_treedef.flatten_up_to
    states = sliced.flatten_state(opt_state)
    _, values = jax.jit(sliced.decide)(flat(grads), flat(params), states, {}, 1, 0.0)
    signature = sliced.signatures[1]
    chunk = jax.jit(lambda values, inputs: sliced.apply(signature, values, inputs, inputs[0].shape))
    sources = [
        flat(params),
        flat(grads),
        *([states[sliced.leaves[i].states[k]] if not leaf.frozen else None for i, leaf in enumerate(sliced.leaves)] for k in (0, 1)),
    ]
    lanes = [jnp.concatenate([column[i].ravel() for i in signature.leaves]) for column in sources]
    size = 1000
    lanes = [jnp.pad(lane, (0, -lane.size % size)) for lane in lanes]
    picked = [values[k] for k in signature.values]
    pieces = [chunk(picked, [lane[at : at + size] for lane in lanes])[0] for at in range(0, lanes[0].size, size)]
    assert chunk._cache_size() == 1
    found = jnp.concatenate(pieces)[: sum(expected[i].size for i in signature.leaves)]
    assert_close(found, jnp.concatenate([expected[i].ravel() for i in signature.leaves]), "parameters", 4)


def test_a_flat_program_takes_rows() -> None:
    sliced = slice_update(optax.adam(0.1), structs())
    _, values = sliced.decide([None] * 5, [None] * 5, [jnp.int32(3), *[None] * 10], {}, None, None)
    arrays = [jnp.abs(randoms(jax.ShapeDtypeStruct((8, 128), jnp.float32), SEED + k)) for k in range(4)]
    rows = sliced.apply(0, values, arrays, (8, 128))
    line = sliced.apply(0, values, [a.ravel() for a in arrays], (1024,))
    for a, b in zip(rows, line, strict=True):
        assert_close(a.ravel(), b, "rows", 4)


def test_what_is_elementwise() -> None:
    def per_leaf(f: Any) -> optax.GradientTransformation:
        return optax.stateless(lambda updates, params: jax.tree.map(lambda g: f(g) if g.ndim == 2 else g, updates))

    ramp = jnp.arange(80.0)
    with jax.enable_x64(False):
        reshaped = check(per_leaf(lambda g: 2.0 * g.reshape(-1).reshape(g.shape[::-1]).reshape(g.shape)))
        assert [s.elementwise for s in reshaped.signatures] == [True, True]
        same = optax.stateless(lambda updates, params: jax.tree.map(lambda g: (g.reshape(-1) * 2.0).reshape(g.shape) + g * 2.0, updates))
        assert len(slice_update(same, structs()).signatures) == 1
        called = check(per_leaf(jax.jit(jax.checkpoint(lambda g: jax.nn.relu(g) * jnp.ones_like(g)))))
        assert [s.elementwise for s in called.signatures] == [True, True]
        for f, why in [
            (lambda g: g.T.reshape(g.shape), "`transpose` at"),
            (lambda g: g - g.mean(1, keepdims=True), "`reduce_sum` at"),
            (lambda g: g * ramp if g.shape[-1] == 80 else g, "a constant float32"),
            (lambda g: jnp.cumsum(g, 1), "`cumsum` at"),
        ]:
            sliced = check(per_leaf(f), steps=1, ulps=64)
            assert why in str([s.reason for s in sliced.signatures])


def test_texts_tell_programs_apart() -> None:
    fingerprints = [
        slice_update(tx, structs()).signatures[0].fingerprint
        for tx in (optax.sgd(0.1), optax.sgd(0.2), optax.sgd(0.1, 0.9), optax.lion(0.1))
    ]
    assert len(set(fingerprints)) == 4
    text = slice_update(optax.sgd(0.1), structs()).signatures[0].text
    assert text.splitlines()[:2] == ["elementwise", "in param:float32 grad:float32"]
    keeps = slice_update(contrib.prodigy(0.1), structs()).signatures[0]
    assert keeps.unchanged == ("state:3",)  # params0


def mixing(scale: float) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        other = jnp.pad(updates["head"].ravel(), (0, 70 * 80 - 72 * 64)).reshape(70, 80)
        kernel = updates["dense"]["kernel"] + scale * other  # LINE: mixes
        return {**updates, "dense": {**updates["dense"], "kernel": kernel}}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def line_of(mark: str) -> int:
    return next(i for i, line in enumerate(pathlib.Path(__file__).read_text().splitlines(), 1) if f"# LINE: {mark}" in line)


@pytest.mark.parametrize(
    "wrap", [lambda tx: tx, lambda tx: optax.chain(tx, optax.adam(0.1)), lambda tx: tx._replace(update=jax.jit(tx.update))]
)
def test_refuses_what_mixes_large_leaves(wrap: Any) -> None:
    with pytest.raises(UnsupportedOptimizerError) as caught:
        slice_update(wrap(mixing(0.5)), structs())
    text = str(caught.value)
    assert re.search(
        rf"found `add` at \S*{HERE}:{line_of('mixes')}:\d+ \(mixing\S*\) making float32\[70,80\] \(5600 elements\) from ", text
    ), text
    assert "from params['dense']['kernel'], params['head']; reduce each leaf to something small" in text


def test_refuses_many_small_leaves_in_one_array() -> None:
    found = r"found `concatenate` at .* making float32\[7000\] .* from params\[0\], params\[1\]; reduce"
    with pytest.raises(UnsupportedOptimizerError, match=found):
        slice_update(optax.flatten(optax.adam(0.1)), structs(shapes=[(4000,), (3000,)]))


def test_accepts_the_same_among_small_leaves() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return {"a": updates["a"] + updates["b"], "b": updates["b"], "c": updates["c"]}, state

    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    sliced = check(tx, structs(shapes={"a": (30,), "b": (30,), "c": (5000,)}))
    assert sliced.decide_reads.grads == (0, 1)


def test_small_arrays_that_several_leaves_read_are_shared() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return jax.tree.map(lambda g: g * state["scale"] if g.shape == (80,) else g, updates), state

    tx = optax.GradientTransformation(lambda params: {"scale": jnp.linspace(0.5, 2.0, 80)}, update)
    sliced = check(tx, structs(shapes=[(80,), (80,), (70, 80)]))
    assert sliced.shared == (0,)
    assert [(s.elementwise, s.leaves) for s in sliced.signatures] == [(False, (0, 1)), (True, (2,))]
    assert sliced.signatures[0].reason == "a shared value float32[80] that is not one number"
    alone = check(tx, structs(shapes=[(80,), (70, 80)]))
    assert alone.leaves[0].states == (0,)  # The array of one leaf, and no obstacle to cutting it.
    assert all(s.elementwise for s in alone.signatures)


def test_refuses_large_states_of_nobody() -> None:
    def init(params: Any) -> Any:
        return {"walk": jnp.zeros(5000)}

    tx = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, {"walk": state["walk"] + 1}))
    with pytest.raises(
        UnsupportedOptimizerError, match=r"belong to one parameter leaf, found \['walk'\] float32\[5000\], which changes by itself"
    ):
        slice_update(tx, structs())
    still = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    assert slice_update(still, structs()).passthrough == (0,)


def test_refuses_states_that_change_type() -> None:
    tx = optax.GradientTransformation(
        lambda params: {"n": jnp.int32(0)}, lambda updates, state, params=None: (updates, {"n": state["n"] + 0.5})
    )
    with pytest.raises(UnsupportedOptimizerError, match=r"state \['n'\] to stay int32\[\], found float32\[\] after one update"):
        slice_update(tx, structs())


def test_refuses_side_effects() -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        n = jax.experimental.io_callback(lambda: np.int32(0), jax.ShapeDtypeStruct((), jnp.int32))  # LINE: effect
        return jax.tree.map(lambda g: g * n, updates), state

    with pytest.raises(UnsupportedOptimizerError, match=rf"without side effects, found `io_callback` at \S*{HERE}:{line_of('effect')}:"):
        slice_update(optax.GradientTransformation(lambda params: optax.EmptyState(), update), structs())

    def prints(updates: Any, params: Any) -> Any:
        jax.debug.print("norm {}", optax.tree.norm(updates))
        return updates

    assert len(slice_update(optax.stateless(prints), structs()).signatures) == 1


def test_says_what_is_wrong_with_arguments() -> None:
    sliced = slice_update(with_mask(matrices), structs())
    zeros = [jnp.zeros(leaf.shape) for leaf in sliced.leaves]
    states = [jnp.zeros(s.shape, s.dtype) for s in sliced.state_specs]
    with pytest.raises(UsageError, match=r"expected grads\[1\] to be float32\[70,80\], found None"):
        sliced.decide([zeros[0], None, *zeros[2:]], zeros, states, {}, 0, 0.0)
    with pytest.raises(UsageError, match=r"expected grads\[1\] to be float32\[70,80\], found float32\[5600\]"):
        sliced.decide([zeros[0], zeros[1].ravel(), *zeros[2:]], zeros, states, {}, 0, 0.0)
    with pytest.raises(
        UsageError, match=r"expected 4 inputs \(param, grad, state:0, state:1\) and \d decided values for signature 0, found 1 and 0"
    ):
        sliced.apply(0, [], [zeros[0]], (80,))
    with pytest.raises(UsageError, match="expected one gradient dtype for each of the 5 parameter leaves, found 1"):
        slice_update(optax.sgd(0.1), structs(), grad_dtypes=[jnp.float32])
    with pytest.raises(
        UsageError, match=r"companion 'c' of params\['dense'\]\['bias'\] to stay of shape \(80,\), found \(\) after one update"
    ):
        slice_update(optax.sgd(0.1), structs(), after_update={"c": (lambda p: p, lambda p, c, step: p.sum())})


def fingerprints() -> list[str]:
    found = {name: slice_update(make().tx, structs()) for name, make in CASES.items()}
    return [" ".join([name, sliced.fingerprint, *(s.fingerprint for s in sliced.signatures)]) for name, sliced in found.items()]


def test_fingerprints_are_equal_in_every_process() -> None:
    env = {**os.environ, "PYTHONHASHSEED": "5", "PYTHONPATH": str(pathlib.Path(__file__).parents[2])}
    there = subprocess.run([sys.executable, __file__], check=True, capture_output=True, text=True, env=env, timeout=240).stdout
    assert there.splitlines() == fingerprints()


if __name__ == "__main__":  # The other process.
    print(*fingerprints(), sep="\n")
