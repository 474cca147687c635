"""Cuts the update of a whole model into one small decision and many independent leaf updates.

An optax transformation is one function of the whole tree. Here it is traced once and cut by dependency: what mixes leaves or belongs to
none (global norms, step counts, schedules, loss scales) is small and goes to `Sliced.decide`; what is left depends on one parameter leaf
each, and leaves with the same arithmetic share one program, `Sliced.apply`. An elementwise program takes any flat range of any of its
leaves, so a model can be updated chunk by chunk, with chunks that cut or span leaves:

    new_shared, values = sliced.decide(grads, params, states, companions, step, loss)          # once a step
    picked = [values[k] for k in signature.values]
    new_param, new_mu, new_nu = sliced.apply(signature, picked, (param, grad, mu, nu), (n,))   # for each chunk

`tx.update` is never called on a sub-tree: that is refused by some transformations and means another thing to others.
"""

import dataclasses
import functools
import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from leto_jax.errors import UnsupportedOptimizerError, UsageError
from leto_jax.rmu import expression
from leto_jax.rmu.expression import Graph, NotElementwise, Program

SMALL = 4096
"""Elements; a value of at most so many may mix leaves."""

AfterUpdate = Mapping[str, tuple[Callable[[Any], Any], Callable[[Any, Any, Any], Any]]]


