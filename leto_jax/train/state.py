"""`State`: what a user sees of the retained state, for as long as it is current."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from leto_jax import errors
from leto_jax.checkpoint.frozen import form_of
from leto_jax.layout import LeafSpec
from leto_jax.rmu.programs import from_storage
from leto_jax.rmu.retained import Retained

PyTree = Any
_FIELDS = ("params", "opt_state", "companions", "extras")


class State:
    """The training state at one commit, as ordinary pytrees: `params`, `opt_state` (the whole optax state), `companions`, `extras`, `step`.

    Trees are made when they are first read, and deleted when `s.step` consumes the state: a later use raises, as with donation.
    They are copies: an asynchronous computation, or a checkpoint, may still read them while the next update writes. It is a pytree, so a jitted
    function takes it as an argument.
    """

    def __init__(self, make: Callable[[str], PyTree], commit: int):
        """make: gives the tree of a field."""
        self._make: Callable[[str], PyTree] | None = make
        self._commit = commit
        self._trees: dict[str, PyTree] = {}

    @property
    def step(self) -> int:
        """Number of the last committed step."""
        return self._commit

    @property
    def alive(self) -> bool:
        return self._make is not None

    @property
    def params(self) -> PyTree:
        return self._tree("params")

    @property
    def opt_state(self) -> PyTree:
        return self._tree("opt_state")

    @property
    def companions(self) -> PyTree:
        """Companion trees by name (`TrainStep(after_update=...)`)."""
        return self._tree("companions")

    @property
    def extras(self) -> PyTree:
        return self._tree("extras")

    def die(self) -> None:
        """Ends the state: deletes what was read from it."""
        for tree in self._trees.values():
            for leaf in jax.tree_util.tree_leaves(tree):
                if not leaf.is_deleted():
                    leaf.delete()
        self._trees, self._make = {}, None

    def _tree(self, name: str) -> PyTree:
        if self._make is None:
            raise errors.DeadStateError(
                f"the state of step {self._commit} was consumed by s.step; use the state that s.step returned: state, metrics = s.step(state, batch)"
            )
        if name not in self._trees:
            self._trees[name] = self._make(name)
        return self._trees[name]


def retained_state(retained: Retained, commit: int) -> State:
    """The state that retained memory holds at `commit`."""
    form = form_of(retained.job)
    spread, parts = form.spread, form.parts
    views = {"params": retained.params, "opt_state": retained.opt_state, "companions": retained.companions, "extras": retained.extras}

    def make(name: str) -> PyTree:
        join = None if spread is None else lambda shards: [spread.join(*pair) for pair in zip(shards, parts[name], strict=True)]
        return user_tree(views[name](commit), form.specs[name], form.trees[name], retained.jax_device, join)

    return State(make, commit)


def user_tree(
    views: Sequence[jax.Array], specs: Sequence[LeafSpec], treedef: Any, device: jax.Device, join: Callable[[list], list] | None = None
) -> PyTree:
    """Stored leaves as a tree of the user's, in memory of its own. join: makes whole leaves of this rank's shards. Cost: one copy."""
    on_host = device.platform == "cpu"  # where device_put takes NumPy's memory as it is, and keeps a view a view
    own = lambda view: jax.device_put(np.array(view, copy=True) if on_host else view, device, may_alias=on_host)
    copies = jax.block_until_ready([own(view) for view in views])  # XLA does not know that the next update writes what is being copied
    leaves = [from_storage(x, spec) for x, spec in zip(join(copies) if join else copies, specs, strict=True)]
    return jax.tree_util.tree_unflatten(treedef, leaves)


class Snapshot:
    """A `State` inside a traced function: the same fields, held rather than looked up."""

    def __init__(self, params: PyTree, opt_state: PyTree, companions: PyTree, extras: PyTree, step: Any):
        self.params, self.opt_state, self.companions, self.extras, self.step = params, opt_state, companions, extras, step


def _flatten(state: State | Snapshot) -> tuple[tuple, None]:
    return (*(getattr(state, name) for name in _FIELDS), np.int32(state.step) if isinstance(state, State) else state.step), None


def _unflatten(_: None, children: tuple) -> Any:
    return Snapshot(*children)


jax.tree_util.register_pytree_node(State, _flatten, _unflatten)
jax.tree_util.register_pytree_node(Snapshot, _flatten, _unflatten)
