"""A session over memory of its own: what training without retained state is, for `leto run --recovery` persistent, host-memory and the like.

One donated jit of gradients, `tx.update` and `apply_updates`, as people write it. After a failure a new process, started then or waiting as a
spare, takes the newest copy of the state and trains again what was trained since.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from leto_jax import errors
from leto_jax.arena.control import Word
from leto_jax.checkpoint.frozen import GROUPS, Form
from leto_jax.config import METRICS_FILE, Level
from leto_jax.faults import Phase
from leto_jax.layout import LeafSpec
from leto_jax.rmu import programs
from leto_jax.rmu.programs import StepSpec
from leto_jax.rmu.spread import SAME, Spread, resolve
from leto_jax.train.device import count_compiles
from leto_jax.train.rows import MetricsFile
from leto_jax.train.session import PROGRAMS_DEADLINE_SECS, RESTORED, Session
from leto_jax.train.state import State

PyTree = Any
Groups = tuple[PyTree, PyTree, PyTree, PyTree]  # params, opt_state, companions, extras


def plain_step(spec: StepSpec) -> Callable[[Groups, PyTree, jax.Array, jax.Array], tuple[Groups, jax.Array, dict, jax.Array]]:
    """(groups, batch, base key, step number) -> (groups, loss, metrics, whether all was finite)."""

    def run(groups: Groups, batch: PyTree, key: jax.Array, number: jax.Array):
        params, opt_state, companions, extras = groups
        leaves, tree = jax.tree_util.tree_flatten(params)
        moving = tuple(i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating))

        def seen(x):
            return x.astype(spec.compute_dtype) if spec.compute_dtype is not None and jnp.issubdtype(x.dtype, jnp.floating) else x

        compute = programs.compute_function(spec, tree, moving)
        loss, found, new_extras, metrics = compute(jax.tree.map(seen, params), extras, batch, jax.random.fold_in(key, number))
        grads = [jnp.zeros_like(x) for x in leaves]
        for i, grad in zip(moving, found, strict=True):
            grads[i] = grad
        finite = jnp.isfinite(loss) & jnp.all(jnp.stack([jnp.all(jnp.isfinite(grad)) for grad in found]))
        updates, new_opt = optax.with_extra_args_support(spec.tx).update(
            jax.tree_util.tree_unflatten(tree, grads), opt_state, params, value=loss
        )
        new_params = optax.apply_updates(params, updates)
        new_companions = {
            name: jax.tree.map(lambda p, c, f=after: f(p, c, number), new_params, companions[name])
            for name, (_, after) in sorted(spec.after_update.items())
        }
        new: Groups = (new_params, new_opt, new_companions, new_extras)
        if spec.non_finite == "skip":
            kept = jax.tree.map(lambda x, y: jnp.where(finite, x, y), new[:3], (params, opt_state, companions))
            new = (*kept, new_extras)
        return new, loss.astype(jnp.float32), metrics, finite

    return run


class PlainSession(Session):
    """See `leto_jax.session`; the loop, the batches and the final line are the same."""

    def _enter(self) -> None:
        process, member = self._process, self._member
        assert process is not None
        assert member is not None
        key, example = self._look_around()
        self._example_form = programs.leaf_specs(example), jax.tree_util.tree_structure(example)
        self._compiles = count_compiles()
        if process.role == "shadow":
            member.wait_at(Level.DEVICE)
        self._spread = resolve(self._sharding, jax.eval_shape(lambda k: self._init(k)[0], key), example)
        with jax.set_mesh(self._spread.mesh) if self._spread is not None else contextlib.nullcontext():
            make = self._compile_plainly(key, example)
        control = self._listen(member, 1)
        if process.role == "shadow" and member.promotion is None:
            member.enter("rehearse the script")
            self._rehearse_plainly(make, example)
            member.wait_at(Level.LOADED)
        began, compiles = time.monotonic_ns(), self._compiles()
        self._claim()
        self._at(Phase.INIT, 0, -1)
        found = self._newest()
        if found is None:
            self._groups = jax.block_until_ready(make(self._key))
            self._commit = 0
        else:
            self._groups = tuple(self._restored(name, found.leaves[name]) for name in GROUPS)
            self._commit = found.step
            self._source.restore(found.positions[0])
        stages = {"restore": (time.monotonic_ns() - began) / 1e9}
        self._first, self._pending, self._last_loss = self._commit, {}, float("nan")
        self._last_metrics: dict[str, jax.Array] = {}
        self._keep()
        self._announce(self._commit)
        self._ranks.agree("at a commit", "", PROGRAMS_DEADLINE_SECS)
        self.state = self._view()
        self._takeover = self._way_back(stages, compiles) if process.incarnation > 1 else None
        self._rows = MetricsFile(process.job_dir / METRICS_FILE if process.rank == 0 else None, self._commit)
        control[Word.COMMIT] = self._commit
        member.event("attached", commit=self._commit, action=RESTORED if found else "fill", reason="", stages=stages)
        control.enter(Phase.BODY)

    def _compile_plainly(self, key: jax.Array, example: PyTree) -> Callable[[jax.Array], Groups]:
        """Compiles the step, of which `_run` is what is called; returns what makes the first state."""
        spread, specs = self._spread, {}

        def described(key: jax.Array) -> Groups:
            groups = self._first_state(key)
            specs.update({name: programs.leaf_specs(tree) for name, tree in zip(GROUPS, groups, strict=True)})
            return groups

        shapes = jax.eval_shape(described, key)
        trees = {name: jax.tree_util.tree_structure(tree) for name, tree in zip(GROUPS, shapes, strict=True)}
        step, number = plain_step(self._step.spec), np.int32(0)
        if spread is None:
            self._form, self._key = Form(specs, trees), key
            self._run = jax.jit(step, donate_argnums=0).lower(shapes, example, key, number).compile()
            return jax.jit(self._first_state)
        same, parts = spread.named(SAME), self._parts(spread, shapes)
        cut = {name: [spread.local(spec, part) for spec, part in zip(group, parts[name], strict=True)] for name, group in specs.items()}
        self._form = Form(cut, trees, spread, parts)
        shardings = tuple(jax.tree_util.tree_unflatten(trees[name], spread.named(parts[name])) for name in GROUPS)
        placed = jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, shardings)
        data, kind = np.asarray(jax.random.key_data(key)), jax.random.key_impl(key)
        self._key = jax.jit(lambda: jax.random.wrap_key_data(jnp.asarray(data), impl=kind), out_shardings=same)()
        compiled = jax.jit(step, donate_argnums=0, out_shardings=(shardings, same, same, same))
        self._run = compiled.lower(placed, self._joined(example), self._key, spread.join(number, SAME)).compile()
        return jax.jit(self._first_state, out_shardings=shardings)

    def _parts(self, spread: Spread, shapes: Groups) -> dict[str, list[PartitionSpec]]:
        """How the leaves of each group lie: optimizer state and companions as the parameter that they belong to, all else the same on all ranks."""
        params, opt_state, companions, extras = shapes
        tree = jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(params), spread.params)
        of_opt = optax.tree_utils.tree_map_params(
            self._step.spec.tx, lambda _, part: part, opt_state, tree, transform_non_params=lambda _: SAME
        )
        return {
            "params": list(spread.params),
            "opt_state": jax.tree.leaves(of_opt, is_leaf=lambda x: isinstance(x, PartitionSpec)),
            "companions": list(spread.params) * len(companions),
            "extras": [SAME] * len(jax.tree.leaves(extras)),
        }

    def _joined(self, batch: PyTree) -> PyTree:
        """The batch of all ranks, of which this one has drawn its part."""
        spread = self._spread
        if spread is None:
            return batch
        flat, tree = jax.tree.flatten(batch)
        return jax.tree.unflatten(tree, [spread.join(leaf, part) for leaf, part in zip(flat, spread.batch, strict=True)])

    def _number(self, step: int) -> Any:
        return np.int32(step) if self._spread is None else self._spread.join(np.int32(step), SAME)

    def _first_state(self, key: jax.Array) -> Groups:
        params, extras = self._init(key)
        spec = self._step.spec
        companions = {name: jax.tree.map(make, params) for name, (make, _) in sorted(spec.after_update.items())}
        return params, spec.tx.init(params), companions, extras

    def _rehearse_plainly(self, make: Callable[[jax.Array], Groups], example: PyTree) -> None:
        """A spare's: everything has run once. Cost: memory of one state, freed at the end."""
        groups, *_ = self._run(make(self._key), self._joined(example), self._key, self._number(1))
        for function in self._warm:
            jax.block_until_ready(function(_state(groups, 1), example))
        jax.block_until_ready(groups)

    def _restored(self, name: str, leaves: Sequence[np.ndarray]) -> PyTree:
        form, spread = self._form, self._spread
        stored = [jax.device_put(leaf, self._device) for leaf in leaves]
        if spread is not None:
            stored = [spread.join(leaf, part) for leaf, part in zip(stored, form.parts[name], strict=True)]
        typed = [programs.from_storage(leaf, spec) for leaf, spec in zip(stored, form.specs[name], strict=True)]
        return jax.block_until_ready(jax.tree_util.tree_unflatten(form.trees[name], typed))

    @property
    def _batch_form(self) -> tuple[tuple[LeafSpec, ...], Any]:
        return self._example_form

    def _position(self) -> bytes:
        return self._source.position()

    def _drawn(self, step: int, position: bytes, batch: PyTree) -> None:
        pass

    def _advance(self, step: int, leaves: Sequence[np.ndarray]) -> int:
        self._at(Phase.COMPUTE, step, -1)
        batch = jax.tree_util.tree_unflatten(self._batch_form[1], leaves)
        self._groups, loss, metrics, finite = self._run(self._groups, self._joined(batch), self._key, self._number(step))
        jax.block_until_ready(self._groups)
        self._last_loss, self._last_metrics = float(loss), jax.tree.map(lambda x: x.addressable_data(0), metrics)
        if self._step.spec.non_finite == "stop" and not finite:
            raise errors.NonFiniteLossError(
                f"step {step}: loss {self._last_loss!r}; pass non_finite='skip' or 'continue' to TrainStep to go on over such steps"
            )
        self._at(Phase.DRAIN, step, -1)
        self._at(Phase.BODY, step, -1)
        return 0

    def _view(self) -> State:
        return _state(self._groups, self._commit)

    def _leaves(self, group: str) -> Iterable[np.ndarray]:
        tree = self._groups[GROUPS.index(group)]
        return (np.asarray(programs.to_storage(leaf.addressable_data(0))) for leaf in jax.tree_util.tree_leaves(tree))

    def _metrics(self) -> dict[str, jax.Array]:
        return dict(self._last_metrics)

    @property
    def _stale_ns(self) -> tuple[int, int]:
        return 0, -1

    def _settle(self) -> None:
        pass

    def _loss(self) -> float:
        return self._last_loss


def _state(groups: Groups, commit: int) -> State:
    return State(dict(zip(GROUPS, groups, strict=True)).__getitem__, commit)