@dataclasses.dataclass(frozen=True)
class Port:
    """One array that a leaf program takes or gives.

    Args:
      kind: `param`, `grad`, `state:<k>` (k-th state that the leaf owns), `companion:<name>`, `compute`.
      dtype: of the array.
      shape: of the array, or None in an elementwise signature (any shape, the same for all ports).
    """

    kind: str
    dtype: Any
    shape: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class LeafSlice:
    """What the update means for one parameter leaf.

    Args:
      path: such as `['dense']['kernel']`.
      shape: of the parameter.
      dtype: of the parameter.
      grad_dtype: of its gradient as compute stores it.
      frozen: True if training never changes it: its update is zero, it is not floating point, or it is empty. It has no signature; its
        states pass through and its companions stay as they were made.
      needs_grad: False if nothing reads its gradient. A frozen leaf may need one: a global norm counts it.
      signature: index in `Sliced.signatures`, None if frozen.
      states: flat indices of the optimizer states that it owns, in the order of its `state:<k>` ports.
      values: indices of the decided values that its program takes, in order.
      compute_dtype: dtype of its compute copy, None if it has none. A frozen leaf's copy never changes: make it once.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    grad_dtype: Any
    frozen: bool
    needs_grad: bool
    signature: int | None
    states: tuple[int, ...]
    values: tuple[int, ...]
    compute_dtype: Any | None


@dataclasses.dataclass(frozen=True)
class Signature:
    """Leaves that share one update program.

    Args:
      index: place in `Sliced.signatures`.
      elementwise: True if the program takes flat ranges of any length, within a leaf or across leaves.
      reason: why it is not elementwise (primitive and line), else None.
      leaves: indices of its leaves, ascending.
      inputs: param, grad, states, companions.
      outputs: param, states, companions, compute copy if there is one.
      value_specs: shapes and dtypes of the decided values that it takes.
      values: their indices, if elementwise (all its leaves take the same); else None, see `LeafSlice.values`.
      unchanged: kinds of outputs that are always equal to the input of the same kind (an initial point that a state keeps, say).
      text: canonical text of the program: ports, values, one line per operation.
      fingerprint: hex SHA-256 of `text`, equal in every process.
    """

    index: int
    elementwise: bool
    reason: str | None
    leaves: tuple[int, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    value_specs: tuple[jax.ShapeDtypeStruct, ...]
    values: tuple[int, ...] | None
    unchanged: tuple[str, ...]
    text: str
    fingerprint: str
    program: Program = dataclasses.field(repr=False, compare=False)


@dataclasses.dataclass(frozen=True)
class Reads:
    """Which arguments `Sliced.decide` uses; the others may be None."""

    grads: tuple[int, ...]
    params: tuple[int, ...]
    states: tuple[int, ...]
    step: bool
    loss: bool


@dataclasses.dataclass(frozen=True)
class Sliced:
    """An optimizer cut into `decide` and `apply`.

    Lists are flat and full-length, in tree order; random keys with types are carried as their key data (`state_specs`, `flatten_state`).

    Args:
      params_treedef: of the parameters.
      opt_treedef: of the optimizer state.
      leaves: one per parameter leaf.
      state_specs: one per optimizer state leaf, as carried.
      state_paths: one per optimizer state leaf.
      companions: names, sorted.
      companion_specs: per name, one per parameter leaf.
      shared: flat indices of states that `decide` renews.
      passthrough: flat indices of states that never change and belong to no leaf that trains.
      signatures: update programs, in the order of their first leaf.
      decide_specs: shapes and dtypes of `decide`'s two results.
      decide_reads: what `decide` uses.
      fingerprint: hex SHA-256 over everything above and the arithmetic of `decide`, equal in every process.
    """

    params_treedef: Any
    opt_treedef: Any
    leaves: tuple[LeafSlice, ...]
    state_specs: tuple[jax.ShapeDtypeStruct, ...]
    state_paths: tuple[str, ...]
    companions: tuple[str, ...]
    companion_specs: Mapping[str, tuple[jax.ShapeDtypeStruct, ...]]
    shared: tuple[int, ...]
    passthrough: tuple[int, ...]
    signatures: tuple[Signature, ...]
    decide_specs: tuple[tuple[jax.ShapeDtypeStruct, ...], tuple[jax.ShapeDtypeStruct, ...]]
    decide_reads: Reads
    fingerprint: str
    _traced: "_Traced" = dataclasses.field(repr=False, compare=False)
    _decide: Program = dataclasses.field(repr=False, compare=False)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Paths of the leaves that training never changes."""
        return tuple(leaf.path for leaf in self.leaves if leaf.frozen)

    def flatten_state(self, opt_state: Any) -> list[Any]:
        """Leaves of an optax state as carried: arrays, typed keys as key data."""
        return [jax.random.key_data(x) if expression.is_key(jnp.result_type(x)) else x for x in self.opt_treedef.flatten_up_to(opt_state)]

    def unflatten_state(self, states: Sequence[Any]) -> Any:
        """The ordinary optax state, from its leaves as carried."""
        return self.opt_treedef.unflatten([wrap(x) for wrap, x in zip(self._traced.wraps, states, strict=True)])

    def decide(
        self,
        grads: Sequence[Any],
        params: Sequence[Any],
        states: Sequence[Any],
        companions: Mapping[str, Sequence[Any]],
        step: Any,
        loss: Any,
    ) -> tuple[list[Any], list[Any]]:
        """The part of the update that mixes leaves or belongs to none. Traceable.

        Args:
          grads: gradients in leaf shape and `LeafSlice.grad_dtype`; None where `decide_reads` does not name them, and for leaves that are
            not floating point.
          params: parameters, likewise.
          states: optimizer states, likewise.
          companions: not used: a companion feeds nothing but itself.
          step: int32 scalar, the step being applied.
          loss: float32 scalar.

        Returns:
          The new shared states (in the order of `shared`) and the values that leaf programs take.
        """
        del companions
        inputs = self._traced.bind(grads, params, states, {}, step, loss, self.decide_reads)
        out = [jax.random.key_data(x) if expression.is_key(x.dtype) else x for x in map(jnp.asarray, self._decide.run(inputs, (), ()))]
        return out[: len(self.shared)], out[len(self.shared) :]

    def apply(
        self, signature: Signature | int, values: Sequence[Any], inputs: Mapping[str, Any] | Sequence[Any], shape: Sequence[int]
    ) -> tuple[Any, ...]:
        """The update of one leaf, or of one range of an elementwise signature. Traceable.

        Args:
          signature: of the leaves.
          values: the decided values that it takes, in order: `values[k] for k in leaf.values`.
          inputs: arrays by `Port.kind`, or in the order of `Signature.inputs`.
          shape: common shape of all arrays if elementwise, else the shape of the leaf.

        Returns:
          New arrays, in the order of `Signature.outputs`.
        """
        signature = self.signatures[signature] if isinstance(signature, int) else signature
        if isinstance(inputs, Mapping):
            inputs = [inputs[port.kind] for port in signature.inputs]
        if len(inputs) != len(signature.inputs) or len(values) != len(signature.value_specs):
            raise UsageError(
                f"expected {len(signature.inputs)} inputs ({', '.join(p.kind for p in signature.inputs)}) and "
                f"{len(signature.value_specs)} decided values for signature {signature.index}, found {len(inputs)} and {len(values)}"
            )
        first = signature.program.frontier
        wrapped = [_wrapper(self._traced.graph.dtypes[v])(x) for v, x in zip(first, values, strict=True)]
        return signature.program.run(list(inputs), wrapped, shape)

    def whole_tree(
        self,
        grads: Sequence[Any],
        params: Sequence[Any],
        states: Sequence[Any],
        companions: Mapping[str, Sequence[Any]],
        step: Any,
        loss: Any,
    ) -> tuple[list[Any], list[Any], dict[str, list[Any]], list[Any]]:
        """The update without any cut, from the same trace: what `decide` and `apply` are tested against.

        Returns:
          New parameters, states, companions, and compute copies (None where a leaf has none).
        """
        traced, n = self._traced, len(self.leaves)
        copies = {i: None for i, leaf in enumerate(self.leaves) if leaf.compute_dtype is not None}
        targets = [*traced.new_params, *traced.new_states, *(v for name in self.companions for v in traced.new_companions[name])]
        program = expression.cut(traced.graph, [*targets, *(traced.copies[i] for i in copies)], traced.inputs, lambda _: False, None)
        out = iter(program.run(traced.bind(grads, params, states, companions, step, loss, None), (), ()))
        new_params = [next(out) for _ in range(n)]
        new_states = [next(out) for _ in traced.new_states]
        new_companions = {name: [next(out) for _ in range(n)] for name in self.companions}
        return new_params, new_states, new_companions, [next(out) if i in copies else None for i in range(n)]


