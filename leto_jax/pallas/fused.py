"""The fused update: reads gradient and lanes once, writes the new lanes, their parity rows and the checksums of their pages.

Parity and checksums come from the values in registers, so guarding an update costs the parity rows' bytes and nothing else. The update is a
Python function over arrays of any one shape; it is traced in the kernel's body, on one tile of one row at a time.

    lanes (D rows each)      row 0 | tile | tile | ...      a block takes one tile of every row, top to bottom;
                             row 1 | tile | tile | ...      its parity accumulators stay in registers
                             ...
    parity (H rows each)           | tile | tile | ...

Outputs are new arrays. To write over other memory, donate an array of the same shape and dtype to the surrounding `jax.jit`: the results of
the kernel are placed there (copy-on-write: the old lanes stay as they are).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from leto_jax.pallas import mosaic, parity as parity_kernels, words as arithmetic
from leto_jax.pallas.elementwise import kernel_form
from leto_jax.pallas.mosaic import THREADS, Tile
from leto_jax.pallas.words import Coefficients

# (scalars, gradient or None, old lanes) -> new lanes
type Update = Callable[[tuple[jax.Array, ...], jax.Array | None, tuple[jax.Array, ...]], Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs; never what it computes.

    access_bytes: of the widest array that a thread loads at once. vectors: such accesses of each row in each thread. stages: rows that are
    on their way at a time, 0 to load each row when it is needed. together: the warps of a block begin each row together.
    """

    vectors: int = 1
    access_bytes: int = 16
    stages: int = 0
    together: bool = False


class Updated(NamedTuple):
    """What one chunk's update leaves.

    lanes: new values, flat. parity: for each new lane, uint32[H, words of a row]. checksums: for each new lane, uint32[pages, 2].
    """

    lanes: tuple[jax.Array, ...]
    parity: tuple[jax.Array, ...]
    checksums: tuple[jax.Array, ...]


