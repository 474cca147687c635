"""The programs of a training step, as pure functions over flat lists of stored leaves, and the layout that follows from them.

Every program takes and returns flat sequences of arrays in *storage form* (typed PRNG keys as key data, sub-byte integers as bytes), so
its call needs no user pytree and its executable can be loaded in another process that traced the same functions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from leto_jax import errors
from leto_jax import layout as layouts
from leto_jax.config import Protection
from leto_jax.layout import JobSpec, Layout, LeafSpec, SignatureSpec
from leto_jax.records import BODY_WORD, BYTES, LOSS_WORD, SQUARES_WORD
from leto_jax.rmp import codec
from leto_jax.rmu import slicing
from leto_jax.rmu.spread import SAME, Sharding, Spread, resolve

PyTree = Any
Array = jax.Array
NON_FINITE = ("stop", "skip", "continue")
# Values of the scalars' `apply` word.
APPLY, SKIP, STOP = 1, 0, 2


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """What a user's training step consists of; `train.TrainStep` builds it.

    grad_fn(params, extras, batch, key) -> (loss, grads, extras, metrics), grads for the leaves in `trainable` only when it comes from a
    loss. after_update: name -> (init_leaf, f). non_finite: 'stop', 'skip' or 'continue'.
    """

    loss_fn: Callable | None
    grad_fn: Callable | None
    tx: optax.GradientTransformation
    after_update: Mapping[str, tuple[Callable, Callable]]
    compute_dtype: Any
    non_finite: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A named function of flat arrays, with the ShapeDtypeStructs of its arguments (a tuple of lists or arrays).

    places: number of the argument that is donated: arrays over retained memory, in the order of the first outputs, which go there. None: the
    outputs are arrays of their own. parts, out_parts: of a program over all ranks how its arguments and outputs are spread, with a PartitionSpec for each leaf;
    the function takes whole leaves, `arguments` are the shards. None: a program of one rank.
    """

    name: str
    function: Callable
    arguments: tuple
    places: int | None = None
    parts: tuple | None = None
    out_parts: PyTree = None


@dataclasses.dataclass(frozen=True)
class Whole:
    """The leaves as the user's functions see them. `Layout` and the specs in `Job` are of what one rank keeps."""

    params: tuple[LeafSpec, ...]
    opt: tuple[LeafSpec, ...]
    companions: tuple[LeafSpec, ...]
    batch: tuple[LeafSpec, ...]


@dataclasses.dataclass(frozen=True)
class Parts:
    """How the leaves of `Whole` are cut over the ranks."""

    params: tuple[PartitionSpec, ...]
    opt: tuple[PartitionSpec, ...]
    companions: tuple[PartitionSpec, ...]
    batch: tuple[PartitionSpec, ...]


@dataclasses.dataclass(frozen=True)
class Trees:
    """Tree structures with which flat stored leaves become what the user sees, and the leaf specs to convert them."""

    params: jax.tree_util.PyTreeDef
    opt_state: jax.tree_util.PyTreeDef
    companions: jax.tree_util.PyTreeDef
    extras: jax.tree_util.PyTreeDef
    metrics: jax.tree_util.PyTreeDef
    batch: jax.tree_util.PyTreeDef


@dataclasses.dataclass(frozen=True)
class Home:
    """Where a leaf of the optimizer state or a companion lies: in lane `lane` of `signature` at leaf position `leaf`; in the scalars; or read-only.

    kind: 'lane', 'shared', 'constant' or 'loose_grad'. index: position among the leaves of that kind.
    """

    kind: str
    signature: int = -1
    lane: int = -1
    leaf: int = -1
    index: int = -1