@dataclasses.dataclass
class _Traced:
    """The graph of the whole update, with the numbers of its inputs and outputs."""

    graph: Graph
    inputs: list[int]
    grads: list[int]
    params: list[int]
    states: list[int]
    companions: dict[str, list[int]]
    step: int
    loss: int
    new_params: list[int]
    updates: list[int]
    new_states: list[int]
    new_companions: dict[str, list[int]]
    copies: list[int]  # Compute copies; -1 where there is none.
    trainable: list[bool]
    wraps: list[Callable[[Any], Any]]  # From a carried state to what optax holds.
    paths: list[str]
    state_paths: list[str]

    def bind(
        self,
        grads: Sequence[Any],
        params: Sequence[Any],
        states: Sequence[Any],
        companions: Mapping[str, Sequence[Any]],
        step: Any,
        loss: Any,
        reads: Reads | None,
    ) -> list[Any]:
        """Arrays in the order of `inputs`: all of them, or those of `reads` and None for the others."""
        bound: dict[int, Any] = {}

        def put(kind: str, values: Sequence[int], arrays: Sequence[Any], wanted: Sequence[int]) -> None:
            if len(arrays) != len(values):
                raise UsageError(f"expected {len(values)} {kind}, found {len(arrays)}")
            for i in wanted:
                array, aval = arrays[i], self.graph.aval(values[i])
                found = "None" if array is None else expression.aval_text(np.shape(array), jnp.result_type(array))
                if found != aval:
                    raise UsageError(f"expected {kind}[{i}] to be {aval}, found {found}")
                bound[values[i]] = array

        n, trained = len(self.params), [i for i, t in enumerate(self.trainable) if t]
        put("grads", self.grads, grads, trained if reads is None else reads.grads)
        put("params", self.params, params, range(n) if reads is None else reads.params)
        put("states", self.states, states, range(len(self.states)) if reads is None else reads.states)
        for name, arrays in companions.items():
            put(f"companions[{name!r}]", self.companions[name], arrays, range(n))
        for value, trains in zip(self.grads, self.trainable):
            if not trains:
                bound[value] = jnp.zeros(self.graph.shapes[value], self.graph.dtypes[value])
        if reads is None or reads.step:
            bound[self.step] = jnp.asarray(step, jnp.int32)
        if reads is None or reads.loss:
            bound[self.loss] = jnp.asarray(loss, jnp.float32)
        return [bound.get(value) for value in self.inputs]


@dataclasses.dataclass(frozen=True)
class _Specs:
    """Trees, shapes and dtypes around the graph."""

    params_treedef: Any
    opt_treedef: Any
    params: tuple[jax.ShapeDtypeStruct, ...]
    grads: tuple[jax.ShapeDtypeStruct, ...]
    states: tuple[jax.ShapeDtypeStruct, ...]
    companions: dict[str, tuple[jax.ShapeDtypeStruct, ...]]


