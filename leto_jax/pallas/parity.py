"""Reed-Solomon encode and decode, and page checksums: kernels that read their rows once, at the bandwidth of the memory.

A block holds one tile of all rows. It goes down the rows and keeps the parity of its tile in registers, so nothing is read twice and no
two blocks share anything. Two forms:

- coefficients in power form (`words.horner_shifts`, all codes with up to 3 parity rows): a loop over the rows, Horner;
- any coefficients (4 parity rows, decode): unrolled, one accumulator for each bit of the coefficients, so that a row costs one XOR for
  each bit that is set.

*Cost*: D rows read, H (or the rebuilt) rows written; with checksums a second, tiny program.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from leto_jax.pallas import mosaic
from leto_jax.pallas import words as arithmetic
from leto_jax.pallas.mosaic import THREADS, Tile
from leto_jax.pallas.words import Coefficients


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel runs; never what it computes.

    vectors: 16-byte vectors of a row that each thread holds. rows_per_step: rows that are loaded before the first of them is used.
    """

    vectors: int
    rows_per_step: int


# The best, within 1 %, of vectors 1, 2, 4 and rows 1, 2, 4 on an H200 (D = 16, 4 GiB).
LOOP = Config(vectors=2, rows_per_step=2)
UNROLLED = Config(vectors=1, rows_per_step=2)
CHECKSUMS = Config(vectors=4, rows_per_step=1)
VECTOR = 4
SMALLEST_TILE = THREADS * VECTOR
"""Words. Rows and pages must be multiples of it."""