@dataclasses.dataclass(frozen=True)
class Job:
    """Everything derived from the user's functions by tracing: layout, programs, and the homes of all leaves.

    differentiated: parameter leaves whose gradient is computed, in order; grad_homes: where each of them lies (the parameter's home, whose
    signature has the gradient lane, or among the loose gradients). copied: parameter leaves with a compute copy. in_place: programs write to
    their places themselves (`rmu.device`). decide_reads: indices of the parameters, optimizer state and companions that decide reads. spread: over
    which ranks, None where one trains alone.
    """

    layout: Layout
    programs: dict[str, Program]
    trees: Trees
    sliced: slicing.Sliced
    param_homes: tuple[Home, ...]
    compute_homes: tuple[Home, ...]
    opt_homes: tuple[Home, ...]
    companion_homes: tuple[Home, ...]
    grad_homes: tuple[Home, ...]
    opt_specs: tuple[LeafSpec, ...]
    companion_specs: tuple[LeafSpec, ...]
    differentiated: tuple[int, ...]
    copied: tuple[int, ...]
    whole: Whole
    parts: Parts
    spread: Spread | None = None
    in_place: bool = False
    decide_reads: tuple[tuple[int, ...], ...] = ((), (), ())


def is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def to_storage(x: Array) -> Array:
    """A leaf in the form in which it is stored."""
    x = jnp.asarray(x)
    if is_key(x):
        return jax.random.key_data(x)
    stored = layouts.storage_dtype(jnp.dtype(x.dtype).name)
    return x if stored == jnp.dtype(x.dtype).name else x.astype(stored)


def from_storage(x: Array, spec: LeafSpec) -> Array:
    """The inverse of `to_storage`."""
    if spec.key_impl is not None:
        return jax.random.wrap_key_data(x, impl=spec.key_impl)
    return x.astype(spec.logical_dtype) if spec.logical_dtype and spec.logical_dtype != spec.dtype else x


def leaf_specs(tree: PyTree) -> tuple[LeafSpec, ...]:
    """LeafSpecs of a pytree of arrays or tracers, in tree order."""
    specs = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        x = x if hasattr(x, "dtype") else jnp.asarray(x)
        name = jax.tree_util.keystr(path)
        kind = getattr(getattr(x, "sharding", None), "memory_kind", None) or "device"
        if is_key(x):
            data = jax.eval_shape(jax.random.key_data, x)
            specs.append(LeafSpec(name, data.shape, data.dtype.name, str(x.dtype), str(jax.random.key_impl(x)), kind))
        else:
            dtype = jnp.dtype(x.dtype).name
            specs.append(LeafSpec(name, tuple(x.shape), layouts.storage_dtype(dtype), dtype, None, kind))
    return tuple(specs)


def struct(spec: LeafSpec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype))


def structs(specs: Sequence[LeafSpec]) -> list[jax.ShapeDtypeStruct]:
    return [struct(spec) for spec in specs]


def _abstract(function: Callable, *arguments) -> tuple[PyTree, tuple[LeafSpec, ...]]:
    """Output structure of `function` and the leaf specs of it, without running it."""
    specs: list[LeafSpec] = []

    def traced(*args):
        out = function(*args)
        specs.extend(leaf_specs(out))
        return out

    return jax.eval_shape(traced, *arguments), tuple(specs)


def _load(stored: Sequence[Array], specs: Sequence[LeafSpec], treedef) -> PyTree:
    return jax.tree_util.tree_unflatten(treedef, [from_storage(x, spec) for x, spec in zip(stored, specs, strict=True)])


def _store(tree: PyTree) -> list[Array]:
    return [to_storage(x) for x in jax.tree_util.tree_leaves(tree)]


def trace(
    init: Callable,
    step: StepSpec,
    batch: PyTree,
    key: Array,
    protection: Protection,
    in_place: jax.Device | None = None,
    sharding: Sharding | None = None,
) -> Job:
    """Traces the user's functions abstractly and plans the job. Nothing is computed, nothing is allocated.

    batch: one batch, of several ranks this one's part (its values are not used). key: the base key; step t gets fold_in(key, t). in_place: the
    device whose programs shall write to retained memory themselves; None where outputs are copied there. sharding: over several ranks.
    Raises LayoutError, UsageError or UnsupportedOptimizerError.
    """
    spread = None
    if sharding is not None or jax.process_count() > 1:
        spread = resolve(sharding, jax.eval_shape(lambda k: init(k)[0], key), batch)
    with jax.set_mesh(spread.mesh) if spread is not None else contextlib.nullcontext():
        return _trace(init, step, batch, key, protection, in_place, spread)