def slice_update(
    tx: Any,
    params_struct: Any,
    *,
    grad_dtypes: Sequence[Any] | None = None,
    after_update: AfterUpdate | None = None,
    compute_dtype: Any | None = None,
) -> Sliced:
    """Traces the update of a whole model once and cuts it.

    The update is: gradients cast to the parameter's dtype, `tx.update` (with `value=loss`), `optax.apply_updates`, companions, compute
    copies.

    Args:
      tx: any optax transformation, or `optax.MultiSteps`.
      params_struct: tree of arrays or `jax.ShapeDtypeStruct`.
      grad_dtypes: per parameter leaf, the dtype of its gradient; the parameter's own by default, or where it is None. Ignored for leaves
        that are not floating point: their gradient is never asked for and counts as zero.
      after_update: `{name: (init_leaf, f)}`: trees beside the parameters, renewed by `f(new_param, companion, step) -> companion` after
        each update (the result is cast to the companion's dtype).
      compute_dtype: with a dtype, floating leaves of another dtype get a compute copy of that dtype, written with the update.

    Returns:
      The sliced update.

    Raises:
      UnsupportedOptimizerError: if an array of more than `SMALL` elements depends on two leaves, if a large state belongs to no leaf, if a
        state changes its shape or dtype, or if the update has side effects.

    Cost: one trace of `tx.update`, and Python time in proportion to the number of operations. No array is made.
    """
    traced, specs = _trace(tx, params_struct, grad_dtypes, after_update or {}, compute_dtype)
    if sum(traced.trainable) == 1:
        # There is no other leaf to say that a norm belongs to `decide`; but a chunk that is the whole model would cost a second copy of it.
        try:
            sliced = _slice(traced, specs, alone=True)
        except UnsupportedOptimizerError:
            pass
        else:
            if all(signature.elementwise for signature in sliced.signatures):
                return sliced
    return _slice(traced, specs, alone=False)


def _slice(traced: _Traced, specs: _Specs, alone: bool) -> Sliced:
    traced = dataclasses.replace(
        traced,
        new_params=list(traced.new_params),
        new_states=list(traced.new_states),
        new_companions={name: list(column) for name, column in traced.new_companions.items()},
    )
    owners, labels = _own(traced, alone)
    frozen = _freeze(traced, owners, labels.own)
    _refuse_mixing(traced, labels)
    return _build(traced, specs, owners, labels, frozen)


def _wrapper(dtype: Any) -> Callable[[Any], Any]:
    """From an array as carried to the array that a calculation takes; only typed keys differ."""
    if not expression.is_key(dtype):
        return lambda x: x
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), dtype))
    return functools.partial(jax.random.wrap_key_data, impl=found[0])


def _trace(
    tx: Any, params_struct: Any, grad_dtypes: Sequence[Any] | None, after_update: AfterUpdate, compute_dtype: Any
) -> tuple[_Traced, _Specs]:
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    tx = optax.with_extra_args_support(tx)
    params_treedef: Any
    opt_treedef: Any
    with_paths, params_treedef = jax.tree_util.tree_flatten_with_path(params_struct)
    paths = [jax.tree_util.keystr(path) for path, _ in with_paths]
    params = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for _, x in with_paths)
    n = len(params)
    trainable = [jnp.issubdtype(p.dtype, jnp.inexact) and math.prod(p.shape) > 0 for p in params]
    if grad_dtypes is not None and len(grad_dtypes) != n:
        raise UsageError(f"expected one gradient dtype for each of the {n} parameter leaves, found {len(grad_dtypes)}")
    grads = tuple(
        jax.ShapeDtypeStruct(p.shape, p.dtype if grad_dtypes is None or grad_dtypes[i] is None or not t else grad_dtypes[i])
        for i, (p, t) in enumerate(zip(params, trainable))
    )
    opt_struct = jax.eval_shape(tx.init, params_treedef.unflatten(params))
    opt_with_paths, opt_treedef = jax.tree_util.tree_flatten_with_path(opt_struct)
    held = [x for _, x in opt_with_paths]
    # Weak types are kept for the trace: they decide what dtypes a mixed calculation has, and a retained array cannot carry them.
    carried = [jax.eval_shape(jax.random.key_data, x) if expression.is_key(x.dtype) else x for x in held]
    wraps = [_wrapper(x.dtype) for x in held]
    names = sorted(after_update)
    companions = {
        name: tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (jax.eval_shape(after_update[name][0], p) for p in params))
        for name in names
    }
    copied = [compute_dtype is not None and jnp.issubdtype(p.dtype, jnp.floating) and np.dtype(compute_dtype) != p.dtype for p in params]
    state_paths = [jax.tree_util.keystr(path) for path, _ in opt_with_paths]

    def update(*flat: Any) -> list[Any]:
        old_grads, old_params, old_states = flat[:n], flat[n : 2 * n], flat[2 * n : 2 * n + len(carried)]
        old_companions, (step, loss) = flat[2 * n + len(carried) : -2], flat[-2:]
        casts = [g if g.dtype == p.dtype else g.astype(p.dtype) for g, p in zip(old_grads, old_params)]
        arguments = (
            params_treedef.unflatten(casts),
            opt_treedef.unflatten([wrap(x) for wrap, x in zip(wraps, old_states)]),
            params_treedef.unflatten(old_params),
        )
        try:
            updates, opt_state = tx.update(*arguments, value=loss)
        except TypeError as error:
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            updates, opt_state = tx.update(*arguments)  # Takes extra arguments, but not this one (SAM).
        new_params = params_treedef.flatten_up_to(optax.apply_updates(arguments[2], updates))
        new_params = [new if t else old for new, old, t in zip(new_params, old_params, trainable)]
        new_states = jax.tree.leaves(opt_state)
        treedef: Any = jax.tree.structure(opt_state)
        if treedef != opt_treedef:
            raise UnsupportedOptimizerError(f"expected an optimizer state that keeps its structure, found {treedef} after {opt_treedef}")
        new_states = [jax.random.key_data(x) if expression.is_key(x.dtype) else x for x in map(jnp.asarray, new_states)]
        for j, (path, old, new) in enumerate(zip(state_paths, carried, new_states)):
            if (old.shape, old.dtype) == (new.shape, new.dtype):
                continue
            if old.shape == new.shape and any(
                path.endswith(leaf) and p.shape == old.shape for leaf, p, t in zip(paths, params, trainable) if not t
            ):
                new_states[j] = old_states[j]  # Adam's moments of integers turn to floating point, for a leaf that is not trained anyway.
                continue
            raise UnsupportedOptimizerError(
                f"expected optimizer state {path} to stay {expression.aval_text(old.shape, old.dtype)}, found "
                f"{expression.aval_text(new.shape, new.dtype)} after one update; a retained array keeps its dtype, so fix that of the "
                "state (`mu_dtype=`)"
            )
        new_companions = []
        for k, name in enumerate(names):
            for i, old in enumerate(old_companions[k * n : (k + 1) * n]):
                new = jnp.asarray(after_update[name][1](new_params[i], old, step)) if trainable[i] else old
                if new.shape != old.shape:
                    raise UsageError(
                        f"expected companion {name!r} of params{paths[i]} to stay of shape {old.shape}, found {new.shape} after one update"
                    )
                new_companions.append(new.astype(old.dtype))
        copies = [new.astype(compute_dtype) for new, c in zip(new_params, copied) if c]
        return [*new_params, *params_treedef.flatten_up_to(updates), *new_states, *new_companions, *copies]

    scalars = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32))
    graph, inputs, outputs = expression.trace(update, *grads, *params, *carried, *(c for name in names for c in companions[name]), *scalars)
    take, give = iter(inputs), iter(outputs)

    def several(source: Any, count: int) -> list[int]:
        return [next(source) for _ in range(count)]

    traced = _Traced(
        graph=graph,
        inputs=inputs,
        grads=several(take, n),
        params=several(take, n),
        states=several(take, len(carried)),
        companions={name: several(take, n) for name in names},
        step=next(take),
        loss=next(take),
        new_params=several(give, n),
        updates=several(give, n),
        new_states=several(give, len(carried)),
        new_companions={name: several(give, n) for name in names},
        copies=[next(give) if c else -1 for c in copied],
        trainable=trainable,
        wraps=wraps,
        paths=paths,
        state_paths=state_paths,
    )
    states = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in carried)
    return traced, _Specs(params_treedef, opt_treedef, params, grads, states, companions)


