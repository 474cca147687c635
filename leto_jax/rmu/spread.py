"""How the leaves of a job are spread over its ranks, and how a program over all ranks is called by one of them.

Every rank drives one device and keeps one shard of every leaf: a parameter lies as the user's mesh and PartitionSpec say, its optimizer state,
companions and gradient with it; everything else is the same on all ranks. `compute`, `decide` and `init` are programs over all ranks, written
for whole leaves; XLA puts the collectives in. All other programs, those of the update first of all, are a rank's own, over shards.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from leto_jax import errors
from leto_jax.layout import LeafSpec

PyTree = Any
SAME = PartitionSpec()


@dataclasses.dataclass(frozen=True)
class Sharding:
    """What a user says about several ranks.

    mesh: over all devices of the job, one for each rank; its axes are taken as automatic ones. params: how parameters lie between steps: one PartitionSpec for all, a tree of them
    (a prefix of the parameters' tree), or f(path, leaf) -> PartitionSpec, path as 'blocks/0/kernel'. batch: how the parts that the ranks draw
    make one batch: one PartitionSpec, or a tree; by default the first axis of each leaf is cut over the first axis of the mesh. Of a leaf that is
    not cut over all axes several ranks feed the same shard: they must draw the same.
    """

    mesh: Mesh
    params: PartitionSpec | PyTree | Callable[[str, Any], PartitionSpec] = SAME
    batch: PartitionSpec | PyTree | None = None


@dataclasses.dataclass(frozen=True)
class Spread:
    """A `Sharding` for the leaves of one job. mesh: with automatic axes. params, batch: of each leaf, in tree order."""

    mesh: Mesh
    params: tuple[PartitionSpec, ...]
    batch: tuple[PartitionSpec, ...]

    @property
    def count(self) -> int:
        return self.mesh.size

    @property
    def by_rank(self) -> list[int]:
        """Where in the flattened mesh the device of each rank is."""
        return np.argsort([device.process_index for device in self.mesh.devices.flat]).tolist()

    @property
    def each(self) -> PartitionSpec:
        """One row for each device."""
        return PartitionSpec(tuple(self.mesh.axis_names))

    def alike(self) -> list[tuple[list[int], list[int]]]:
        """Leaves of the batch of which several ranks feed the same shard: (their numbers, a group for each rank); ranks of one group must draw alike."""
        found: dict[tuple[str, ...], list[int]] = {}
        for number, part in enumerate(self.batch):
            cut = tuple(name for name in self.mesh.axis_names if name in _axes(part))
            if math.prod(self.mesh.shape[name] for name in cut) < self.count:
                found.setdefault(cut, []).append(number)
        places = {device.process_index: place for place, device in np.ndenumerate(self.mesh.devices)}
        size = self.mesh.shape
        groups = []
        for cut, leaves in found.items():
            kept = [n for n, name in enumerate(self.mesh.axis_names) if name in cut]
            group = [
                int(np.ravel_multi_index([places[rank][n] for n in kept], [size[name] for name in cut])) if cut else 0
                for rank in range(self.count)
            ]
            groups.append((leaves, group))
        return groups

    def named(self, parts: PyTree) -> PyTree:
        """PartitionSpecs as shardings."""
        return jax.tree.map(lambda part: NamedSharding(self.mesh, part), parts, is_leaf=_is_part)

    def whole_shape(self, shape: Sequence[int], part: PartitionSpec) -> tuple[int, ...]:
        """The shape of a leaf of which each rank has a shard of `shape`."""
        return tuple(n * factor for n, factor in zip(shape, self._factors(len(shape), part), strict=True))

    def local(self, spec: LeafSpec, part: PartitionSpec) -> LeafSpec:
        """A rank's shard of a leaf. Raises UsageError if it cannot be cut evenly."""
        factors = self._factors(len(spec.shape), part, spec.path)
        if any(n % factor for n, factor in zip(spec.shape, factors, strict=True)):
            raise errors.UsageError(
                f"{spec.path}: expected a shape that {part} on mesh {dict(self.mesh.shape)} cuts evenly, found {list(spec.shape)}; pad it or "
                "give it another PartitionSpec"
            )
        return dataclasses.replace(spec, shape=tuple(n // factor for n, factor in zip(spec.shape, factors, strict=True)))

    def is_cut(self, part: PartitionSpec) -> bool:
        """Whether ranks keep different shards."""
        return math.prod(self._factors(len(part), part)) > 1

    def lies_at(self, shape: Sequence[int], part: PartitionSpec, rank: int) -> tuple[slice, ...]:
        """Where in a whole leaf of `shape` the shard of a rank lies."""
        found = NamedSharding(self.mesh, part).devices_indices_map(tuple(shape))
        return found[self.mesh.devices.flat[self.by_rank[rank]]]

    def join(self, shard: Any, part: PartitionSpec) -> jax.Array:
        """The whole leaf, of which this rank has `shard`. No copy."""
        own = shard if isinstance(shard, jax.Array) else jax.device_put(np.asarray(shard), jax.local_devices()[0])
        return jax.make_array_from_single_device_arrays(self.whole_shape(own.shape, part), NamedSharding(self.mesh, part), [own])

    def structs(self, shards: PyTree, parts: PyTree) -> PyTree:
        """ShapeDtypeStructs of whole leaves, with their shardings, from those of shards."""
        flat, tree = jax.tree.flatten(shards)
        whole = [
            jax.ShapeDtypeStruct(self.whole_shape(x.shape, part), x.dtype, sharding=NamedSharding(self.mesh, part))
            for x, part in zip(flat, _flat(parts), strict=True)
        ]
        return jax.tree.unflatten(tree, whole)

    def call(self, compiled: Callable, parts: PyTree) -> Callable:
        """A program over all ranks as one over this rank's shards. parts: of its arguments. All ranks call it, or it does not end."""

        def run(*arguments):
            flat, tree = jax.tree.flatten(arguments)
            joined = [self.join(shard, part) for shard, part in zip(flat, _flat(parts), strict=True)]
            return jax.tree.map(lambda x: x.addressable_data(0), compiled(*jax.tree.unflatten(tree, joined)))

        return run

    def _factors(self, ndim: int, part: PartitionSpec, path: str = "") -> list[int]:
        """Into how many pieces each axis is cut."""
        if len(part) > ndim:
            raise errors.UsageError(f"{path}: expected a PartitionSpec of at most {ndim} entries, found {part}")
        cut = [1] * ndim
        for axis, names in enumerate(part):
            for name in _names(names):
                if name not in self.mesh.shape:
                    raise errors.UsageError(
                        f"{path}: expected axes of the mesh ({', '.join(self.mesh.axis_names)}), found {name!r} in {part}"
                    )
                cut[axis] *= self.mesh.shape[name]
        return cut


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _axes(part: PartitionSpec) -> set[str]:
    return {name for entry in part for name in _names(entry)}


def _flat(parts: PyTree) -> list[PartitionSpec]:
    return jax.tree.leaves(parts, is_leaf=_is_part)


def _is_part(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def resolve(sharding: Sharding | None, params: PyTree, batch: PyTree) -> Spread | None:
    """How the leaves of `params` and `batch` (this rank's part) are spread; None where one rank without a mesh trains.

    Raises UsageError for a mesh that is not over all devices, one for each rank, or for specs that do not fit the trees.
    """
    if sharding is None:
        if jax.process_count() == 1:
            return None
        sharding = Sharding(jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,)))
    if not isinstance(sharding, Sharding) or not isinstance(sharding.mesh, Mesh):
        found = f"{type(sharding).__name__}({type(sharding.mesh).__name__})" if isinstance(sharding, Sharding) else type(sharding).__name__
        raise errors.UsageError(f"session: sharding: expected leto.Sharding(jax.sharding.Mesh, ...), found {found}")
    mesh, ranks = sharding.mesh, jax.process_count()
    owners = sorted(device.process_index for device in mesh.devices.flat)
    if owners != list(range(ranks)):
        raise errors.UsageError(
            f"session: sharding: expected a mesh with one device of each of the {ranks} ranks, found devices of ranks {owners}; "
            "a rank drives one device: use `leto run --nproc-per-node` and jax.make_mesh over jax.devices()"
        )
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    first = mesh.axis_names[0]
    cut = sharding.batch
    if cut is None:
        cut = jax.tree.map(lambda x: PartitionSpec(first) if np.ndim(x) else SAME, batch)
    return Spread(mesh, tuple(_parts(sharding.params, params, "params")), tuple(_parts(cut, batch, "batch")))


def _parts(given: Any, tree: PyTree, what: str) -> list[PartitionSpec]:
    """A PartitionSpec for each leaf of `tree`."""
    if _is_part(given):
        return [given] * len(jax.tree.leaves(tree))
    if callable(given):
        found = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            found.append(given(name, leaf))
            if not _is_part(found[-1]):
                raise errors.UsageError(f"sharding.{what}: expected a PartitionSpec for {name}, found {found[-1]!r}")
        return found
    try:
        spread = jax.tree.map(
            lambda part, below: jax.tree.map(lambda _: part, below), given, tree, is_leaf=lambda x: x is None or _is_part(x)
        )
    except ValueError as exception:
        raise errors.UsageError(
            f"sharding.{what}: expected a tree of PartitionSpecs that is a prefix of the {what}: {exception}"
        ) from exception
    parts = [part if part is not None else SAME for part in jax.tree.leaves(spread, is_leaf=lambda x: x is None or _is_part(x))]
    for part in parts:
        if not _is_part(part):
            raise errors.UsageError(
                f"sharding.{what}: expected PartitionSpecs, found {type(part).__name__} {part!r}; the mesh is given once, beside them"
            )
    return parts