def _trace(
    init: Callable, step: StepSpec, batch: PyTree, key: Array, protection: Protection, in_place: jax.Device | None, spread: Spread | None
) -> Job:
    (params, extras), _ = _abstract(init, key)
    _, param_specs = _abstract(lambda k: init(k)[0], key)
    _, extra_specs = _abstract(lambda k: init(k)[1], key)
    if not param_specs:
        raise errors.LayoutError("init(key) -> (params, extras): expected at least one parameter leaf, found none")
    opt, opt_specs = _abstract(step.tx.init, params)

    def init_companions(p):
        return {name: jax.tree.map(make, p) for name, (make, _) in sorted(step.after_update.items())}

    companions, companion_specs = _abstract(init_companions, params)
    slice_with = functools.partial(
        slicing.slice_update, step.tx, params, after_update=dict(step.after_update), compute_dtype=step.compute_dtype
    )
    sliced = slice_with()
    if all(leaf.frozen for leaf in sliced.leaves):
        raise errors.LayoutError("expected at least one parameter that the optimizer changes, found only frozen ones")
    differentiated = tuple(i for i, leaf in enumerate(sliced.leaves) if leaf.needs_grad or not leaf.frozen)

    params_tree, batch_specs = jax.tree_util.tree_structure(params), leaf_specs(batch)
    parts, whole_batch = _parts(spread, sliced, len(opt_specs), len(companion_specs), len(param_specs)), batch_specs
    if spread is not None:
        whole_batch = tuple(
            dataclasses.replace(x, shape=spread.whole_shape(x.shape, part)) for x, part in zip(batch_specs, parts.batch, strict=True)
        )
    compute = compute_function(step, params_tree, differentiated)
    logical = [jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.logical_dtype or x.dtype)) for x in whole_batch]
    arguments = (
        _seen_params(params, step.compute_dtype),
        extras,
        jax.tree.unflatten(jax.tree.structure(batch), logical),
        key,
    )
    (loss, grads, new_extras, metrics), _ = _abstract(compute, *arguments)
    _, metric_specs = _abstract(lambda *a: compute(*a)[3], *arguments)
    _check_compute(loss, grads, extras, new_extras, [param_specs[i] for i in differentiated])
    grad_dtypes = {i: jnp.dtype(grad.dtype) for i, grad in zip(differentiated, grads, strict=True)}
    if any(grad_dtypes[i] != jnp.dtype(param_specs[i].dtype) for i in differentiated):
        sliced = slice_with(grad_dtypes=[grad_dtypes.get(i) for i in range(len(param_specs))])

    whole = Whole(param_specs, opt_specs, companion_specs, whole_batch)
    if spread is not None:  # from here on the leaves are what one rank keeps
        shards = lambda specs, cuts: tuple(spread.local(x, part) for x, part in zip(specs, cuts, strict=True))
        param_specs, opt_specs = shards(param_specs, parts.params), shards(opt_specs, parts.opt)
        companion_specs = shards(companion_specs, parts.companions)
        _check_update_of_shards(sliced, whole.params, parts, spread)
    homes: dict[tuple[str, int], Home] = {}
    signatures = [
        _signature_spec(sliced, number, param_specs, opt_specs, companion_specs, homes) for number in range(len(sliced.signatures))
    ]
    for position, j in enumerate(sliced.shared):
        homes["state", j] = Home("shared", index=position)
    frozen = tuple(i for i, leaf in enumerate(sliced.leaves) if leaf.frozen)
    for position, i in enumerate(frozen):
        homes["param", i] = Home("constant", index=position)
    # What belongs to a frozen leaf, or to none, and is never renewed.
    constants: list[LeafSpec] = []
    for kind, specs in [("state", opt_specs), ("companion", companion_specs)]:
        for j, spec in enumerate(specs):
            if (kind, j) not in homes:
                homes[kind, j] = Home("constant", index=len(frozen) + len(constants))
                constants.append(spec)
    in_lane = {i for signature in signatures if signature.grad_dtype is not None for i in signature.leaves}
    loose = tuple(i for i in differentiated if i not in in_lane)
    for position, i in enumerate(loose):
        homes["loose_grad", i] = Home("loose_grad", index=position)
    values = tuple(
        LeafSpec(f"[{n}]", tuple(x.shape), layouts.storage_dtype(jnp.dtype(x.dtype).name), jnp.dtype(x.dtype).name)
        for n, x in enumerate(sliced.decide_specs[1])
    )
    plan = layouts.plan(
        JobSpec(
            params=param_specs,
            read_only=frozen,
            signatures=tuple(signatures),
            constants=tuple(constants),
            shared=tuple(opt_specs[j] for j in sliced.shared),
            values=values,
            extras=extra_specs,
            metrics=metric_specs,
            batch=batch_specs,
            loose_grads=tuple(dataclasses.replace(param_specs[i], dtype=grad_dtypes[i].name) for i in loose),
            protection=protection,
        )
    )
    structure = jax.tree_util.tree_structure
    param_homes = tuple(homes["param", i] for i in range(len(param_specs)))
    job = Job(
        layout=plan,
        programs={},
        trees=Trees(params_tree, structure(opt), structure(companions), structure(extras), structure(metrics), structure(batch)),
        sliced=sliced,
        param_homes=param_homes,
        compute_homes=tuple(homes.get(("compute", i), param_homes[i]) for i in range(len(param_specs))),
        opt_homes=tuple(homes["state", j] for j in range(len(opt_specs))),
        companion_homes=tuple(homes["companion", c] for c in range(len(companion_specs))),
        grad_homes=tuple(homes.get(("loose_grad", i), param_homes[i]) for i in differentiated),
        opt_specs=opt_specs,
        companion_specs=companion_specs,
        differentiated=differentiated,
        copied=tuple(i for i in range(len(param_specs)) if ("compute", i) in homes),
        whole=whole,
        parts=parts,
        spread=spread,
        in_place=in_place is not None,
    )
    decide, reads = _decide_program(job, step)
    job = dataclasses.replace(job, decide_reads=reads)
    job.programs["decide"] = decide
    for program in _programs(job, init, init_companions, compute, step, leaf_specs(key)[0]):
        job.programs[program.name] = program
    if in_place is not None:
        from leto_jax.rmu import placed  # after the programs that it puts in place

        job.programs.update(placed.programs(job, in_place))
    return job