@dataclasses.dataclass(frozen=True)
class _Labels:
    """What each value depends on, as bit sets of leaves.

    Args:
      own: leaves that a value depends on without the help of `decide`: values that `decide` gives count as none.
      all: leaves that it depends on at all.
      decided: small values that mix leaves, or that are of one leaf and used by another: `decide` gives them.
      clashes: operations that mix large values of several leaves, with these leaves.
    """

    own: list[int]
    all: list[int]
    decided: set[int]
    clashes: dict[int, int]


def _several(label: int) -> bool:
    return label & (label - 1) != 0


def _label(traced: _Traced, owners: Sequence[int | None], alone: bool) -> _Labels:
    """Labels all values, given who owns the states.

    Where leaves meet, either the result is small and belongs to `decide` (a sum of norms), or one leaf's arrays meet a number that comes
    from another leaf (a gradient divided by the sum, whose last term came from the last leaf): then that number belongs to `decide`, and
    the result to the leaf. Such a number is found only where it is used, hence the repetition; each pass finds at least one, and few are
    needed. With `alone`, what reduces a leaf to one number counts as mixing.
    """
    graph = traced.graph
    start = [0] * len(graph.shapes)
    for column in (traced.grads, traced.params, *traced.companions.values()):
        for i, value in enumerate(column):
            start[value] |= 1 << i
    for owner, value in zip(owners, traced.states):
        if owner is not None:
            start[value] |= 1 << owner
    everything = list(start)
    for op in graph.ops:
        union = functools.reduce(operator.or_, (everything[o] for o in op.operands), 0)
        for result in op.results:
            everything[result] = union
    lent: set[int] = set()
    while True:
        own = [0 if v in lent else label for v, label in enumerate(start)]
        decided, clashes, known = set(lent), dict[int, int](), len(lent)
        for index, op in enumerate(graph.ops):
            union = functools.reduce(operator.or_, (own[o] for o in op.operands), 0)
            if _several(union):
                large = any(graph.size(r) > SMALL for r in op.results)
                # The arrays that make the result what it is; what else takes part can be lent by `decide`.
                limit = SMALL if large else 1
                major = functools.reduce(operator.or_, (own[o] for o in op.operands if graph.size(o) > limit), 0)
                if major and not _several(major):
                    lent.update(o for o in op.operands if graph.size(o) <= limit and own[o] & ~major)
                    union = major
                elif large:
                    clashes[index] = union
                else:
                    decided.update(op.results)
                    union = 0
            elif alone and all(graph.size(r) == 1 for r in op.results) and any(own[o] and graph.size(o) > 1 for o in op.operands):
                decided.update(op.results)
                union = 0
            for result in op.results:
                own[result] = 0 if result in lent else union
        if len(lent) == known:
            return _Labels(own, everything, decided, clashes)


