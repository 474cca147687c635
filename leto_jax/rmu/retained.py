"""Looking at one rank's retained memory: leaves, pieces, scalars and logs as arrays and records. Reads only."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from leto_jax.arena.memory import Arena, HostArena
from leto_jax.arena.metadata import HostMetadata, touches
from leto_jax.arena.views import view
from leto_jax.layout import Chunk, LeafSpec, Packed, Piece
from leto_jax.records import SUMS_WORD, Kind, Record
from leto_jax.rmp import checksum
from leto_jax.rmp.groups import Guard
from leto_jax.rmp.peer import PeerTier
from leto_jax.rmu.log import Log
from leto_jax.rmu.programs import Home, Job
from leto_jax.rmu.recovery import COPIED, Life, Picture


class Retained:
    """One rank's arenas seen through its layout. Views are made once per address set (`commit` parity) and kept.

    Owns nothing: the arenas belong to whoever mapped them.
    """

    def __init__(self, job: Job, device: Arena, host: Arena, metadata: HostMetadata, jax_device: jax.Device, peer: HostArena | None = None):
        self.job, self.layout, self.device, self.host, self.metadata, self.jax_device = job, job.layout, device, host, metadata, jax_device
        self.log = Log(device, job.layout)
        self.guard = Guard(device, host, job.layout, None if peer is None else PeerTier(peer, job.layout))
        self._cache: dict[tuple, list[jax.Array]] = {}

    # Leaves -----------------------------------------------------------------------------------------------------------------------

    def place(self, home: Home, commit: int) -> int:
        """Byte address in the device arena of a leaf, while the lanes lie as `commit` leaves them."""
        if home.kind == "lane":
            signature = self.layout.signatures[home.signature]
            return signature.lanes[home.lane].at(signature.leaf_offsets[home.leaf], commit)
        if home.kind == "shared":
            return self.region(f"scalars{commit % 2}") + self.layout.scalars.offsets[home.index]
        return self.region("read_only") + self.layout.read_only.offsets[home.index]

    def region(self, name: str) -> int:
        return self.layout.by_name[name].offset

    def seen_params(self, commit: int) -> list[jax.Array]:
        """Parameters as compute reads them: the compute copy where there is one."""
        specs = [self._seen(home, spec) for home, spec in zip(self.job.compute_homes, self.layout.spec.params, strict=True)]
        return self._leaves("seen", self.job.compute_homes, specs, commit)

    def params(self, commit: int) -> list[jax.Array]:
        return self._leaves("params", self.job.param_homes, self.layout.spec.params, commit)

    def opt_state(self, commit: int) -> list[jax.Array]:
        return self._leaves("opt", self.job.opt_homes, self.job.opt_specs, commit)

    def companions(self, commit: int) -> list[jax.Array]:
        return self._leaves("companions", self.job.companion_homes, self.job.companion_specs, commit)

    def arrays(self, group: str, commit: int) -> Iterator[np.ndarray]:
        """The leaves of 'params', 'opt_state', 'companions' or 'extras' on the host, one after the other, in storage form. Read-only; on the CPU
        they are the memory itself. Never through the views that are kept: JAX remembers what it has once copied of one to the host."""
        job, spec = self.job, self.layout.spec
        if group == "extras":
            base = self.region(f"extras{commit % 2}")
            places = [base + offset for offset in self.layout.extras.offsets]
            specs: Sequence[LeafSpec] = spec.extras
        else:
            homes, specs = {
                "params": (job.param_homes, spec.params),
                "opt_state": (job.opt_homes, job.opt_specs),
                "companions": (job.companion_homes, job.companion_specs),
            }[group]
            places = [self.place(home, commit) for home in homes]
        for place, leaf in zip(places, specs, strict=True):
            yield self.device.array(place, leaf.shape, jnp.dtype(leaf.dtype))

    def decided_from(self, commit: int) -> list[list[jax.Array]]:
        """The parameters, optimizer state and companions that decide reads: few, since what depends on one leaf is left to the chunks."""
        job, spec = self.job, self.layout.spec
        groups = [(job.param_homes, spec.params), (job.opt_homes, job.opt_specs), (job.companion_homes, job.companion_specs)]
        return [
            self._leaves(f"decide {n}", [homes[i] for i in needed], [specs[i] for i in needed], commit)
            for n, ((homes, specs), needed) in enumerate(zip(groups, job.decide_reads, strict=True))
        ]

    def extras(self, commit: int) -> list[jax.Array]:
        return self._packed("extras", self.layout.extras, commit)

    def metrics(self, commit: int) -> list[jax.Array]:
        return self._packed("metrics", self.layout.metrics, commit)

    def values(self, commit: int) -> list[jax.Array]:
        """What decide left for the chunks of update `commit`."""
        first = len(self.layout.spec.shared)
        return self._packed("scalars", self.layout.scalars, commit)[first : first + len(self.layout.spec.values)]

    def verdict(self, commit: int) -> jax.Array:
        return self._packed("scalars", self.layout.scalars, commit)[-1]

    @functools.cached_property
    def grads(self) -> list[jax.Array]:
        """Gradients of the leaves that are differentiated, in leaf shape."""
        dtypes = [self.job.sliced.leaves[i].grad_dtype for i in self.job.differentiated]
        shapes = [self.layout.spec.params[i].shape for i in self.job.differentiated]
        return [
            self._view(self.grad_place(home), shape, dtype) for home, shape, dtype in zip(self.job.grad_homes, shapes, dtypes, strict=True)
        ]

    def grad_place(self, home: Home) -> int:
        """Byte address of the gradient of the parameter leaf that lives at `home`."""
        if home.kind == "loose_grad":
            return self.region("loose_gradients") + self.layout.loose_grads.offsets[home.index]
        signature = self.layout.signatures[home.signature]
        assert signature.grad is not None
        return signature.grad.at(signature.leaf_offsets[home.leaf], 1)

    # Pieces -----------------------------------------------------------------------------------------------------------------------

    def words(self, piece: Piece, commit: int) -> jax.Array:
        """A piece as uint32[D, words of a row], where `commit` leaves it."""
        return self._cached(
            ("words", piece.index, commit % 2),
            lambda: [self._view(self.layout.address(piece, commit), (piece.nbytes // piece.row_bytes, piece.row_bytes // 4), "uint32")],
        )[0]

    def pieces(self, chunk: Chunk, commit: int) -> list[jax.Array]:
        """The pieces of a chunk, flat, one per lane, where `commit` leaves them."""
        signature = self.layout.signatures[self.layout.chunks[chunk.index][0]]
        return self._cached(
            ("pieces", chunk.index, commit % 2),
            lambda: [self._view(lane.at(chunk.start, commit), (chunk.length,), lane.dtype) for lane in signature.lanes],
        )

    def grad_piece(self, chunk: Chunk) -> jax.Array | None:
        grad = self.layout.signatures[self.layout.chunks[chunk.index][0]].grad
        if grad is None:
            return None
        return self._cached(("grad", chunk.index), lambda: [self._view(grad.at(chunk.start, 1), (chunk.length,), grad.dtype)])[0]

    # Records ----------------------------------------------------------------------------------------------------------------------

    def header(self) -> Record | None:
        """The gradient region's record, None while it is torn."""
        return self.device.record(self.region("gradient_header"), Kind.GRADIENTS)

    def digest(self, step: int, names: Sequence[str] = COPIED) -> tuple[int, ...]:
        """CRC-32 of the scalars, extras and metrics that belong to `step`, or of those `names`: what an intent refers to."""
        return tuple(zlib.crc32(self._copied(name, step)) for name in names)

    def noted_sums(self) -> np.ndarray | None:
        """The checksums of the gradients that compute noted beside them, uint32[gradient parts, 2]; None if they are not those of the header."""
        region, header = self.layout.by_name["gradient_sums"], self.header()
        found = np.array(self.device.array(region.offset, (len(self.layout.gradient_parts), 2), np.dtype(np.uint32)))
        return found if header is not None and zlib.crc32(found) == header.body[SUMS_WORD] else None

    def copied(self, name: str, step: int) -> bytes:
        """The scalars, extras or metrics of `step`, as they lie."""
        return self._copied(name, step).tobytes()

    def _copied(self, name: str, step: int) -> np.ndarray:
        region = self.layout.by_name[f"{name}{step % 2}"]
        return self.device.view(region.offset, region.nbytes)

    def life(self) -> Life:
        record = self.metadata.latest(Kind.LIFE)
        return Life(record.body[0]) if record else Life.EMPTY

    def picture(self, gradient_sums: Callable[[], np.ndarray]) -> Picture:
        """Everything that the decision after a failure depends on. gradient_sums: `Transaction.gradient_sums`, asked if the gradients may be
        needed."""
        contents, header, lost = self.log.read(), self.header(), self.metadata.lost()
        stored = (header.step, header.epoch) if header is not None and header.step else None
        commit = contents.commit
        steps = () if commit is None else (commit, commit + 1)
        hurt: set[int] = set()
        if commit is not None and stored is not None and stored[0] == commit + 1:
            parts, noted = self.layout.gradient_parts, self.noted_sums()
            bad = range(len(parts)) if noted is None else checksum.locate(noted, gradient_sums())
            hurt = {parts[n].chunk for n in bad}
        log_lost = all(touches(lost, "device", self.region(name), self.layout.by_name[name].nbytes) for name in ("log0", "log1"))
        return Picture(self.life(), contents, stored, {step: self.digest(step) for step in steps}, frozenset(hurt), log_lost)

    # ------------------------------------------------------------------------------------------------------------------------------

    def _seen(self, home: Home, spec: LeafSpec) -> LeafSpec:
        if home.kind != "lane":
            return spec
        lane = self.layout.signatures[home.signature].lanes[home.lane]
        return LeafSpec(spec.path, spec.shape, lane.dtype, lane.dtype)

    def _leaves(self, name: str, homes: Sequence[Home], specs: Sequence[LeafSpec], commit: int) -> list[jax.Array]:
        return self._cached(
            (name, commit % 2),
            lambda: [self._view(self.place(home, commit), spec.shape, spec.dtype) for home, spec in zip(homes, specs, strict=True)],
        )

    def _packed(self, name: str, packed: Packed, commit: int) -> list[jax.Array]:
        base = self.region(f"{name}{commit % 2}")
        return self._cached(
            (name, commit % 2),
            lambda: [self._view(base + offset, leaf.shape, leaf.dtype) for offset, leaf in zip(packed.offsets, packed.leaves, strict=True)],
        )

    def _view(self, offset: int, shape: tuple[int, ...], dtype) -> jax.Array:
        return view(self.device, offset, shape, jnp.dtype(dtype), self.jax_device)

    def _cached(self, key: tuple, make) -> list[jax.Array]:
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]
