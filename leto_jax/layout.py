"""Where every byte of the retained state lies: pure plans from leaf specs to lanes, chunks, rows, pages and offsets.

The idea: leaves with one update signature lie end to end in *lanes*, one lane for each thing that the update reads and writes
(parameter, first moment, ...), all cut at the same element offsets. A *chunk* is one range of every lane of a signature. A lane has
a gap of at least one chunk piece, and each update slides every piece over that gap, down for odd steps and up for even ones:

    commit t even:  |  gap  |  piece 0  |  piece 1  |  piece 2  |
    commit t odd:   |  piece 0  |  piece 1  |  piece 2  |  gap  |

so a piece never overlaps its own source, only pieces that are already committed are overwritten, and the old piece is the undo copy.
A piece is D rows of whole pages; a *protection group* is the same page of all D rows (design.md 3.2, 3.3).

No JAX here: the agent and the manager plan memory too.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from leto_jax import errors
from leto_jax.config import Protection

FORMAT_VERSION = 1
RECORD_BYTES = 64
RING_ENTRIES = 4
# Storage forms of dtypes that NumPy and XLA do not hold alike: sub-byte integers lie one to a byte.
_SUB_BYTE = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
_ITEM_BYTES = {
    "bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
    "float8_e3m4": 1, "float8_e4m3": 1, "float8_e4m3b11fnuz": 1, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One leaf of a pytree as it is stored.

    path: tree path as `jax.tree_util.keystr` prints it. shape, dtype: of the *stored* array (for a typed PRNG key: of its key data).
    key_impl: name of the PRNG implementation if the leaf is a typed key. logical_dtype: the dtype that the user sees.
    memory_kind: where the leaf lives; anything but device memory is refused.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    logical_dtype: str = ""
    key_impl: str | None = None
    memory_kind: str = "device"

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * item_bytes(self.dtype)

    def describe(self) -> str:
        kind = f"key<{self.key_impl}>" if self.key_impl else (self.logical_dtype or self.dtype)
        return f"{self.path or '(root)'}: {kind}{list(self.shape)}"


def storage_dtype(dtype: str) -> str:
    """The dtype in which a leaf of `dtype` is stored; sub-byte integers take a byte each."""
    stored = _SUB_BYTE.get(dtype, dtype)
    if stored not in _ITEM_BYTES:
        raise errors.LayoutError(f"dtype: expected one of {', '.join(sorted(_ITEM_BYTES | _SUB_BYTE))}, found {dtype!r}; cast the leaf")
    return stored


def item_bytes(dtype: str) -> int:
    return _ITEM_BYTES[storage_dtype(dtype)]


def check_leaves(leaves: Sequence[LeafSpec]) -> None:
    """Refuses what cannot be retained. Collects every bad leaf and raises once (LayoutError)."""
    bad = [
        f"  {leaf.describe()} lives in {leaf.memory_kind!r}" for leaf in leaves if leaf.memory_kind not in ("device", "unpinned_host", "")
    ]
    if bad:
        raise errors.LayoutError(
            "expected leaves in device memory, found leaves in host memory:\n"
            + "\n".join(bad)
            + "\nmove them with jax.device_put, or keep them out of the state"
        )


@dataclasses.dataclass(frozen=True)
class Packed:
    """Small leaves side by side in one region, each at a multiple of `align` bytes."""

    leaves: tuple[LeafSpec, ...]
    align: int = 64

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        offsets, end = [], 0
        for leaf in self.leaves:
            offsets.append(end)
            end += round_up(leaf.nbytes, self.align)
        return tuple(offsets)

    @property
    def nbytes(self) -> int:
        return sum(round_up(leaf.nbytes, self.align) for leaf in self.leaves)


@dataclasses.dataclass(frozen=True)
class SignatureSpec:
    """What the layout must know about one update signature.

    name: short label for people. fingerprint: of the update's text, the same in every process that runs the same update.
    lanes: (kind, dtype) of each thing the update writes, e.g. ('param', 'float32'), ('state:0', 'float32'), ('companion:ema', 'float32').
    grad_dtype: dtype of the gradient lane, None if the update reads no gradient. elementwise: lanes may be cut anywhere.
    leaves: indices into the job's parameter leaves, in order. shapes: shape of each lane's leaf per leaf; all lanes of an elementwise
    signature share the parameter's shape, a whole-leaf update may keep state of another shape (a factored moment): lane_shapes[lane][leaf].
    """

    name: str
    fingerprint: str
    lanes: tuple[tuple[str, str], ...]
    grad_dtype: str | None
    elementwise: bool
    leaves: tuple[int, ...]
    lane_shapes: tuple[tuple[tuple[int, ...], ...], ...]


@dataclasses.dataclass(frozen=True)
class Lane:
    """One lane. offset: bytes from the start of the device arena; it spans `span_bytes` = (elements + gap) * item."""

    kind: str
    dtype: str
    offset: int
    elements: int
    gap: int

    @property
    def item_bytes(self) -> int:
        return item_bytes(self.dtype)

    @property
    def span_bytes(self) -> int:
        return (self.elements + self.gap) * self.item_bytes

    def at(self, element: int, commit: int) -> int:
        """Byte address in the arena of `element` while the lane lies as commit number `commit` leaves it (high for even, low for odd)."""
        return self.offset + (element + (self.gap if commit % 2 == 0 else 0)) * self.item_bytes


@dataclasses.dataclass(frozen=True)
class Chunk:
    """One transaction: `length` elements from `start` of every lane of a signature, D rows of `length // D` elements each.

    index: the chunk's number in the job, which is also its mark's slot. leaves: positions in the signature's leaf list that the chunk
    holds whole; empty for elementwise signatures, whose chunks cut leaves anywhere.
    """

    index: int
    start: int
    length: int
    leaves: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Signature:
    """Lanes and chunks of one update signature. leaf_offsets: element at which each leaf starts, the same in all lanes."""

    spec: SignatureSpec
    lanes: tuple[Lane, ...]
    grad: Lane | None
    leaf_offsets: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class GradientPart(NamedTuple):
    """What one chunk reads of one gradient: elements [begin, end) of that of parameter leaf `leaf`."""

    leaf: int
    begin: int
    end: int
    chunk: int


class BlockForm(NamedTuple):
    """A guard block as it lies in one tier: `rows` parity rows, two uint32 checksums a page, a record. Offsets are from its beginning."""

    rows: int
    row_bytes: int
    pages: int
    align: int

    @property
    def sums_offset(self) -> int:
        return self.rows * self.row_bytes

    @property
    def sums_bytes(self) -> int:
        return 8 * self.pages

    @property
    def record_offset(self) -> int:
        return round_up(self.sums_offset + self.sums_bytes, self.align)

    @property
    def nbytes(self) -> int:
        return round_up(self.record_offset + RECORD_BYTES, self.align)


@dataclasses.dataclass(frozen=True)
class Piece:
    """A protected range: one lane's share of one chunk, or one slice of the read-only leaves.

    index: number of the piece in the job. signature, lane, chunk: its place, None for read-only pieces. nbytes: D rows of `row_bytes`.
    offset: byte address in the device arena for read-only pieces. staging, host, peer: byte addresses of its guard block in the staging
    region, in the host arena's parity region and of the first of two in the peer arena. parity_rows: H1 + H2, local_rows: H1.
    """

    index: int
    signature: int | None
    lane: int | None
    chunk: int | None
    nbytes: int
    row_bytes: int
    page_bytes: int
    offset: int
    staging: int
    host: int
    peer: int
    parity_rows: int
    local_rows: int
    align: int

    @property
    def pages(self) -> int:
        return self.nbytes // self.page_bytes

    @property
    def pages_per_row(self) -> int:
        return self.row_bytes // self.page_bytes

    @property
    def staged(self) -> BlockForm:
        """Its guard block on the device: all parity rows."""
        return BlockForm(self.parity_rows, self.row_bytes, self.pages, self.align)

    @property
    def hosted(self) -> BlockForm:
        """In the host arena: the first H1 rows."""
        return BlockForm(self.local_rows, self.row_bytes, self.pages, self.align)

    @property
    def peered(self) -> BlockForm:
        """With the peer: the other H2 rows."""
        return BlockForm(self.parity_rows - self.local_rows, self.row_bytes, self.pages, self.align)

    @property
    def drained(self) -> list[tuple[int, int, int]]:
        """(offset in the staged block, offset in the hosted one, bytes) of what goes to the host arena."""
        if self.local_rows == self.parity_rows:
            return [(0, 0, self.staged.record_offset)]
        return [(0, 0, self.hosted.sums_offset), (self.staged.sums_offset, self.hosted.sums_offset, self.hosted.sums_bytes)]


@dataclasses.dataclass(frozen=True)
class Region:
    """A named byte range of an arena."""

    arena: str
    name: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """Everything that determines a layout. params, extras, metrics, shared, values: leaves in tree order.

    shared: optimizer state that belongs to no leaf (counts, schedules). values: what decide hands to chunks.
    read_only: indices of parameter leaves that never change; constants: other leaves that never change, such as state that an optimizer
    keeps and does not renew. loose_grads: gradients that decide reads (a global norm counts them) and no chunk does.
    batch: leaves of one batch, for the ring.
    """

    params: tuple[LeafSpec, ...]
    read_only: tuple[int, ...]
    signatures: tuple[SignatureSpec, ...]
    constants: tuple[LeafSpec, ...]
    shared: tuple[LeafSpec, ...]
    values: tuple[LeafSpec, ...]
    extras: tuple[LeafSpec, ...]
    metrics: tuple[LeafSpec, ...]
    batch: tuple[LeafSpec, ...]
    loose_grads: tuple[LeafSpec, ...] = ()
    protection: Protection = dataclasses.field(default_factory=Protection)
    ring_batch_limit: int = 16 << 20
    ring_iterator_bytes: int = 1 << 16


@dataclasses.dataclass(frozen=True)
class Layout:
    """The plan of one rank's retained memory. Built by `plan`, equal in every process of a job, or the process is refused."""

    spec: JobSpec
    signatures: tuple[Signature, ...]
    pieces: tuple[Piece, ...]
    read_only: Packed
    scalars: Packed
    extras: Packed
    metrics: Packed
    loose_grads: Packed
    regions: tuple[Region, ...]
    device_bytes: int
    host_bytes: int
    peer_bytes: int

    @functools.cached_property
    def by_name(self) -> dict[str, Region]:
        return {region.name: region for region in self.regions}

    @functools.cached_property
    def chunks(self) -> tuple[tuple[int, Chunk], ...]:
        """(signature, chunk) of every chunk, by chunk index."""
        return tuple((s, chunk) for s, signature in enumerate(self.signatures) for chunk in signature.chunks)

    @functools.cached_property
    def pieces_of_chunk(self) -> tuple[tuple[Piece, ...], ...]:
        """The pieces of each chunk, lane by lane."""
        table: list[list[Piece]] = [[] for _ in self.chunks]
        for piece in self.pieces:
            if piece.chunk is not None:
                table[piece.chunk].append(piece)
        return tuple(tuple(row) for row in table)

    @functools.cached_property
    def gradient_parts(self) -> tuple[GradientPart, ...]:
        """What the chunks read of the gradients, in the order of their checksums."""
        return _gradient_parts(self.spec, [(x.spec, x.leaf_offsets, x.chunks) for x in self.signatures])

    @property
    def read_only_pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for piece in self.pieces if piece.chunk is None)

    def order(self, step: int) -> range:
        """Chunk indices in the order in which update `step` writes them: ascending for odd steps, descending for even ones."""
        return range(len(self.chunks)) if step % 2 else range(len(self.chunks) - 1, -1, -1)

    def address(self, piece: Piece, commit: int) -> int:
        """Byte address of a piece in the device arena while the lanes lie as commit number `commit` leaves them."""
        if piece.signature is None or piece.lane is None or piece.chunk is None:
            return piece.offset
        return self.signatures[piece.signature].lanes[piece.lane].at(self.chunks[piece.chunk][1].start, commit)

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(to_bytes(self)).hexdigest()

    @property
    def state_bytes(self) -> int:
        """Bytes of protected state, gaps left out."""
        return sum(piece.nbytes for piece in self.pieces)

    def table(self) -> list[tuple[str, int, str]]:
        """(what, bytes, note) rows of the memory plan, for `leto run --plan`."""
        lanes: dict[str, int] = {}
        for signature in self.signatures:
            for lane in signature.lanes:
                label = {"param": "parameters", "compute": "compute copy"}.get(lane.kind) or (
                    "companions" if lane.kind.startswith("companion") else "optimizer state"
                )
                lanes[label] = lanes.get(label, 0) + lane.elements * lane.item_bytes
        gap = sum(lane.gap * lane.item_bytes for signature in self.signatures for lane in signature.lanes)
        total, rows, size = self.spec.protection.data_rows, self.spec.protection.parity_rows, lambda name: self.by_name[name].nbytes
        return [
            *((label, nbytes, "device arena") for label, nbytes in lanes.items()),
            ("read-only leaves", size("read_only"), "device arena"),
            ("gap", gap, "device arena; one chunk per lane"),
            ("gradient buffer", size("gradients"), "device arena"),
            ("staging", size("staging"), f"device arena; parity {rows}/{total} of the state"),
            (
                "extras, scalars, metrics",
                sum(size(f"{name}{i}") for name in ("extras", "scalars", "metrics") for i in (0, 1)),
                "device arena; two copies",
            ),
            ("log", size("log0") + size("log1"), "device arena; two copies"),
            ("parity", size("parity"), "host arena"),
            *([("parity with the peer", self.peer_bytes, "host memory of the peer; two versions")] if self.peer_bytes else []),
            ("ring", size("ring"), "host arena"),
        ]