def _own(traced: _Traced, alone: bool) -> tuple[list[int | None], _Labels]:
    """Which leaf owns each state: the one on whose gradient, parameter or owned states its new value depends.

    A small state goes from unowned to owned to shared, at most, so ownership settles.
    """
    graph = traced.graph
    owners: list[int | None] = [None] * len(traced.states)
    shared = [False] * len(traced.states)
    for _ in range(3 * len(owners) + 2):
        labels = _label(traced, owners, alone)
        before = (list(owners), list(shared))
        for j, (old, new) in enumerate(zip(traced.states, traced.new_states)):
            label = labels.own[new]
            if shared[j] or _several(label):
                continue
            leaf = label.bit_length() - 1 if label else None
            # A running sum over leaves has the label of the last one, but is not its own: nothing in shape or path says so.
            sums = leaf is not None and graph.size(old) <= SMALL and _several(labels.all[new]) and not _beside(traced, j, leaf)
            if sums or old in labels.decided or (owners[j] is not None and (new in labels.decided or leaf not in (None, owners[j]))):
                owners[j], shared[j] = None, graph.size(old) <= SMALL
            elif leaf is not None:
                owners[j] = leaf
        if before == (owners, shared):
            for j, leaf in _adopt(traced, owners, shared, labels.own).items():
                owners[j] = leaf
        if before == (owners, shared):
            return owners, labels
    raise UnsupportedOptimizerError("expected each optimizer state to belong to one parameter leaf or to none, found some that swap leaves")


def _beside(traced: _Traced, j: int, leaf: int) -> bool:
    """True if a state stands at the place of a leaf in a tree like that of the parameters, or is an array of the same shape."""
    shape = traced.graph.shapes[traced.states[j]]
    return traced.state_paths[j].endswith(traced.paths[leaf]) or (shape != () and shape == traced.graph.shapes[traced.params[leaf]])


def _adopt(traced: _Traced, owners: Sequence[int | None], shared: Sequence[bool], labels: Sequence[int]) -> dict[int, int]:
    """Owners for states that no leaf changes: the leaf they are first combined with (the initial point that Prodigy keeps, say).

    A small state is adopted only if it has the shape of that leaf and is combined with no other: a mask or a random key stays shared.
    """
    graph = traced.graph
    carries = [0] * len(graph.shapes)
    for j, value in enumerate(traced.states):
        if owners[j] is None and not shared[j]:
            carries[value] |= 1 << j
    met: dict[int, list[int]] = {}
    for op in graph.ops:
        carry, label = 0, 0
        for operand in op.operands:
            carry |= carries[operand]
            label |= labels[operand]
        if carry and label and not _several(label):
            for j in range(len(traced.states)):
                if carry >> j & 1:
                    met.setdefault(j, []).append(label.bit_length() - 1)
        elif carry and not label:
            for result in op.results:
                carries[result] = carry if graph.size(result) > 1 else 0
    found: dict[int, int] = {}
    for j, leaves in met.items():
        value = traced.states[j]
        same = graph.shapes[value] == graph.shapes[traced.params[leaves[0]]] and _beside(traced, j, leaves[0])
        if graph.size(value) > SMALL or (same and set(leaves) == {leaves[0]}):
            found[j] = leaves[0]
    return found


