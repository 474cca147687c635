"""A whole training state, frozen: what every tier keeps and gives back."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from leto_jax import errors
from leto_jax.layout import LeafSpec
from leto_jax.rmu.programs import Job
from leto_jax.rmu.retained import Retained

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


def specs(job: Job) -> dict[str, Sequence[LeafSpec]]:
    """The leaves of each group of a job."""
    return {
        "params": job.layout.spec.params,
        "opt_state": job.opt_specs,
        "companions": job.companion_specs,
        "extras": job.layout.spec.extras,
    }


def freeze(retained: Retained, commit: int, position: bytes) -> Frozen:
    """A copy of the retained state. Nothing may be updated meanwhile. Cost: reads and writes the state once."""
    return Frozen(commit, {name: [np.array(leaf, copy=True) for leaf in retained.arrays(name, commit)] for name in GROUPS}, position)


def describe(job: Job) -> list[str]:
    """Every leaf as `group path: dtype[shape]`, in order: what a checkpoint must hold to be this job's."""
    return [f"{name}{spec.describe()}" for name, group in specs(job).items() for spec in group]


def digests(frozen: Frozen) -> list[str]:
    """SHA-256 of each leaf, in order. Cost: about 1 GB/s."""
    return [hashlib.sha256(np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)).hexdigest() for leaf in _all(frozen)]


def require_same(found: Sequence[str], job: Job, what: str) -> None:
    """Raises LayoutError naming the first leaf in which a checkpoint differs from the job."""
    mine = describe(job)
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


def trees(job: Job) -> dict[str, jax.tree_util.PyTreeDef]:
    """The tree structure of each group."""
    return {"params": job.trees.params, "opt_state": job.trees.opt_state, "companions": job.trees.companions, "extras": job.trees.extras}


def _all(frozen: Frozen) -> Iterator[np.ndarray]:
    for name in GROUPS:
        yield from frozen.leaves[name]
