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
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from leto_jax.pallas import mosaic
from leto_jax.pallas import parity as parity_kernels
from leto_jax.pallas import words as arithmetic
from leto_jax.pallas.elementwise import kernel_form
from leto_jax.pallas.mosaic import THREADS, Tile
from leto_jax.pallas.words import Coefficients

# (scalars, gradient or None, old lanes) -> new lanes
type Update = Callable[[tuple[jax.Array, ...], jax.Array | None, tuple[jax.Array, ...]], Sequence[jax.Array]]


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel runs; never what it computes. vectors: of each row in each thread, 16 bytes in the lane with the largest items.

    Two vectors are 1 % faster where all lanes have 1 GiB and 2 % slower where they have 256 MiB (H200).
    """

    vectors: int = 1


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
    arithmetic.check_coefficients(coefficients, data_rows)
    plan = _plan(function, scalars, grad, lanes, data_rows, coefficients, page_bytes, config or Config(), interpret)
    inputs = [x for x in (grad, *lanes) if x is not None]
    kernel = plgpu.kernel(
        functools.partial(_body, plan),
        out_type=tuple(plan.outputs()),
        scratch_types=[plan.sums.scratch] if plan.sums else [],
        grid=(plan.row // plan.tile.elements,),
        grid_names=("tile",),
        compiler_params=mosaic.PARAMS,
        interpret=mosaic.interpreter(interpret),
        kernel_name="leto_fused_update",
    )
    # Memory that a kernel can read has no booleans.
    carried = [jnp.reshape(x.astype(jnp.int32) if x.dtype == jnp.bool_ else x, (1,)) for x in scalars]
    results = iter(kernel(*carried, *(x.reshape(data_rows, plan.row) for x in inputs)))
    rows = [next(results) for _ in plan.new]
    if plan.shifts or not coefficients:
        parity = tuple(next(results) if plan.shifts else jnp.zeros((0, words), jnp.uint32) for words in plan.row_words)
    else:
        # A program of its own, so that lanes of one dtype share one compiled kernel.
        encode = jax.jit(lambda x: parity_kernels.encode(_as_words(x), coefficients, interpret=interpret)[0])
        parity = tuple(encode(x) for x in rows)
    pages = [4 * words // page_bytes for words in plan.row_words] if page_bytes else []
    checksums = plan.sums.page_sums(next(results), pages, interpret) if plan.sums else ()
    return Updated(tuple(x.reshape(-1) for x in rows), parity, checksums)


def check(
    function: Update,
    scalars: Sequence[Any],
    grad: Any,
    lanes: Sequence[Any],
    *,
    data_rows: int,
    coefficients: Coefficients,
    page_bytes: int | None,
) -> None:
    """Raises ValueError if `fused_update` cannot take these shapes and dtypes (arrays or `jax.ShapeDtypeStruct`), with the reason."""
    arithmetic.check_coefficients(coefficients, data_rows)
    _plan(function, scalars, grad, lanes, data_rows, coefficients, page_bytes, Config(), False)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is known of one update before it runs.

    new: shapes and dtypes of the new lanes. row: elements of a row. shifts: as `words.horner_shifts`; () also for parity that takes another
    pass. flags: which scalars are booleans. sums: None without checksums.
    """

    function: Update
    new: tuple[jax.ShapeDtypeStruct, ...]
    data_rows: int
    row: int
    tile: Tile
    shifts: tuple[int, ...]
    page_bytes: int | None
    sums: mosaic.Sums | None
    flags: tuple[bool, ...]
    has_grad: bool
    interpret: bool

    @property
    def row_words(self) -> tuple[int, ...]:
        return tuple(self.row * x.dtype.itemsize // 4 for x in self.new)

    def outputs(self) -> list[jax.ShapeDtypeStruct]:
        lanes = [jax.ShapeDtypeStruct((self.data_rows, self.row), x.dtype) for x in self.new]
        parity = [jax.ShapeDtypeStruct((len(self.shifts), words), jnp.uint32) for words in self.row_words] if self.shifts else []
        return [*lanes, *parity, *([self.sums.output] if self.sums else [])]


def _plan(
    function: Update,
    scalars: Sequence[Any],
    grad: Any,
    lanes: Sequence[Any],
    data_rows: int,
    coefficients: Coefficients,
    page_bytes: int | None,
    config: Config,
    interpret: bool,
) -> _Plan:
    length = lanes[0].shape[0]
    inputs = [x for x in (grad, *lanes) if x is not None]
    for array in inputs:
        if array.shape != (length,) or length % data_rows:
            raise ValueError(
                f"fused update: expected flat arrays of one length, a multiple of {data_rows}, found {array.shape} and {length}"
            )
    for scalar in scalars:
        if scalar.shape != () or scalar.dtype.itemsize > 4:
            raise ValueError(f"fused update: expected scalars of at most 4 bytes, found {scalar.dtype}{list(scalar.shape)}")
    new = _new_lanes(function, scalars, grad, lanes)
    row = length // data_rows
    tile = _choose_tile(row, [x.dtype for x in (*inputs, *new)], page_bytes, config.vectors)
    return _Plan(
        function=function,
        new=new,
        data_rows=data_rows,
        row=row,
        tile=tile,
        shifts=arithmetic.horner_shifts(coefficients) or (),
        page_bytes=page_bytes,
        sums=mosaic.Sums(data_rows, len(new), row // tile.elements) if page_bytes else None,
        flags=tuple(x.dtype == jnp.bool_ for x in scalars),
        has_grad=grad is not None,
        interpret=interpret,
    )


def _new_lanes(function: Update, scalars: Sequence[Any], grad: Any, lanes: Sequence[Any]) -> tuple[jax.ShapeDtypeStruct, ...]:
    struct = lambda x: None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
    results = jax.eval_shape(lambda *a: tuple(function(*a)), tuple(map(struct, scalars)), struct(grad), tuple(map(struct, lanes)))
    for result in results:
        if result.shape != lanes[0].shape:
            raise ValueError(f"fused update: expected an elementwise update of lanes {lanes[0].shape}, found a result {result.shape}")
    return results


def _choose_tile(row: int, dtypes: Sequence[Any], page_bytes: int | None, vectors: int) -> Tile:
    """A tile for rows of `row` elements: 16 bytes a thread in the widest lane, `vectors` times, or less if rows or pages are too short."""
    sizes = {jnp.dtype(dtype).itemsize for dtype in dtypes}
    if not sizes <= {2, 4}:
        raise ValueError(f"fused update: expected dtypes of 2 or 4 bytes, found {', '.join(sorted({jnp.dtype(d).name for d in dtypes}))}")
    vector = 16 // max(sizes)
    while vectors:
        tile = Tile(THREADS * vector * vectors, vector)
        whole = not page_bytes or all(page_bytes % (tile.elements * size) == 0 and row * size % page_bytes == 0 for size in sizes)
        if row % tile.elements == 0 and whole:
            return tile
        vectors //= 2
    raise ValueError(
        f"fused update: expected rows that are multiples of {THREADS * vector} elements and of whole pages in every lane, and pages that are "
        f"multiples of {THREADS * vector * max(sizes)} bytes, found {row} elements and pages of {page_bytes} bytes"
    )


def _as_words(rows: jax.Array) -> jax.Array:
    """The bytes of rows as words. XLA may copy 2-byte rows for it."""
    return jax.lax.bitcast_convert_type(rows if rows.dtype.itemsize == 4 else rows.reshape(len(rows), -1, 2), jnp.uint32)


def _body(plan: _Plan, *refs: Any) -> None:
    number, tile, sums, shifts = jax.lax.axis_index("tile"), plan.tile, plan.sums, plan.shifts
    count, kept = len(plan.new), int(sums is not None)
    n_inputs = len(refs) - len(plan.flags) - count - (count if shifts else 0) - 2 * kept
    ends = list(itertools.accumulate([0, len(plan.flags), n_inputs, count, count if shifts else 0, kept, kept]))
    scalar_refs, inputs, new, parity, partial, scratch = (refs[a:b] for a, b in itertools.pairwise(ends))
    scalars = tuple(ref[0] != 0 if flag else ref[0] for ref, flag in zip(scalar_refs, plan.flags, strict=True))
    sizes = [x.dtype.itemsize for x in plan.new]
    word_tiles = [tile.as_words(size) for size in sizes]
    weights = {size: tile.as_words(size).weights(number, plan.page_bytes // 4) for size in set(sizes)} if plan.page_bytes else {}
    function = kernel_form(plan.function)

    def step(row, accumulators):
        arrays = [tile.load(ref, row, number) for ref in inputs]
        grad, lanes = (arrays[0], arrays[1:]) if plan.has_grad else (None, arrays)
        accumulated, pairs = [], []
        for lane, value in enumerate(function(scalars, grad, tuple(lanes))):
            tile.store(new[lane], row, number, value)
            words = mosaic.to_words(value, tile, plan.interpret)
            accumulated.append([arithmetic.horner(a, words, shift) for a, shift in zip(accumulators[lane], shifts, strict=True)])
            if sums:
                pairs.append((words, arithmetic.fold(words) * weights[sizes[lane]]))
        if sums:
            sums.add(scratch[0], row, pairs, word_tiles, plan.interpret)
        return accumulated

    accumulators = jax.lax.fori_loop(0, plan.data_rows, step, [[word_tile.zeros() for _ in shifts] for word_tile in word_tiles])
    for lane, rows in enumerate(accumulators):
        for row, accumulator in enumerate(rows):
            word_tiles[lane].store(parity[lane], row, number, accumulator)
    if sums:
        sums.finish(scratch[0], partial[0], number, plan.interpret)