def _refuse_mixing(traced: _Traced, labels: _Labels) -> None:
    graph = traced.graph
    outputs = [*traced.new_params, *traced.new_states, *(v for column in traced.new_companions.values() for v in column)]
    for index in graph.needed(outputs):
        if index in labels.clashes:
            op = graph.ops[index]
            result = max(op.results, key=graph.size)
            leaves = [path for i, path in enumerate(traced.paths) if labels.clashes[index] >> i & 1]
            named = ", ".join(f"params{path}" for path in leaves[:4]) + (f" and {len(leaves) - 4} more" if len(leaves) > 4 else "")
            raise UnsupportedOptimizerError(
                f"expected every array of more than {SMALL} elements in the update to depend on one parameter leaf, "
                f"found `{op.primitive.name}` at {op.source()} making {graph.aval(result)} ({graph.size(result)} elements) from {named}; "
                "reduce each leaf to something small before leaves are combined, as optax.clip_by_global_norm does"
            )


def _freeze(traced: _Traced, owners: Sequence[int | None], labels: Sequence[int]) -> list[bool]:
    """Which leaves never change. Their states pass through; their new values become the old ones."""
    zero = expression.zeros(traced.graph, lambda v: traced.graph.size(v) == 1 and not labels[v])
    frozen = []
    for i, trainable in enumerate(traced.trainable):
        owned = [j for j, owner in enumerate(owners) if owner == i]
        still = all(traced.new_states[j] == traced.states[j] for j in owned)
        frozen.append(not trainable or (zero[traced.updates[i]] and still))
        if frozen[i]:
            traced.new_params[i] = traced.params[i]
            for j in owned:
                traced.new_states[j] = traced.states[j]
            for name, column in traced.new_companions.items():
                column[i] = traced.companions[name][i]
    return frozen


def _build(traced: _Traced, specs: _Specs, owners: Sequence[int | None], labels: _Labels, frozen: Sequence[bool]) -> Sliced:
    graph, own = traced.graph, labels.own
    shared, passthrough = _share(traced, owners, frozen)
    varies = [False] * len(graph.shapes)
    for value in traced.inputs:
        varies[value] = True
    for op in graph.ops:
        for result in op.results:
            varies[result] = any(varies[o] for o in op.operands)
    whole = {value for owner, value in zip(owners, traced.states) if owner is None}

    def is_frontier(value: int) -> bool:
        return value in labels.decided or value in whole or (not own[value] and not graph.shapes[value] and varies[value])

    names = sorted(traced.companions)
    decided: dict[int, int] = {}
    groups: dict[str, list[int]] = {}
    made: dict[str, Signature] = {}
    taken: list[tuple[int, ...]] = []
    reads_grad: list[bool] = []
    for i, path in enumerate(traced.paths):
        if frozen[i]:
            taken.append(())
            reads_grad.append(False)
            continue
        owned = [j for j, owner in enumerate(owners) if owner == i]
        sources = {"param": traced.params[i], "grad": traced.grads[i]}
        results = {"param": traced.new_params[i]}
        for k, j in enumerate(owned):
            sources[f"state:{k}"], results[f"state:{k}"] = traced.states[j], traced.new_states[j]
        for name in names:
            kind = f"companion:{name}"
            sources[kind], results[kind] = traced.companions[name][i], traced.new_companions[name][i]
        if traced.copies[i] >= 0:
            results["compute"] = traced.copies[i]
        for kind, value in results.items():
            if own[value] & ~(1 << i):
                others = ", ".join(f"params{other}" for k, other in enumerate(traced.paths) if own[value] >> k & 1)
                raise UnsupportedOptimizerError(
                    f"expected the new {kind} of params{path} to depend on that leaf, found that it depends on {others}"
                )
        program, reason = _program(graph, list(sources.values()), list(results.values()), is_frontier)
        values = tuple(decided.setdefault(v, len(decided)) for v in program.frontier)
        taken.append(values)
        reads_grad.append(1 in program.reads)
        inputs = tuple(_port(graph, kind, v, program.flat) for kind, v in sources.items())
        outputs = tuple(_port(graph, kind, v, program.flat) for kind, v in results.items())
        text = "\n".join(
            [
                "elementwise" if program.flat else "whole leaf",
                "in " + " ".join(map(_port_text, inputs)),
                "values " + " ".join((f"{k}:" if program.flat else "") + graph.aval(v) for k, v in zip(values, program.frontier)),
                program.text,
                "as " + " ".join(map(_port_text, outputs)),
            ]
        )
        groups.setdefault(text, []).append(i)
        if text not in made:
            made[text] = Signature(
                index=len(made),
                elementwise=program.flat,
                reason=reason,
                leaves=(),
                inputs=inputs,
                outputs=outputs,
                value_specs=tuple(_carried_spec(graph, v) for v in program.frontier),
                values=values if program.flat else None,
                unchanged=tuple(kind for kind, v in results.items() if v == sources.get(kind)),
                text=text,
                fingerprint=hashlib.sha256(text.encode()).hexdigest(),
                program=program,
            )
    signatures = tuple(dataclasses.replace(made[text], leaves=tuple(leaves)) for text, leaves in groups.items())
    signature_of = {i: signature.index for signature in signatures for i in signature.leaves}

    decide = expression.cut(graph, [*(traced.new_states[j] for j in shared), *decided], traced.inputs, lambda _: False, None)
    read = {traced.inputs[place] for place in decide.reads}
    reads = Reads(
        grads=tuple(i for i, v in enumerate(traced.grads) if v in read and traced.trainable[i]),
        params=tuple(i for i, v in enumerate(traced.params) if v in read),
        states=tuple(j for j, v in enumerate(traced.states) if v in read),
        step=traced.step in read,
        loss=traced.loss in read,
    )
    leaves = tuple(
        LeafSlice(
            path=path,
            shape=specs.params[i].shape,
            dtype=specs.params[i].dtype,
            grad_dtype=specs.grads[i].dtype,
            frozen=frozen[i],
            needs_grad=traced.trainable[i] and (reads_grad[i] or i in reads.grads),
            signature=signature_of.get(i),
            states=() if frozen[i] else tuple(j for j, owner in enumerate(owners) if owner == i),
            values=taken[i],
            compute_dtype=graph.dtypes[traced.copies[i]] if traced.copies[i] >= 0 else None,
        )
        for i, path in enumerate(traced.paths)
    )
    public = (
        str(specs.params_treedef),
        str(specs.opt_treedef),
        [repr(leaf) for leaf in leaves],
        [f"{path} {expression.aval_text(s.shape, s.dtype)}" for path, s in zip(traced.state_paths, specs.states)],
        [f"{name} {expression.aval_text(s.shape, s.dtype)}" for name in names for s in specs.companions[name]],
        shared,
        passthrough,
        [(s.fingerprint, s.leaves) for s in signatures],
        decide.text,
    )
    return Sliced(
        params_treedef=specs.params_treedef,
        opt_treedef=specs.opt_treedef,
        leaves=leaves,
        state_specs=specs.states,
        state_paths=tuple(traced.state_paths),
        companions=tuple(names),
        companion_specs=specs.companions,
        shared=shared,
        passthrough=passthrough,
        signatures=signatures,
        decide_specs=(tuple(specs.states[j] for j in shared), tuple(_carried_spec(graph, v) for v in decided)),
        decide_reads=reads,
        fingerprint=hashlib.sha256(repr(public).encode()).hexdigest(),
        _traced=traced,
        _decide=decide,
    )


