"""The programs of `rmu.programs` with their outputs in places that are donated to them, and the ones that only a device needs.

Each takes its places last, in the order of its first outputs. JAX pairs donated arguments with outputs of their shape and dtype in order, so
equal shapes keep their order too; `rmu.device` looks at the addresses.

| program   | arguments                                     | outputs, of which the first have places                        |
| init      | key                                           | leaves with a place; shared leaves, extras                     |
| compute   | as before                                     | gradients; extras, metrics, loss, sum of squares               |
| update.N  | as before, and the token                      | new pieces, parity rows, page checksums                        |
| mark.N    | records, checksums                            | the mark in both logs, the records of the staged blocks        |
| void      | records, token                                | the records of all staged blocks                               |
| records   | records                                       | those for each mark, without places                            |
| encode.W  | a piece as words                              | parity rows, page checksums                                    |
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from leto_jax import records
from leto_jax.layout import LeafSpec
from leto_jax.pallas import dispatch
from leto_jax.rmp import codec, matrix
from leto_jax.rmu.log import COPIES
from leto_jax.rmu.programs import Home, Job, Program, checksum_name, elementwise_update, encode_name, gradient_forms, structs, update_name

Array = jax.Array
SEAL_PLACES = (6, 7)  # of the checksum of a block in its record: the second and third word of the body
RECORD = jax.ShapeDtypeStruct((16,), jnp.uint32)


def init_homes(job: Job) -> list[tuple[Home, LeafSpec]]:
    """The leaves of the first state that have a place of their own, as `init` writes them: home, and shape and dtype there."""
    return [item for group in _groups(job) for item in group if _placed(*item)]


def init_leaves(job: Job, placed: Sequence[Array], loose: Sequence[Sequence[Array]]) -> list[list[Array]]:
    """What `Transaction.fill` takes, from what `init` gives: params, optimizer state, companions, extras, compute copies."""
    here, elsewhere = iter(placed), iter(loose[0])
    params, opt, companions, copies = ([next(here) if _placed(*item) else next(elsewhere) for item in group] for group in _groups(job))
    return [params, opt, companions, list(loose[1]), copies]


def gradients(job: Job) -> list[tuple[Home, jax.ShapeDtypeStruct]]:
    """Homes and forms of the gradients, but for empty ones, which have no place."""
    return [(home, form) for home, form in zip(job.grad_homes, gradient_forms(job), strict=True) if form.size]


def mark_name(update: str) -> str:
    """The mark that follows a chunk's update."""
    return update.replace("update", "mark", 1)


