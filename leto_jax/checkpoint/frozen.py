"""A whole training state, frozen: what every tier keeps and gives back."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from leto_jax import errors
from leto_jax.layout import LeafSpec
from leto_jax.rmu.programs import Job
from leto_jax.rmu.spread import SAME, Spread

GROUPS = ("params", "opt_state", "companions", "extras")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """The state at commit `step`, in memory of its own: the whole, or one rank's shards. leaves: of each group, in tree order and storage form.
    positions: of the data of each rank whose state it is, before the batch of the next step."""

    step: int
    leaves: dict[str, list[np.ndarray]]
    positions: tuple[bytes, ...]

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
    """What a state looks like, whole or one rank's shards: the leaves of each group, in tree order and storage form, and the tree that they make.

    spread, parts: how shards lie over the ranks; None and nothing for a whole state.
    """

    specs: Mapping[str, Sequence[LeafSpec]]
    trees: Mapping[str, jax.tree_util.PyTreeDef]
    spread: Spread | None = None
    parts: Mapping[str, Sequence[PartitionSpec]] = dataclasses.field(default_factory=dict)

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

    # Shards and the whole --------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def whole(self) -> Form:
        """The form of the whole state."""
        spread = self.spread
        if spread is None:
            return self
        cut = {name: zip(group, self.parts[name], strict=True) for name, group in self.specs.items()}
        specs = {
            name: [dataclasses.replace(spec, shape=spread.whole_shape(spec.shape, part)) for spec, part in pairs]
            for name, pairs in cut.items()
        }
        return Form(specs, self.trees)

    def join(self, shards: Sequence[Frozen]) -> Frozen:
        """The whole state, from the shards of every rank in rank order. Cost: one copy of what is cut."""
        spread, leaves = self.spread, {}
        if spread is None:
            return shards[0]
        for name, specs in self.whole.specs.items():
            leaves[name] = [shards[0].leaves[name][n] for n in range(len(specs))]
            for n, (spec, part) in enumerate(zip(specs, self.parts[name], strict=True)):
                if spread.is_cut(part):
                    leaves[name][n] = np.empty(spec.shape, leaves[name][n].dtype)
                    for rank, shard in enumerate(shards):
                        leaves[name][n][spread.lies_at(spec.shape, part, rank)] = shard.leaves[name][n]
        return Frozen(shards[0].step, leaves, tuple(position for shard in shards for position in shard.positions))

    def cut(self, whole: Frozen, rank: int) -> Frozen:
        """The shards of a rank. Raises UsageError where the data of another number of ranks cannot go on."""
        spread, found = self.spread, whole.positions
        count = 1 if spread is None else spread.count
        if len(found) != count and len(set(found)) > 1:
            raise errors.UsageError(
                f"checkpoint {whole.step}: expected the data positions of {count} rank{'s' * (count > 1)}, found those of {len(found)}, which "
                f"differ: a dataset with an iterator goes on with --nproc-per-node {len(found)} only, f(step) with any number of ranks"
            )
        position = found[rank if len(found) == count else 0]
        if spread is None:
            return dataclasses.replace(whole, positions=(position,))
        leaves = {
            name: [
                np.ascontiguousarray(leaf[spread.lies_at(leaf.shape, part, rank)])
                for leaf, part in zip(group, self.parts[name], strict=True)
            ]
            for name, group in whole.leaves.items()
        }
        return Frozen(whole.step, leaves, (position,))


def form_of(job: Job) -> Form:
    """The form of this rank's shards of a job's state."""
    spec, trees, parts = job.layout.spec, job.trees, job.parts
    return Form(
        {"params": spec.params, "opt_state": job.opt_specs, "companions": job.companion_specs, "extras": spec.extras},
        {"params": trees.params, "opt_state": trees.opt_state, "companions": trees.companions, "extras": trees.extras},
        job.spread,
        {"params": parts.params, "opt_state": parts.opt, "companions": parts.companions, "extras": [SAME] * len(spec.extras)},
    )


def copy(step: int, leaves: Callable[[str], Iterable[np.ndarray]], position: bytes) -> Frozen:
    """A copy of a state. leaves: those of a group. Nothing may be updated meanwhile. Cost: reads and writes the state once."""
    return Frozen(step, {name: [np.array(leaf, copy=True) for leaf in leaves(name)] for name in GROUPS}, (position,))


def digests(frozen: Frozen) -> list[str]:
    """SHA-256 of each leaf, in order. Cost: about 1 GB/s."""
    return [hashlib.sha256(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)).hexdigest() for leaf in _all(frozen)]


def _all(frozen: Frozen) -> Iterator[np.ndarray]:
    for name in GROUPS:
        yield from frozen.leaves[name]