def _gradient_parts(spec: JobSpec, signatures: Sequence[tuple[SignatureSpec, Sequence[int], Sequence[Chunk]]]) -> tuple[GradientPart, ...]:
    found = []
    for sig, offsets, chunks in signatures:
        for leaf, start in zip(sig.leaves, offsets, strict=True) if sig.grad_dtype is not None else ():
            for chunk in chunks:
                begin, end = max(chunk.start - start, 0), min(chunk.start + chunk.length - start, spec.params[leaf].size)
                if begin < end:
                    found.append(GradientPart(leaf, begin, end, chunk.index))
    return tuple(found)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def plan(spec: JobSpec) -> Layout:
    """Lays a job out. Pure: the same spec gives the same layout in every process. Raises LayoutError for leaves that cannot be retained."""
    check_leaves((*spec.params, *spec.extras))
    protection = spec.protection
    page, rows, align = protection.page_bytes, protection.data_rows, protection.align_bytes
    device, host = _Regions("device", page), _Regions("host", page)

    signatures: list[tuple[SignatureSpec, tuple[int, ...], tuple[Chunk, ...], int, int]] = []
    count = 0
    for sig in spec.signatures:
        offsets, chunks, elements = _cut(sig, protection, count)
        count += len(chunks)
        signatures.append((sig, offsets, chunks, elements, max(chunk.length for chunk in chunks)))

    for copy in (0, 1):
        device.add(f"log{copy}", align * (6 + 2 * count))
    parts = _gradient_parts(spec, [(sig, offsets, chunks) for sig, offsets, chunks, _, _ in signatures])
    scalars = Packed((*spec.shared, *spec.values, *_VERDICT), align)
    extras, metrics, read_only = (
        Packed(spec.extras, align),
        Packed(spec.metrics, align),
        Packed((*(spec.params[i] for i in spec.read_only), *spec.constants), align),
    )
    for name, packed in [("scalars", scalars), ("extras", extras), ("metrics", metrics)]:
        for copy in (0, 1):
            device.add(f"{name}{copy}", packed.nbytes)

    # Gradients lie like the lanes, without a gap: written once by compute, read in place by the chunks.
    grads: list[Lane | None] = []
    device.add("gradient_header", RECORD_BYTES)
    device.add("gradient_sums", 8 * len(parts))
    start = device.end
    for sig, _, _, elements, _ in signatures:
        if sig.grad_dtype is None:
            grads.append(None)
        else:
            nbytes = elements * item_bytes(sig.grad_dtype)
            grads.append(Lane("grad", sig.grad_dtype, device.take(nbytes), elements, 0))
    loose_grads = Packed(spec.loose_grads, align)
    device.add("loose_gradients", loose_grads.nbytes)
    device.name("gradients", start)

    # Read-only leaves are one long piece list, each of at most a chunk, encoded once.
    ro_bytes = round_up(read_only.nbytes, rows * page)
    ro_start = device.add("read_only", ro_bytes)

    lanes_start = device.end
    planned: list[Signature] = []
    for (sig, offsets, chunks, elements, gap), grad in zip(signatures, grads, strict=True):
        lanes = tuple(Lane(kind, dtype, device.take((elements + gap) * item_bytes(dtype)), elements, gap) for kind, dtype in sig.lanes)
        planned.append(Signature(sig, lanes, grad, offsets, chunks))
    device.name("lanes", lanes_start)

    pieces: list[Piece] = []
    staging = parity = peer = 0

    def piece(signature, lane, chunk, nbytes, offset) -> None:
        nonlocal staging, parity, peer
        new = Piece(
            len(pieces),
            signature,
            lane,
            chunk,
            nbytes,
            nbytes // rows,
            page,
            offset,
            staging,
            parity,
            peer,
            protection.parity_rows,
            protection.local_parity,
            align,
        )
        pieces.append(new)
        staging += new.staged.nbytes
        parity += new.hosted.nbytes
        peer += 2 * new.peered.nbytes if protection.peer_parity else 0

    for s, signature in enumerate(planned):
        for chunk in signature.chunks:
            for number, lane in enumerate(signature.lanes):
                piece(s, number, chunk.index, chunk.length * lane.item_bytes, -1)
    # The parity of read-only leaves is made at the fill and drained like any other, so it has a place in staging too.
    step = max(rows * page, protection.chunk_bytes // (rows * page) * rows * page)
    for begin in range(0, ro_bytes, step):
        piece(None, None, None, min(step, ro_bytes - begin), ro_start + begin)

    device.add("staging", staging)
    host.add("parity", parity)
    batch = sum(round_up(leaf.nbytes, 64) for leaf in spec.batch)
    host.add("ring", RING_ENTRIES * ring_entry_bytes(spec, batch))
    return Layout(
        spec, tuple(planned), tuple(pieces), read_only, scalars, extras, metrics, loose_grads, (*device.regions, *host.regions), round_up(device.end, page), round_up(host.end, page), round_up(peer, page)
    )  # fmt: skip


# What decide itself leaves beside the optimizer's scalars: loss, sum of squared gradients, and whether the step is applied or skipped.
_VERDICT = (LeafSpec("['loss']", (), "float32"), LeafSpec("['grad_sumsq']", (), "float32"), LeafSpec("['apply']", (), "int32"))


def ring_entry_bytes(spec: JobSpec, batch_bytes: int) -> int:
    """One ring entry: a 64-byte record, the iterator's state, and the batch itself when it is small enough to keep."""
    kept = batch_bytes if batch_bytes <= spec.ring_batch_limit else 0
    return round_up(RECORD_BYTES + spec.ring_iterator_bytes + kept, spec.protection.page_bytes)


class _Regions:
    """Hands out page-aligned ranges of one arena, in order."""

    def __init__(self, arena: str, page_bytes: int):
        self.arena, self.page_bytes, self.end = arena, page_bytes, 0
        self.regions: list[Region] = []

    def take(self, nbytes: int) -> int:
        start = self.end
        self.end = start + round_up(nbytes, self.page_bytes)
        return start

    def add(self, name: str, nbytes: int) -> int:
        start = self.take(nbytes)
        self.regions.append(Region(self.arena, name, start, nbytes))
        return start

    def name(self, name: str, start: int) -> None:
        self.regions.append(Region(self.arena, name, start, self.end - start))


def _cut(sig: SignatureSpec, protection: Protection, first: int) -> tuple[tuple[int, ...], tuple[Chunk, ...], int]:
    """Leaf offsets, chunks and length in elements of one signature's lanes.

    A row is a whole number of pages in the lane with the smallest items, hence in every lane.
    """
    items = [item_bytes(dtype) for _, dtype in sig.lanes]
    row_unit = protection.page_bytes // min(items)
    unit = row_unit * protection.data_rows
    target = max(unit, protection.chunk_bytes // max(items) // unit * unit)
    # Offsets are common to all lanes, so a leaf takes the room of its largest lane.
    sizes = [
        round_up(max(math.prod(shapes[n]) for shapes in sig.lane_shapes), protection.align_elements) for n in range(len(sig.leaves))
    ]  # fmt: skip
    if sig.elementwise:
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += size
        number = max(1, math.ceil(end / target))
        length = round_up(max(1, math.ceil(end / number)), unit)
        number = max(1, math.ceil(end / length))
        chunks = tuple(Chunk(first + k, k * length, length) for k in range(number))
        return tuple(offsets), chunks, number * length
    offsets, end = [], 0
    groups: list[tuple[int, list[int]]] = []
    for n, size in enumerate(sizes):
        if groups and end + size - groups[-1][0] <= target:
            groups[-1][1].append(n)
        else:
            end = groups[-1][0] + round_up(max(1, end - groups[-1][0]), unit) if groups else 0  # a chunk of empty leaves has a length too
            groups.append((end, [n]))
        offsets.append(end)
        end += size
    bounds = [start for start, _ in groups] + [groups[-1][0] + round_up(max(1, end - groups[-1][0]), unit)]
    chunks = tuple(Chunk(first + k, start, bounds[k + 1] - start, tuple(members)) for k, (start, members) in enumerate(groups))
    return tuple(offsets), chunks, bounds[-1]


def to_bytes(layout: Layout) -> bytes:
    """The layout's spec as canonical JSON; `from_bytes` plans it again, so the two can never disagree."""
    return json.dumps(
        {"magic": "leto-layout", "version": FORMAT_VERSION, "spec": dataclasses.asdict(layout.spec)}, sort_keys=True, separators=(",", ":")
    ).encode()


def from_bytes(data: bytes) -> Layout:
    """The layout that `to_bytes` wrote. Raises RecordError for anything else."""
    try:
        document = json.loads(data)
        if (found := (document["magic"], document["version"])) != ("leto-layout", FORMAT_VERSION):
            raise errors.RecordError(f"layout: expected magic 'leto-layout' version {FORMAT_VERSION}, found {found}")
        raw = document["spec"]
        leaves = lambda items: tuple(LeafSpec(**{**item, "shape": tuple(item["shape"])}) for item in items)
        return plan(
            JobSpec(
                **{
                    name: leaves(raw[name])
                    for name in ("params", "constants", "shared", "values", "extras", "metrics", "batch", "loose_grads")
                },
                read_only=tuple(raw["read_only"]),
                signatures=tuple(
                    SignatureSpec(
                        sig["name"],
                        sig["fingerprint"],
                        tuple((kind, dtype) for kind, dtype in sig["lanes"]),
                        sig["grad_dtype"],
                        sig["elementwise"],
                        tuple(sig["leaves"]),
                        tuple(tuple(tuple(shape) for shape in lane) for lane in sig["lane_shapes"]),
                    )
                    for sig in raw["signatures"]
                ),
                protection=Protection(**raw["protection"]),
                ring_batch_limit=raw["ring_batch_limit"],
                ring_iterator_bytes=raw["ring_iterator_bytes"],
            )
        )
    except errors.RecordError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as exception:
        raise errors.RecordError(
            f"layout: expected the bytes that layout.to_bytes wrote, found {data[:40]!r}... ({exception})"
        ) from exception


def require_equal(retained: Layout, mine: Layout) -> None:
    """Raises LayoutError naming the first leaf or setting in which this process differs from the retained state."""
    if retained.fingerprint == mine.fingerprint:
        return
    advice = "start the script with the model, optimizer and settings of the job, or give the new job another --job name"
    for kind in ("params", "constants", "shared", "values", "extras", "metrics", "batch", "loose_grads"):
        theirs, ours = getattr(retained.spec, kind), getattr(mine.spec, kind)
        for old, new in zip(theirs, ours, strict=False):
            if old != new:
                raise errors.LayoutError(f"{kind}: the job holds {old.describe()}, this process brings {new.describe()}; {advice}")
        if len(theirs) != len(ours):
            longer, who = (theirs, "the job") if len(theirs) > len(ours) else (ours, "this process")
            raise errors.LayoutError(f"{kind}: only {who} has {longer[min(len(theirs), len(ours))].describe()}; {advice}")
    if unequal := set(retained.spec.read_only) ^ set(mine.spec.read_only):
        who = "the job" if min(unequal) in retained.spec.read_only else "this process"
        raise errors.LayoutError(f"params: {mine.spec.params[min(unequal)].describe()} is frozen in {who} only; {advice}")
    label = lambda sig: f"{sig.name} {sig.fingerprint[:12]} {sig.lanes}"
    for old, new in zip(retained.spec.signatures, mine.spec.signatures, strict=False):
        if old != new:
            path = mine.spec.params[min(set(old.leaves) ^ set(new.leaves), default=old.leaves[0])].path
            raise errors.LayoutError(
                f"optimizer: the update of {path} differs: the job has {label(old)}, this process {label(new)}; {advice}"
            )
    for who, longer, shorter in [("the job", retained, mine), ("this process", mine, retained)]:
        if more := longer.spec.signatures[len(shorter.spec.signatures) :]:
            raise errors.LayoutError(
                f"optimizer: only {who} has the update {more[0].name!r} of {mine.spec.params[more[0].leaves[0]].path}; {advice}"
            )
    for name in ("protection", "ring_batch_limit", "ring_iterator_bytes"):
        setting, found = getattr(retained.spec, name), getattr(mine.spec, name)
        if setting != found:
            raise errors.LayoutError(f"settings: {name}: the job was laid out with {setting}, this process with {found}; {advice}")
    raise errors.LayoutError(f"the job was laid out by another version of leto_jax; {advice}")