def programs(job: Job, device: jax.Device) -> dict[str, Program]:
    """All that replace or join those of `job` where `device` writes to retained memory itself."""
    found = [_init(job), _compute(job), _void(job), _records(job)]
    for index in range(len(job.layout.chunks)):
        name = update_name(job.layout, index)
        if all(name != program.name for program in found):
            found += [_update(job, name, index, device), _mark(job, name, index)]
    for words in sorted({piece.row_bytes // 4 for piece in job.layout.pieces}):
        found += [_encode(job, words, device), _checksum(job, words, device)]
    return {program.name: program for program in found}


def seal(blank: Array, checksums: Array) -> Array:
    """`rmp.groups.seal_record` on the device. blank: uint32[n, 16], of blocks whose checksums are all zero; checksums: uint32[n, pages, 2]."""
    sums = codec.page_checksums(checksums.reshape(len(checksums), -1))
    deltas = jnp.asarray(records.crc_deltas(SEAL_PLACES), jnp.uint32)
    bits = ((sums[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1).reshape(len(sums), -1)
    crc = blank[:, 15] ^ jax.lax.reduce(jnp.where(bits == 1, deltas, 0), jnp.uint32(0), jax.lax.bitwise_xor, (1,))
    first, after = SEAL_PLACES[0], SEAL_PLACES[-1] + 1
    return jnp.concatenate([blank[:, :first], sums, blank[:, after:15], crc[:, None]], axis=1)


def lane_words(lane: Array, rows: int) -> Array:
    """The bytes of a flat lane as uint32[rows, words]. XLA may copy lanes whose items are not words."""
    if lane.dtype == jnp.bool_:
        lane = lane.astype(jnp.uint8)
    if jnp.issubdtype(lane.dtype, jnp.complexfloating):
        lane = jnp.stack([lane.real, lane.imag], axis=-1).reshape(-1)
    per_word = 4 // lane.dtype.itemsize
    by_word = lane.reshape(rows, -1, per_word) if per_word > 1 else lane
    return jax.lax.bitcast_convert_type(by_word, jnp.uint32).reshape(rows, -1)


def _groups(job: Job) -> list[list[tuple[Home, LeafSpec]]]:
    spec, copies = job.layout.spec, [job.compute_homes[i] for i in job.copied]
    pairs = [
        zip(job.param_homes, spec.params, strict=True),
        zip(job.opt_homes, job.opt_specs, strict=True),
        zip(job.companion_homes, job.companion_specs, strict=True),
        zip(copies, [spec.params[i] for i in job.copied], strict=True),
    ]
    return [[(home, _as_stored(job, home, leaf)) for home, leaf in group] for group in pairs]


def _as_stored(job: Job, home: Home, leaf: LeafSpec) -> LeafSpec:
    if home.kind != "lane":
        return leaf
    dtype = job.layout.signatures[home.signature].lanes[home.lane].dtype
    return LeafSpec(leaf.path, leaf.shape, dtype, dtype)


def _placed(home: Home, leaf: LeafSpec) -> bool:
    return home.kind != "shared" and leaf.size > 0


def _init(job: Job) -> Program:
    whole = job.programs["init"]
    *cuts, extras_part, copied = whole.out_parts
    flat = [(*pair, part) for group, cut in zip(_groups(job), [*cuts, copied], strict=True) for pair, part in zip(group, cut, strict=True)]

    def run(key, places):
        params, opt, companions, extras, copies = whole.function(key)
        leaves = [*params, *opt, *companions, *copies]
        placed = [leaf for leaf, (home, spec, _) in zip(leaves, flat, strict=True) if _placed(home, spec)]
        elsewhere = [leaf for leaf, (home, spec, _) in zip(leaves, flat, strict=True) if not _placed(home, spec)]
        return placed, (elsewhere, extras)

    here = [part for home, spec, part in flat if _placed(home, spec)]
    elsewhere = [part for home, spec, part in flat if not _placed(home, spec)]
    return dataclasses.replace(
        whole,
        function=run,
        arguments=(*whole.arguments, structs([leaf for _, leaf in init_homes(job)])),
        places=len(whole.arguments),
        parts=whole.parts and (*whole.parts, here),
        out_parts=(here, (elsewhere, extras_part)),
    )


def _compute(job: Job) -> Program:
    whole, forms = job.programs["compute"], gradient_forms(job)
    here = [part for part, form in zip(whole.out_parts[0], forms, strict=True) if form.size]
    return dataclasses.replace(
        whole,
        function=lambda *arguments: whole.function(*arguments[:-1]),
        arguments=(*whole.arguments, [form for _, form in gradients(job)]),
        places=len(whole.arguments),
        parts=whole.parts and (*whole.parts, here),
    )


def _staging(job: Job, index: int) -> tuple[list, list]:
    """Forms of parity rows and page checksums of the pieces of a chunk."""
    pieces = job.layout.pieces_of_chunk[index]
    rows = [jax.ShapeDtypeStruct((piece.parity_rows, piece.row_bytes // 4), jnp.uint32) for piece in pieces]
    return rows, [jax.ShapeDtypeStruct((piece.pages, 2), jnp.uint32) for piece in pieces]


def _update(job: Job, name: str, index: int, device: jax.Device) -> Program:
    """One pass over the chunk where the update is elementwise and the device has the kernel; else XLA's update, and encode behind it."""
    plan, whole = job.layout, job.programs[name]
    number, _ = plan.chunks[index]
    protection = plan.spec.protection
    rows, sums = _staging(job, index)
    values, verdict, grad, old = whole.arguments
    factors = _factors(protection.data_rows, protection.parity_rows)
    settings: dict[str, Any] = {"data_rows": protection.data_rows, "coefficients": factors, "page_bytes": protection.page_bytes}

    def one(scalars, grad, lanes):
        """The update as the kernel wants it: of any shape, scalars in one tuple."""
        return elementwise_update(job, number, scalars[:-1], scalars[-1], grad, lanes)

    choice = dispatch.Choice(False, "XLA: the update needs whole leaves")
    if plan.signatures[number].spec.elementwise:
        choice = dispatch.update(device, one, (*values, verdict), grad, old, **settings)
    if choice.kernel:
        from leto_jax.pallas import fused

        def run(values, verdict, grad, old, token, places):
            new = fused.fused_update(one, (*values, verdict), grad, old, **settings)
            return list(new.lanes), list(new.parity), list(new.checksums)

    else:
        encode = encoder(job, device)

        def run(values, verdict, grad, old, token, places):
            new = whole.function(values, verdict, grad, old)
            guards = [encode(lane_words(x, protection.data_rows)) for x in new]
            return list(new), [parity for parity, _ in guards], [checksums for _, checksums in guards]

    return Program(name, run, (values, verdict, grad, old, RECORD, (list(old), rows, sums)), 5)


def _mark(job: Job, update: str, index: int) -> Program:
    _, sums = _staging(job, index)
    count = len(COPIES)

    def run(found, checksums, places):
        sealed = [found[0]] * len(checksums)
        by_pages = sorted(range(len(checksums)), key=lambda n: checksums[n].shape[0])
        for _, group in itertools.groupby(by_pages, key=lambda n: checksums[n].shape[0]):
            members = list(group)  # together: the fewer programs a mark is, the less it costs
            done = seal(jnp.stack([found[1 + n] for n in members]), jnp.stack([checksums[n] for n in members]))
            for place, n in enumerate(members):
                sealed[n] = done[place]
        return [found[0]] * count + sealed

    records_form = jax.ShapeDtypeStruct((1 + len(sums), 16), jnp.uint32)
    return Program(mark_name(update), run, (records_form, sums, [RECORD] * (count + len(sums))), 2)


def _void(job: Job) -> Program:
    count = sum(piece.chunk is not None for piece in job.layout.pieces)
    run = lambda found, token, places: [found[n] for n in range(count)]
    return Program("void", run, (jax.ShapeDtypeStruct((count, 16), jnp.uint32), RECORD, [RECORD] * count), 2)


def _records(job: Job) -> Program:
    ends = list(itertools.accumulate((1 + len(pieces) for pieces in job.layout.pieces_of_chunk), initial=0))
    run = lambda found: [found[a:b] for a, b in itertools.pairwise(ends)]
    return Program("records", run, (jax.ShapeDtypeStruct((ends[-1], 16), jnp.uint32),))


def _encode(job: Job, words: int, device: jax.Device) -> Program:
    protection = job.layout.spec.protection
    pages = protection.data_rows * words * 4 // protection.page_bytes
    encode = encoder(job, device)
    data, parity, sums = (
        jax.ShapeDtypeStruct(shape, jnp.uint32) for shape in ((protection.data_rows, words), (protection.parity_rows, words), (pages, 2))
    )
    return Program(encode_name(words), lambda data, places: list(encode(data)), (data, [parity, sums]), 1)


def _checksum(job: Job, words: int, device: jax.Device) -> Program:
    whole, page_words = job.programs[checksum_name(words)], job.layout.spec.protection.page_bytes // 4
    if not dispatch.parity(device, words, page_words).kernel:
        return whole
    from leto_jax.pallas import parity

    return Program(whole.name, functools.partial(parity.page_checksums, page_words=page_words), whole.arguments)


def encoder(job: Job, device: jax.Device) -> Callable[[Array], tuple[Array, Array]]:
    """uint32[D, W] -> parity uint32[H, W], page checksums uint32[pages, 2]: the kernel where the device has it, else XLA."""
    protection = job.layout.spec.protection
    page_words = protection.page_bytes // 4

    def encode(words: Array) -> tuple[Array, Array]:
        if dispatch.parity(device, words.shape[1], page_words).kernel:
            from leto_jax.pallas import parity

            rows, sums = parity.encode(words, _factors(protection.data_rows, protection.parity_rows), page_words=page_words)
            assert sums is not None
            return rows, sums
        return jnp.stack(codec.encode(words, protection.parity_rows)), codec.page_checksums(words.reshape(-1, page_words))

    return encode


@functools.cache
def _factors(data_rows: int, parity_rows: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(map(int, row)) for row in matrix.parity_matrix(data_rows, parity_rows))


__all__ = ["gradients", "init_homes", "init_leaves", "mark_name", "programs", "seal"]