def encode(
    data: jax.Array,
    coefficients: Coefficients,
    *,
    page_words: int | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Parity rows of a piece, and the checksums of its pages in the same pass.

    Args:
      data: uint32[D, W], W a multiple of `SMALLEST_TILE`.
      coefficients: H rows of D coefficients. H = 0 gives checksums alone.
      page_words: words of a page, a divisor of W and a multiple of `SMALLEST_TILE`; None for no checksums.

    Returns:
      uint32[H, W], and uint32[D * W / page_words, 2] or None.
    """
    rows, length = data.shape
    arithmetic.check_coefficients(coefficients, rows)
    shifts = arithmetic.horner_shifts(coefficients)
    config = config or (UNROLLED if shifts is None else LOOP if coefficients else CHECKSUMS)
    tile = choose_tile(length, page_words, config.vectors)
    tiles = length // tile.elements
    pages = Pages(page_words, mosaic.Sums(rows, 1, tiles)) if page_words else None
    if not (coefficients or pages):
        raise ValueError("encode: expected parity rows or pages to compute, found neither")
    parity_shape = [jax.ShapeDtypeStruct((len(coefficients), length), jnp.uint32)] if coefficients else []
    body: Any
    if shifts is None:
        sources = tuple((0, row) for row in range(rows))
        body = functools.partial(_unrolled, tile, sources, coefficients, pages, config, interpret)
    else:
        body = functools.partial(_loop, tile, shifts, pages, config, interpret)
    results = list(_launch(body, parity_shape, pages, tiles, interpret)(data))
    parity = results.pop(0) if coefficients else jnp.zeros((0, length), jnp.uint32)
    return parity, pages.sums.page_sums(results.pop(), [length // pages.words], interpret)[0] if pages else None


def page_checksums(data: jax.Array, page_words: int, *, config: Config | None = None, interpret: bool = False) -> jax.Array:
    """Checksums of the pages of a piece: uint32[D, W] -> uint32[D * W / page_words, 2]. See `encode`."""
    sums = encode(data, (), page_words=page_words, config=config, interpret=interpret)[1]
    assert sums is not None
    return sums


def decode(
    data: jax.Array,
    parity: jax.Array,
    survivors: Sequence[int],
    coefficients: Coefficients,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Lost rows from others. The pattern is static: one program for each.

    Args:
      data: uint32[D, W]; rows that are not named in `survivors` are not read.
      parity: uint32[H, W], likewise.
      survivors: numbers of the rows that are read; D + h is parity row h.
      coefficients: for each lost row, one coefficient for each survivor.

    Returns:
      uint32[lost, W].
    """
    rows, length = data.shape
    if parity.shape[1:] != (length,) or not all(0 <= row < rows + len(parity) for row in survivors):
        raise ValueError(
            f"decode: expected rows of {length} words and survivors below {rows} + {len(parity)}, found {parity.shape}, {survivors}"
        )
    arithmetic.check_coefficients(coefficients, len(survivors))
    config = config or UNROLLED
    tile = choose_tile(length, None, config.vectors)
    sources = tuple((0, row) if row < rows else (1, row - rows) for row in survivors)
    body = functools.partial(_unrolled, tile, sources, coefficients, None, config, interpret)
    output = jax.ShapeDtypeStruct((len(coefficients), length), jnp.uint32)
    return _launch(body, [output], None, length // tile.elements, interpret)(data, parity)[0]


def choose_tile(row_words: int, page_words: int | None, vectors: int) -> Tile:
    """The largest tile of at most `vectors` vectors a thread that divides rows and pages."""
    while vectors:
        tile = Tile(SMALLEST_TILE * vectors, VECTOR)
        if row_words % tile.elements == 0 and (page_words is None or (page_words % tile.elements == 0 and row_words % page_words == 0)):
            return tile
        vectors //= 2
    raise ValueError(
        f"expected rows of whole pages, and pages a multiple of {SMALLEST_TILE} words, found {row_words} and {page_words} words"
    )


class Pages(NamedTuple):
    """That a kernel computes page checksums too."""

    words: int
    sums: mosaic.Sums

    def add(self, scratch: Any, row: Any, values: jax.Array, tile: Tile, number: Any, interpret: bool) -> None:
        """Keeps the sums of a tile of a row."""
        self.sums.add(scratch, row, [(values, arithmetic.fold(values) * tile.weights(number, self.words))], [tile], interpret)


def _launch(body: Any, outputs: list[Any], pages: Pages | None, blocks: int, interpret: bool) -> Any:
    return plgpu.kernel(
        body,
        out_type=(*outputs, *([pages.sums.output] if pages else [])),
        scratch_types=[pages.sums.scratch] if pages else [],
        grid=(blocks,),
        grid_names=("tile",),
        compiler_params=mosaic.PARAMS,
        interpret=mosaic.interpreter(interpret),
        kernel_name="leto_parity",
    )


def steps(rows: int, rows_per_step: int) -> tuple[int, int]:
    """(rows, steps) of a loop that takes several rows at a time: the largest divisor of `rows` that is not above `rows_per_step`."""
    together = next(k for k in range(min(rows, rows_per_step), 0, -1) if rows % k == 0)
    return together, rows // together


def _loop(tile: Tile, shifts: tuple[int, ...], pages: Pages | None, config: Config, interpret: bool, data: Any, *refs: Any) -> None:
    number = jax.lax.axis_index("tile")
    together, count = steps(data.shape[0], config.rows_per_step)

    def step(i, accumulators):
        first = i * together
        for k, row in enumerate([tile.load(data, first + k, number) for k in range(together)]):
            accumulators = [arithmetic.horner(a, row, shift) for a, shift in zip(accumulators, shifts, strict=True)]
            if pages:
                pages.add(refs[-1], first + k, row, tile, number, interpret)
        return accumulators

    accumulators = jax.lax.fori_loop(0, count, step, [tile.zeros() for _ in shifts])
    for row, accumulator in enumerate(accumulators):
        tile.store(refs[0], row, number, accumulator)
    if pages:
        pages.sums.finish(refs[-1], refs[-2], number, interpret)


def _unrolled(
    tile: Tile,
    sources: tuple[tuple[int, int], ...],
    coefficients: Coefficients,
    pages: Pages | None,
    config: Config,
    interpret: bool,
    *refs: Any,
) -> None:
    number = jax.lax.axis_index("tile")
    inputs = refs[: 1 + max(source for source, _ in sources)]
    result = refs[len(inputs)]
    by_bit: list[list[jax.Array | None]] = [[None] * max(row).bit_length() for row in coefficients]
    for start in range(0, len(sources), config.rows_per_step):
        group = range(start, min(start + config.rows_per_step, len(sources)))
        values = [tile.load(inputs[sources[k][0]], sources[k][1], number) for k in group]
        for position, value in zip(group, values, strict=True):
            for bits, factors in zip(by_bit, coefficients, strict=True):
                for bit, held in enumerate(bits):
                    if factors[position] >> bit & 1:
                        bits[bit] = value if held is None else held ^ value
            if pages:
                pages.add(refs[-1], sources[position][1], value, tile, number, interpret)
    for row, bits in enumerate(by_bit):
        tile.store(result, row, number, arithmetic.evaluate(bits))
    if pages:
        pages.sums.finish(refs[-1], refs[-2], number, interpret)