def fused_update(
    function: Update,
    scalars: Sequence[jax.Array],
    grad: jax.Array | None,
    lanes: Sequence[jax.Array],
    *,
    data_rows: int,
    coefficients: Coefficients,
    page_bytes: int | None,
    config: Config | None = None,
    interpret: bool = False,
) -> Updated:
    """One chunk's update with its guards.

    Args:
      function: the elementwise update, traceable on arrays of any shape; `grad` and lanes come in one shape, scalars in shape ().
      scalars: what the step decided, of shape () and at most 4 bytes.
      grad: flat, of n elements, or None.
      lanes: old lanes, flat, of n elements each; dtypes of 2 or 4 bytes.
      data_rows: D; rows are equal parts of a lane, n / D elements.
      coefficients: H rows of D coefficients, H = 0 for no parity. Those without power form (H = 4) take a second pass over the new lanes.
      page_bytes: page size, a divisor of a row's bytes in every lane; None for no checksums.

    Returns:
      `Updated`; `checksums` is empty if there are none.

    *Crash*: as any program: outputs may be written in part, in any order; inputs are only read.
    *Cost*: grad and lanes read once, new lanes and H / D of them written; one small program more per chunk for the checksums.
    """
    config = config or Config()
    length = lanes[0].shape[0]
    row = length // data_rows
    arithmetic.check_coefficients(coefficients, data_rows)
    inputs = [*(() if grad is None else (grad,)), *lanes]
    new = new_lanes(function, scalars, grad, lanes)
    for array in inputs:
        if array.shape != (length,):
            raise ValueError(f"fused update: expected flat arrays of {length} elements, found {array.shape}")
    tile = choose_tile(row, [x.dtype for x in (*inputs, *new)], page_bytes, config.vectors, config.access_bytes)
    shifts = arithmetic.horner_shifts(coefficients) or ()
    tiles = row // tile.elements
    outputs = [jax.ShapeDtypeStruct((data_rows, row), x.dtype) for x in new]
    if shifts:
        outputs += [jax.ShapeDtypeStruct((len(shifts), row * x.dtype.itemsize // 4), jnp.uint32) for x in new]
    sums = mosaic.Sums(data_rows, len(new), tiles)
    if page_bytes:
        outputs.append(sums.output)
    ring = mosaic.Ring(tile, [x.dtype for x in inputs], config.stages) if config.stages else None
    kernel = plgpu.kernel(
        functools.partial(_body, function, tile, shifts, page_bytes, sums, ring, config, interpret, [x.dtype == jnp.bool_ for x in scalars], grad is not None, len(lanes), len(new)),
        out_type=tuple(outputs),
        scratch_types=[*(ring.scratch if ring else []), *([sums.scratch] if page_bytes else [])],
        grid=(tiles,),
        grid_names=("tile",),
        compiler_params=mosaic.PARAMS,
        interpret=mosaic.interpreter(interpret),
        kernel_name="leto_fused_update",
    )
    # Booleans have no place in memory that a kernel could read.
    carried = [jnp.reshape(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x, (1,)) for x in scalars]
    results = list(kernel(*carried, *(x.reshape(data_rows, row) for x in inputs)))
    matrices = results[: len(new)]
    guards = results[len(new) :]
    if shifts:
        parity = tuple(guards[: len(new)])
    elif coefficients:
        as_words = [_words_of_rows(x) for x in matrices]
        parity = tuple(parity_kernels.encode(x, coefficients, interpret=interpret)[0] for x in as_words)
    else:
        parity = tuple(jnp.zeros((0, row * x.dtype.itemsize // 4), jnp.uint32) for x in new)
    checksums: tuple[jax.Array, ...] = ()
    if page_bytes:
        checksums = sums.page_sums(guards[-1], [row * x.dtype.itemsize // page_bytes for x in new], interpret)
    return Updated(tuple(x.reshape(length) for x in matrices), parity, checksums)


def new_lanes(function: Update, scalars: Sequence[Any], grad: Any, lanes: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Shapes and dtypes of the results of `function`. Raises ValueError for one that does not have the shape of the lanes."""
    struct = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    results = jax.eval_shape(
        lambda *a: tuple(function(*a)),
        tuple(map(struct, scalars)),
        None if grad is None else struct(grad),
        tuple(map(struct, lanes)),
    )
    for result in results:
        if result.shape != lanes[0].shape:
            raise ValueError(f"fused update: expected new lanes of shape {lanes[0].shape}, found {result.shape}; the update must be elementwise")
    return list(results)


def choose_tile(row: int, dtypes: Sequence[Any], page_bytes: int | None, vectors: int, access_bytes: int = 16) -> Tile:
    """A tile for rows of `row` elements: 16 bytes a thread in the widest lane, `vectors` times, or less if rows or pages are too short."""
    sizes = {jnp.dtype(dtype).itemsize for dtype in dtypes}
    if not sizes <= {2, 4}:
        raise ValueError(f"fused update: expected dtypes of 2 or 4 bytes, found {', '.join(sorted({jnp.dtype(d).name for d in dtypes}))}")
    vector = access_bytes // max(sizes)
    while vectors:
        tile = Tile(THREADS * vector * vectors, vector)
        whole = all(page_bytes % (tile.elements * s) == 0 and row * s % page_bytes == 0 for s in sizes) if page_bytes else True
        if row % tile.elements == 0 and whole:
            return tile
        vectors //= 2
    raise ValueError(
        f"fused update: expected rows that are multiples of {THREADS * vector} elements and of whole pages in every lane, and pages that are "
        f"multiples of {THREADS * vector * max(sizes)} bytes, found {row} elements and pages of {page_bytes} bytes"
    )


def _words_of_rows(rows: jax.Array) -> jax.Array:
    if rows.dtype.itemsize == 4:
        return jax.lax.bitcast_convert_type(rows, jnp.uint32)
    return jax.lax.bitcast_convert_type(rows.reshape(len(rows), -1, 2), jnp.uint32)


def _body(function, tile, shifts, page_bytes, sums, ring, config, interpret, flags, has_grad, n_old, n_new, *refs) -> None:
    number = jax.lax.axis_index("tile")
    n_inputs = n_old + has_grad
    with_sums = int(page_bytes is not None)
    cuts = [len(flags), n_inputs, n_new, n_new if shifts else 0, with_sums, n_inputs if ring else 0, with_sums]
    starts = [sum(cuts[:k]) for k in range(len(cuts) + 1)]
    scalar_refs, input_refs, new_refs, parity_refs, sums_refs, slots, kept_refs = (refs[a:b] for a, b in zip(starts, starts[1:], strict=False))
    scalars = tuple(ref[0] != 0 if flag else ref[0] for ref, flag in zip(scalar_refs, flags, strict=True))
    sizes = [ref.dtype.itemsize for ref in new_refs]
    word_tiles = [tile.as_words(size) for size in sizes]
    weights = {size: tile.as_words(size).weights(number, page_bytes // 4) for size in set(sizes)} if page_bytes else {}
    rows = input_refs[0].shape[0]

    def update(row, arrays, accumulators):
        grad, lanes = (arrays[0], arrays[1:]) if has_grad else (None, arrays)
        accumulated, pairs = [], []
        for lane, value in enumerate(kernel_form(function)(scalars, grad, tuple(lanes))):
            tile.store(new_refs[lane], row, number, value)
            words = mosaic.to_words(value, tile, interpret)
            accumulated.append([arithmetic.horner(a, words, h) for a, h in zip(accumulators[lane], shifts, strict=True)])
            if page_bytes:
                pairs.append((words, arithmetic.fold(words) * weights[sizes[lane]]))
        if page_bytes:
            sums.add(kept_refs[0], row, pairs, word_tiles, interpret)
        return accumulated

    def send_for(row):
        pl.when(row < rows)(lambda: ring.start(input_refs, slots, row, number, interpret))
        ring.commit(interpret)

    def step(row, accumulators):
        if config.together:
            mosaic.keep_together(interpret)
        if ring is None:
            return update(row, [tile.load(ref, row, number) for ref in input_refs], accumulators)
        send_for(row + ring.stages - 1)
        ring.wait(interpret)
        return update(row, ring.load(slots, row), accumulators)

    if ring is not None:
        for row in range(ring.stages - 1):
            send_for(row)
    zeros = [[word_tile.zeros() for _ in shifts] for word_tile in word_tiles]
    accumulators = jax.lax.fori_loop(0, rows, step, zeros)
    for lane, parity in enumerate(accumulators):
        for row, accumulator in enumerate(parity):
            word_tiles[lane].store(parity_refs[lane], row, number, accumulator)
    if page_bytes:
        sums.finish(kept_refs[0], sums_refs[0], number, interpret)


def traffic_bytes(scalars: int, grad: Any, lanes: Sequence[Any], updated: Updated) -> int:
    """Bytes that one call must move: all arrays once."""
    nbytes = lambda x: math.prod(x.shape) * x.dtype.itemsize
    del scalars
    return sum(map(nbytes, [*(() if grad is None else (grad,)), *lanes, *updated.lanes, *updated.parity, *updated.checksums]))