def _parts(spread: Spread | None, sliced: slicing.Sliced, opt: int, companions: int, params: int) -> Parts:
    """How each leaf is cut: optimizer state and companions as the parameter that they belong to, what belongs to none not at all."""
    if spread is None:
        return Parts((SAME,) * params, (SAME,) * opt, (SAME,) * companions, ())
    by_state = {j: spread.params[i] for i, leaf in enumerate(sliced.leaves) for j in leaf.states}
    return Parts(
        spread.params,
        tuple(by_state.get(j, SAME) for j in range(opt)),
        spread.params * (companions // params if params else 0),
        spread.batch,
    )


def _check_update_of_shards(sliced: slicing.Sliced, params: Sequence[LeafSpec], parts: Parts, spread: Spread) -> None:
    """Raises UnsupportedOptimizerError for a leaf that is cut and whose update needs all of it."""
    for signature in sliced.signatures:
        for i in signature.leaves:
            if not signature.elementwise and spread.is_cut(parts.params[i]):
                raise errors.UnsupportedOptimizerError(
                    f"{params[i].path}: its update is not elementwise, and {parts.params[i]} cuts it over ranks, who may not talk to each other in an "
                    "update that one of them may have to repeat; give it PartitionSpec(), or take an elementwise optimizer"
                )


def _seen_params(params: PyTree, compute_dtype) -> PyTree:
    """Parameters as the loss sees them: floating leaves in the compute dtype, if one is set."""

    def seen(x):
        if compute_dtype is None or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.ShapeDtypeStruct(x.shape, jnp.dtype(compute_dtype))

    return jax.tree.map(seen, params)


def compute_function(step: StepSpec, params_tree, differentiated: tuple[int, ...]) -> Callable:
    """(params, extras, batch, key) -> (loss, gradients of the leaves that need one, extras, metrics)."""

    def compute(params, extras, batch, key):
        if step.loss_fn is None:
            assert step.grad_fn is not None
            grads, new_extras, metrics = step.grad_fn(params, extras, batch, key)
            leaves = jax.tree_util.tree_leaves(grads)
            if len(leaves) != params_tree.num_leaves:
                raise errors.UsageError(f"grad_fn: expected gradients for {params_tree.num_leaves} parameter leaves, found {len(leaves)}")
            grads = [leaves[i] for i in differentiated]
            if not isinstance(metrics, Mapping) or "loss" not in metrics:
                raise errors.UsageError(f"grad_fn -> (grads, extras, metrics): expected a dict of metrics with 'loss', found {metrics!r}")
            loss = metrics["loss"]
        else:
            leaves, loss_fn = jax.tree_util.tree_leaves(params), step.loss_fn

            def loss_of(moving):
                full = list(leaves)
                for i, x in zip(differentiated, moving, strict=True):
                    full[i] = x
                out = loss_fn(jax.tree_util.tree_unflatten(params_tree, full), extras, batch, key)
                try:
                    value, (aux_extras, aux_metrics) = out
                except (TypeError, ValueError) as exception:
                    raise errors.UsageError(
                        "loss_fn: expected (loss, (extras, metrics)), found another structure; return extras unchanged if it has none"
                    ) from exception
                _check_loss(jnp.asarray(value))  # here: value_and_grad would refuse it first, in its own words
                return value, (aux_extras, aux_metrics)

            (loss, (new_extras, metrics)), grads = jax.value_and_grad(loss_of, has_aux=True)([leaves[i] for i in differentiated])
            if not isinstance(metrics, Mapping):
                raise errors.UsageError(f"loss_fn: expected a dict of metrics, found {type(metrics).__name__}")
            metrics = {"loss": loss, **metrics}
        return loss, grads, new_extras, dict(metrics)

    return compute


def _check_loss(loss) -> None:
    if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise errors.UsageError(f"loss: expected a floating scalar, found {loss.dtype}{list(loss.shape)}; reduce it with jnp.mean")


def _check_compute(loss, grads, extras, new_extras, param_specs: Sequence[LeafSpec]) -> None:
    """Refuses a loss whose results cannot be retained, with the first thing that is wrong (UsageError)."""
    _check_loss(loss)
    before, after = describe(extras), describe(new_extras)
    if before != after:
        old, new = next(((a, b) for a, b in itertools.zip_longest(before, after, fillvalue="nothing") if a != b))
        raise errors.UsageError(f"extras: expected the loss to return extras with the leaves that it got, found {old} -> {new}")
    for spec, grad in zip(param_specs, grads, strict=True):
        if tuple(grad.shape) != spec.shape:
            raise errors.UsageError(f"gradient of {spec.path}: expected shape {list(spec.shape)}, found {list(grad.shape)}")


def describe(tree: PyTree) -> tuple[str, ...]:
    """Path, dtype and shape of each leaf, printed: enough to compare two trees and to name where they differ."""
    return tuple(f"{jax.tree_util.keystr(path)}: {x.dtype}{list(x.shape)}" for path, x in jax.tree_util.tree_leaves_with_path(tree))


def _signature_spec(
    sliced: slicing.Sliced, number: int, param_specs, opt_specs, companion_specs, homes: dict[tuple[str, int], Home]
) -> SignatureSpec:
    """The layout's view of one signature; notes in `homes` where each leaf of its lanes lies."""
    signature = sliced.signatures[number]
    lanes, shapes = [], []
    for lane, port in enumerate(signature.outputs):
        lane_shapes = []
        for position, i in enumerate(signature.leaves):
            kind, _, name = port.kind.partition(":")
            if kind == "state":
                key, spec = ("state", sliced.leaves[i].states[int(name)]), opt_specs[sliced.leaves[i].states[int(name)]]
            elif kind == "companion":  # flattened name by name, each in parameter order
                c = sliced.companions.index(name) * len(param_specs) + i
                key, spec = ("companion", c), companion_specs[c]
            else:
                key, spec = (kind, i), param_specs[i]
            homes[key] = Home("lane", number, lane, position)
            lane_shapes.append(spec.shape)
        lanes.append((port.kind, layouts.storage_dtype(jnp.dtype(port.dtype).name)))
        shapes.append(tuple(lane_shapes))
    grad_dtype = next((jnp.dtype(port.dtype).name for port in signature.inputs if port.kind == "grad"), None)
    return SignatureSpec(
        sliced.leaves[signature.leaves[0]].path,
        signature.fingerprint,
        tuple(lanes),
        grad_dtype,
        signature.elementwise,
        tuple(signature.leaves),
        tuple(shapes),
    )


def _decide_program(job: Job, step: StepSpec) -> tuple[Program, tuple[tuple[int, ...], ...]]:
    """Decide, and the indices of the parameters, optimizer state and companions that it reads: it takes only these."""
    sliced, spread, whole, parts = job.sliced, job.spread, job.whole, job.parts
    groups = (structs(whole.params), structs(whole.opt), structs(whole.companions))
    scalar = lambda dtype: jax.ShapeDtypeStruct((), jnp.dtype(dtype))
    grads = [jax.ShapeDtypeStruct(whole.params[i].shape, sliced.leaves[i].grad_dtype) for i in job.differentiated]

    def decide(grads, params, states, companions, loss, sumsq, number):
        full: list[Array | None] = [None] * len(whole.params)
        for i, grad in zip(job.differentiated, grads, strict=True):
            full[i] = grad
        by_name = {name: companions[n * len(params) : (n + 1) * len(params)] for n, name in enumerate(sliced.companions)}
        params = [from_storage(x, s) for x, s in zip(params, whole.params, strict=True)]
        new_shared, values = sliced.decide(full, params, states, by_name, number, loss)
        finite = jnp.isfinite(loss) & jnp.isfinite(sumsq)
        otherwise = {"stop": STOP, "skip": SKIP, "continue": APPLY}[step.non_finite]
        verdict = jnp.where(finite, APPLY, otherwise).astype(jnp.int32)
        kept = [jnp.where(verdict == APPLY, to_storage(new), states[j]) for new, j in zip(new_shared, sliced.shared, strict=True)]
        return kept, [to_storage(x) for x in values], verdict

    rest = scalar("float32"), scalar("float32"), scalar("int32")
    traced = jax.make_jaxpr(decide)(grads, *groups, *rest).jaxpr
    read = {id(var) for eqn in traced.eqns for var in eqn.invars} | {id(var) for var in traced.outvars}
    inputs = iter(traced.invars[len(grads) :])
    reads = tuple(tuple(i for i, var in enumerate(itertools.islice(inputs, len(group))) if id(var) in read) for group in groups)

    def filled(taken: Sequence[Array], needed: Sequence[int], group: Sequence) -> list[Array]:
        """What was taken at its place among zeros, which nothing reads."""
        found = dict(zip(needed, taken, strict=True))
        return [found[i] if i in found else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(group)]

    def run(grads, params, states, companions, loss, sumsq, number):
        params, states, companions = map(filled, (params, states, companions), reads, groups)
        return decide(grads, params, states, companions, loss, sumsq, number)

    def run_over_ranks(grads, params, states, companions, row, number):
        """row: of each rank the gradient record, which all of them see; they reduce what they see in the same order."""
        assert spread is not None
        rows = jax.lax.with_sharding_constraint(row, NamedSharding(spread.mesh, SAME))[jnp.asarray(spread.by_rank)]
        words = jax.lax.bitcast_convert_type(rows[:, BODY_WORD + LOSS_WORD : BODY_WORD + SQUARES_WORD + 1], jnp.float32)
        sumsq = functools.reduce(jnp.add, [words[rank, 1] for rank in range(spread.count)])
        return *run(grads, params, states, companions, words[0, 0], sumsq, number), rows

    shards = (structs(job.layout.spec.params), structs(job.opt_specs), structs(job.companion_specs))
    taken = [[group[i] for i in needed] for group, needed in zip(shards, reads, strict=True)]
    own = gradient_forms(job)
    if spread is None:
        return Program("decide", run, (own, *taken, *rest)), reads
    cut = [[group[i] for i in needed] for group, needed in zip((parts.params, parts.opt, parts.companions), reads, strict=True)]
    row = jax.ShapeDtypeStruct((1, BYTES // 4), jnp.uint32)
    over = ([parts.params[i] for i in job.differentiated], *cut, spread.each, SAME)
    return Program("decide", run_over_ranks, (own, *taken, row, scalar("int32")), None, over, SAME), reads


def _programs(job: Job, init, init_companions, compute, step: StepSpec, key_spec: LeafSpec):
    """Every program of the job. Names are stable: they are keys of the executables' blob and of the program hashes."""
    plan, trees, parts, over = job.layout, job.trees, job.parts, job.spread is not None
    spec, protection, whole = plan.spec, plan.spec.protection, job.whole
    copied = [parts.params[i] for i in job.copied]
    scalar = lambda dtype: jax.ShapeDtypeStruct((), jnp.dtype(dtype))
    key_struct = struct(key_spec)

    def run_init(key):
        params, extras = init(from_storage(key, key_spec))
        companions = init_companions(params)
        leaves = jax.tree_util.tree_leaves(params)
        copies = [leaves[i].astype(step.compute_dtype) for i in job.copied]
        return _store(params), _store(step.tx.init(params)), _store(companions), _store(extras), copies

    everything = (list(parts.params), list(parts.opt), list(parts.companions), SAME, copied)
    yield Program("init", run_init, (key_struct,), None, (SAME,) if over else None, everything)

    seen_specs = list(spec.params)
    for i in job.copied:
        dtype = jnp.dtype(step.compute_dtype).name
        seen_specs[i] = dataclasses.replace(spec.params[i], dtype=dtype, logical_dtype=dtype)
    read_parts = (list(parts.params), [SAME] * len(spec.extras), list(parts.batch), SAME, SAME)
    made_parts = ([parts.params[i] for i in job.differentiated], SAME, SAME, SAME)

    def run_compute(params, extras, batch, key, number):
        values = [from_storage(x, s) for x, s in zip(params, seen_specs, strict=True)]
        if step.compute_dtype is not None:  # frozen leaves have no compute copy
            values = [x.astype(step.compute_dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in values]
        loss, grads, new_extras, metrics = compute(
            jax.tree_util.tree_unflatten(trees.params, values),
            _load(extras, spec.extras, trees.extras),
            _load(batch, whole.batch, trees.batch),
            jax.random.fold_in(from_storage(key, key_spec), number),
        )
        return list(grads), _store(new_extras), _store(metrics), loss.astype(jnp.float32)

    read = (structs(seen_specs), structs(spec.extras), structs(spec.batch), key_struct, scalar("int32"))
    yield Program("compute", run_compute, read, None, read_parts if over else None, made_parts)

    for number, signature in enumerate(plan.signatures):
        seen: set[str] = set()
        for chunk in signature.chunks:
            name = update_name(plan, chunk.index)
            if name not in seen:
                seen.add(name)
                yield _update_program(job, number, chunk, name)

    for rows, words in sorted({(protection.data_rows, piece.row_bytes // 4) for piece in plan.pieces}):
        page_words = protection.page_bytes // 4
        argument = (jax.ShapeDtypeStruct((rows, words), jnp.uint32),)

        def run_checksum(data, page_words=page_words):
            return codec.page_checksums(data.reshape(-1, page_words))

        def run_encode(data, page_words=page_words):
            return codec.encode(data, protection.parity_rows), codec.page_checksums(data.reshape(-1, page_words))

        yield Program(encode_name(words), run_encode, argument)
        yield Program(checksum_name(words), run_checksum, argument)

    def run_inspect(grads):
        flat = dict(zip(job.differentiated, (grad.reshape(-1) for grad in grads), strict=True))
        found = [inspected(flat[part.leaf][part.begin : part.end]) for part in plan.gradient_parts]
        loose = set(flat) - {part.leaf for part in plan.gradient_parts}  # no chunk reads them, a global norm may
        squares = [*(square for square, _ in found), *(inspected(flat[i])[0] for i in sorted(loose))]
        return sum(squares), jnp.stack([sums for _, sums in found]) if found else jnp.zeros((0, 2), jnp.uint32)

    yield Program("inspect", run_inspect, (gradient_forms(job),))


def gradient_forms(job: Job) -> list[jax.ShapeDtypeStruct]:
    """What a rank keeps of each gradient."""
    return [jax.ShapeDtypeStruct(job.layout.spec.params[i].shape, job.sliced.leaves[i].grad_dtype) for i in job.differentiated]


def inspected(grad: Array) -> tuple[Array, Array]:
    """A flat piece of a gradient, read once: the sum of its squares, float32, and a checksum as of one page, uint32[2]."""
    squares = jnp.square(jnp.abs(grad).astype(jnp.float32))
    if jnp.issubdtype(grad.dtype, jnp.complexfloating):
        grad = jnp.stack([grad.real, grad.imag], axis=-1)
    unsigned = jnp.dtype(f"uint{8 * min(grad.dtype.itemsize, 4)}")
    words = jax.lax.bitcast_convert_type(grad, unsigned).astype(jnp.uint32).reshape(-1)
    if words.shape != squares.shape:
        return jnp.sum(squares), codec.page_checksums(words)
    # `codec.page_checksums` in the same pass as the squares.
    weighted = (words ^ (words >> 16)) * (jax.lax.broadcasted_iota(jnp.uint32, words.shape, 0) + 1)
    zero, add = jnp.uint32(0), lambda a, b: (a[0] + b[0], a[1] + b[1], a[2] + b[2])
    total, first, second = jax.lax.reduce((squares, words, weighted), (jnp.float32(0), zero, zero), add, (0,))
    return total, jnp.stack([first, second])


def encode_name(words: int) -> str:
    return f"encode.{words}"


def checksum_name(words: int) -> str:
    return f"checksum.{words}"


def update_name(plan: Layout, index: int) -> str:
    """Elementwise signatures have one program; a whole-leaf chunk has its own."""
    number, _ = plan.chunks[index]
    return f"update.{number}" if plan.signatures[number].spec.elementwise else f"update.{number}.{index}"


def elementwise_update(job: Job, number: int, values, verdict, grad: Array | None, old: Sequence[Array]) -> list[Array]:
    """The update of an elementwise signature over pieces of one shape, whichever it is: new pieces in the order of the lanes."""
    traced, kinds = job.sliced.signatures[number], [kind for kind, _ in job.layout.signatures[number].spec.lanes]
    assert traced.values is not None
    pieces = {**dict(zip(kinds, old, strict=True)), "grad": grad}
    new = job.sliced.apply(traced, [values[k] for k in traced.values], [pieces[port.kind] for port in traced.inputs], old[0].shape)
    return [jnp.where(verdict == APPLY, x, y) for x, y in zip(new, old, strict=True)]


def _update_program(job: Job, number: int, chunk: layouts.Chunk, name: str) -> Program:
    """Chunk update: (values, verdict, gradient piece, old pieces) -> new pieces, every piece flat.

    A skipped step keeps each old value by select, never by multiplying, so that a non-finite gradient cannot leak into it.
    """
    plan, sliced = job.layout, job.sliced
    signature, traced = plan.signatures[number], sliced.signatures[number]
    kinds = [kind for kind, _ in signature.spec.lanes]
    length = chunk.length

    if signature.spec.elementwise:

        def run(values, verdict, grad, old):
            return elementwise_update(job, number, values, verdict, grad, old)

    else:
        members = [
            (
                signature.leaf_offsets[n] - chunk.start,
                [shapes[n] for shapes in signature.spec.lane_shapes],
                plan.spec.params[signature.spec.leaves[n]].shape,
                sliced.leaves[signature.spec.leaves[n]].values,
            )
            for n in chunk.leaves
        ]

        def run(values, verdict, grad, old):
            new = list(old)
            for begin, shapes, shape, picked in members:

                def take(piece, form, begin=begin):
                    return piece[begin : begin + math.prod(form)].reshape(form)

                pieces = {kind: take(piece, form) for kind, piece, form in zip(kinds, old, shapes, strict=True)}
                if grad is not None:
                    pieces["grad"] = take(grad, shape)
                new_leaf = sliced.apply(traced, [values[k] for k in picked], [pieces[port.kind] for port in traced.inputs], shape)
                for lane, x in enumerate(new_leaf):
                    new[lane] = jax.lax.dynamic_update_slice(new[lane], x.reshape(-1), (begin,))
            return [jnp.where(verdict == APPLY, x, y) for x, y in zip(new, old, strict=True)]

    pieces = [jax.ShapeDtypeStruct((length,), jnp.dtype(lane.dtype)) for lane in signature.lanes]
    grad = None if signature.grad is None else jax.ShapeDtypeStruct((length,), jnp.dtype(signature.grad.dtype))
    return Program(name, run, (structs(plan.spec.values), jax.ShapeDtypeStruct((), jnp.int32), grad, pieces))
