"""A whole training state, frozen: what every tier keeps and gives back."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from leto_jax import errors
from leto_jax.layout import LeafSpec
from leto_jax.rmu.programs import Job

GROUPS = ("params", "opt_state", "companions", "extras")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The state at commit `step`, in memory of its own. leaves: of each group, in tree order and storage form. position: of the data, before
    the batch of the next step."""

    step: int
    leaves: dict[str, list[np.ndarray]]
    position: bytes

    def for_fill(self, job: Job) -> list[list[np.ndarray]]:
        """What `Transaction.fill` takes after the step."""
        params = self.leaves["params"]
        kinds = [
            jnp.dtype(job.layout.signatures[home.signature].lanes[home.lane].dtype) for home in (job.compute_homes[i] for i in job.copied)
        ]
        # Through XLA: it rounds as the programs do.
        copies = [np.asarray(jnp.asarray(params[i]).astype(kind)) for i, kind in zip(job.copied, kinds, strict=True)]
        return [params, self.leaves["opt_state"], self.leaves["companions"], self.leaves["extras"], copies]


@dataclasses.dataclass(frozen=True)
class Form:
    """What a whole state looks like: the leaves of each group, in tree order and storage form, and the tree that they make."""

    specs: Mapping[str, Sequence[LeafSpec]]
    trees: Mapping[str, jax.tree_util.PyTreeDef]

    def describe(self) -> list[str]:
        """Every leaf as `group path: dtype[shape]`, in order: what a checkpoint must hold to be this job's."""
        return [f"{name}{spec.describe()}" for name, group in self.specs.items() for spec in group]

    def require(self, found: Sequence[str], what: str) -> None:
        """Raises LayoutError naming the first leaf in which a checkpoint differs. found: as `describe` gives it."""
        mine = self.describe()
        for theirs, ours in zip(found, mine, strict=False):
            if theirs != ours:
                raise errors.LayoutError(
                    f"{what} holds {theirs}, this script has {ours}; resume with the model and optimizer that it was saved with"
                )
        if len(found) != len(mine):
            longer, who = (found, what) if len(found) > len(mine) else (mine, "this script")
            raise errors.LayoutError(
                f"only {who} has {longer[min(len(found), len(mine))]}; resume with the model and optimizer that it was saved with"
            )


def form_of(job: Job) -> Form:
    """The form of a job's state."""
    spec, trees = job.layout.spec, job.trees
    return Form(
        {"params": spec.params, "opt_state": job.opt_specs, "companions": job.companion_specs, "extras": spec.extras},
        {"params": trees.params, "opt_state": trees.opt_state, "companions": trees.companions, "extras": trees.extras},
    )


def copy(step: int, leaves: Callable[[str], Iterable[np.ndarray]], position: bytes) -> Frozen:
    """A copy of a state. leaves: those of a group. Nothing may be updated meanwhile. Cost: reads and writes the state once."""
    return Frozen(step, {name: [np.array(leaf, copy=True) for leaf in leaves(name)] for name in GROUPS}, position)


def digests(frozen: Frozen) -> list[str]:
    """SHA-256 of each leaf, in order. Cost: about 1 GB/s."""
    return [hashlib.sha256(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)).hexdigest() for leaf in _all(frozen)]


def _all(frozen: Frozen) -> Iterator[np.ndarray]:
    for name in GROUPS:
        yield from frozen.leaves[name]