def _share(traced: _Traced, owners: Sequence[int | None], frozen: Sequence[bool]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """States that `decide` renews, and states that never change and belong to no leaf that trains."""
    shared, passthrough = [], []
    for j, (owner, old, new) in enumerate(zip(owners, traced.states, traced.new_states)):
        if owner is not None:
            if frozen[owner]:
                passthrough.append(j)
        elif traced.graph.size(old) <= SMALL:
            shared.append(j)
        elif old == new:
            passthrough.append(j)
        else:
            raise UnsupportedOptimizerError(
                f"expected an optimizer state of more than {SMALL} elements to belong to one parameter leaf, found {traced.state_paths[j]} "
                f"{traced.graph.aval(old)}, which changes by itself; keep it small, or combine it with the leaf that it is for"
            )
    return tuple(shared), tuple(passthrough)


def _program(graph: Graph, inputs: Sequence[int], results: Sequence[int], is_frontier: Callable[[int], bool]) -> tuple[Program, str | None]:
    """The program of one leaf: elementwise if it can be, else the reason why not."""
    shape = graph.shapes[inputs[0]]
    try:
        for value in (*inputs, *results):
            if graph.shapes[value] != shape:
                raise NotElementwise(f"an array {graph.aval(value)} that does not have the shape of the leaf")
        return expression.cut(graph, results, inputs, is_frontier, math.prod(shape)), None
    except NotElementwise as error:
        return expression.cut(graph, results, inputs, is_frontier, None), str(error)


def _port(graph: Graph, kind: str, value: int, flat: bool) -> Port:
    return Port(kind, graph.dtypes[value], None if flat else graph.shapes[value])


def _port_text(port: Port) -> str:
    return f"{port.kind}:{port.dtype.name if port.shape is None else expression.aval_text(port.shape, port.dtype)}"


def _carried_spec(graph: Graph, value: int) -> jax.ShapeDtypeStruct:
    spec = jax.ShapeDtypeStruct(graph.shapes[value], graph.dtypes[value])
    if expression.is_key(spec.dtype):
        spec = jax.eval_shape(jax.random.key_data, spec)
    return jax.ShapeDtypeStruct(spec.shape, spec.dtype)
