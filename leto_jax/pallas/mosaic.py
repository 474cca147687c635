"""The few things that the kernels need of Mosaic GPU and that Pallas does not offer. The one place that writes MLIR.

A block is one warpgroup, 128 threads. Of each row it holds a *tile*: in the strided layout, thread t has elements [t * v, (t + 1) * v) of
every run of 128 * v elements, v = `Tile.vector`.

GPU interpret mode knows no inlined MLIR, so what is written with it has a second form in JAX, for tests on the CPU.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

THREADS = 128
WARPS = 4

# No barriers around every store: no thread reads what another wrote, except where a barrier is written out.
PARAMS = plgpu.CompilerParams(unsafe_no_auto_barriers=True)


def interpreter(interpret: bool) -> Any:
    """Value of `plgpu.kernel(interpret=...)`."""
    return plgpu.InterpretGPUParams() if interpret else None


@dataclasses.dataclass(frozen=True)
class Tile:
    """A block's share of one row: `elements` of them, `vector` at a time in each thread."""

    elements: int
    vector: int

    @property
    def runs(self) -> int:
        """Vectors that each thread holds."""
        return self.elements // (THREADS * self.vector)

    @property
    def layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self.elements,), vec_size=self.vector)

    def as_words(self, itemsize: int) -> "Tile":
        """The same bytes as words of four bytes."""
        return Tile(self.elements * itemsize // 4, self.vector * itemsize // 4)

    def load(self, ref: Any, row: Any, number: Any) -> jax.Array:
        """Tile `number` of a row of a 2-D array in global memory."""
        return plgpu.load(ref.at[row, pl.ds(number * self.elements, self.elements)], layout=self.layout, optimized=False)

    def store(self, ref: Any, row: Any, number: Any, value: jax.Array) -> None:
        ref[row, pl.ds(number * self.elements, self.elements)] = value

    def zeros(self) -> jax.Array:
        """uint32 zeros, to begin an accumulation with."""
        return plgpu.layout_cast(jnp.zeros((self.elements,), jnp.uint32), self.layout)

    def weights(self, number: Any, page_words: int) -> jax.Array:
        """Weights of a tile of words in the second sum: place within the page, from 1."""
        start = jax.lax.rem(number * self.elements, page_words) + 1
        return plgpu.broadcasted_iota(jnp.uint32, (self.elements,), 0, layout=self.layout) + start.astype(jnp.uint32)


def to_words(value: jax.Array, tile: Tile, interpret: bool) -> jax.Array:
    """The bytes of a tile as words: any dtype of 2 or 4 bytes -> uint32. No instruction is spent on it."""
    itemsize = value.dtype.itemsize
    if itemsize == 4:
        return value if value.dtype == jnp.uint32 else jax.lax.bitcast_convert_type(value, jnp.uint32)
    if interpret:
        return jax.lax.bitcast_convert_type(value.reshape(-1, 4 // itemsize), jnp.uint32)
    words = tile.as_words(itemsize)

    @plgpu.inline_mgpu(
        arg_types=(tile.layout,), return_type=plgpu.ShapeDtypeStruct((words.elements,), jnp.dtype(jnp.uint32), layout=words.layout)
    )
    def pack(_, array):
        kind = ir.VectorType.get((words.vector,), ir.IntegerType.get_signless(32))
        registers = np.empty(array.registers.shape, dtype=object)
        for index, register in np.ndenumerate(array.registers):
            registers[index] = vector.bitcast(kind, register)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout.to_mgpu(), _is_signed=False)

    return pack(value)


class Sums:
    """Sums over pages of values and of weighted values, for `count` streams of D rows at once.

    A sum over a block for each row would cost barriers. Instead each warp sums by itself (one instruction), leaves the results in shared
    memory, and the block adds them up once, after its last row. What the blocks leave, uint32[count, rows, tiles, 2], becomes checksums of
    pages in `page_sums`, a small kernel of its own.
    """

    def __init__(self, rows: int, count: int, tiles: int):
        if 2 * count > 32:
            raise ValueError(f"page checksums: expected at most 16 arrays in one pass, found {count}")
        self.rows, self.count, self.tiles = rows, count, tiles

    @property
    def scratch(self) -> Any:
        """Shared memory of a block: [stream, row, sum, warp]."""
        return plgpu.SMEM((self.count, self.rows, 2, WARPS), jnp.uint32)

    @property
    def output(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.count * self.rows, self.tiles, 2), jnp.uint32)

    def add(self, scratch: Any, row: Any, pairs: Sequence[tuple[jax.Array, jax.Array]], tiles: Sequence[Tile], interpret: bool) -> None:
        """Keeps the sums of one row: for each stream a tile of words and the same weighted."""
        arrays = [array for pair in pairs for array in pair]
        shapes = [tile for tile in tiles for _ in range(2)]
        if interpret:
            by_warp = lambda x, tile: jnp.sum(x.reshape(tile.runs, WARPS, -1), axis=(0, 2), dtype=jnp.uint32)
            sums = jnp.stack([by_warp(array, tile) for array, tile in zip(arrays, shapes, strict=True)])
            scratch[:, row] = sums.reshape(self.count, 2, WARPS)
            return

        @plgpu.inline_mgpu(arg_types=(*(tile.layout for tile in shapes), plgpu.RefType()))
        def reduce(_, *operands):
            *parts, target = operands
            thread = mgpu.thread_idx()
            lane = arith.remui(thread, _i32(32))
            mine = None  # Lane k holds sum k: one store for all of them.
            for number, part in enumerate(parts):
                total = mgpu_utils.redux(_thread_sum(part), _i32(-1), mgpu_utils.ReductionKind.ADD)
                is_mine = arith.cmpi(arith.CmpIPredicate.eq, lane, _i32(number))
                mine = total if mine is None else arith.select(is_mine, total, mine)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, lane, _i32(len(parts)))):
                where = (arith.divui(lane, _i32(2)), arith.remui(lane, _i32(2)), arith.divui(thread, _i32(32)))
                memref.store(mine, target, list(map(_index, where)))

        reduce(*arrays, scratch.at[:, row])

    def finish(self, scratch: Any, output: Any, number: Any, interpret: bool) -> None:
        """Adds up the warps and stores the sums of the block."""
        if interpret:
            output[:, number] = jnp.sum(scratch[...], axis=-1, dtype=jnp.uint32).reshape(-1, 2)
            return
        total = self.count * self.rows

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
        def combine(_, source, target):
            i32 = ir.IntegerType.get_signless(32)
            mgpu.warpgroup_barrier()
            flat = mgpu.memref_reshape(source, (total * 2 * WARPS,))
            for start in range(0, total, THREADS):
                item = arith.addi(mgpu.thread_idx(), _i32(start))
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, item, _i32(total))):
                    at = [arith.addi(arith.muli(item, _i32(2 * WARPS)), _i32(k * WARPS)) for k in range(2)]
                    warps = [vector.load(ir.VectorType.get((WARPS,), i32), flat, [_index(place)]) for place in at]
                    pair = vector.from_elements(ir.VectorType.get((2,), i32), list(map(_elements_sum, warps)))
                    vector.store(pair, target, [_index(item), _index(_i32(0))])

        combine(scratch, output.at[:, number])

    def page_sums(self, partial: jax.Array, pages_per_row: Sequence[int], interpret: bool) -> tuple[jax.Array, ...]:
        """Checksums of the pages of each stream: uint32[rows * pages_per_row, 2]. A stream's pages are equal parts of its row's tiles."""
        results: list[Any] = [None] * self.count
        by_stream = partial.reshape(self.count, self.rows, -1)
        for pages in sorted(set(pages_per_row)):
            streams = [k for k in range(self.count) if pages_per_row[k] == pages]
            for stream, sums in zip(streams, self._reduce(by_stream, streams, pages, interpret), strict=True):
                results[stream] = sums
        return tuple(results)

    def _reduce(self, by_stream: jax.Array, streams: Sequence[int], pages: int, interpret: bool) -> Sequence[jax.Array]:
        """One kernel, one block for each page of a stream; XLA would take several programs for it."""
        words = 2 * self.tiles // pages
        tile = Tile(words, 2)
        if words % (2 * THREADS):  # Pages of a few tiles, in tests: not worth a kernel.
            sums = jnp.sum(by_stream.reshape(self.count, self.rows * pages, -1, 2), axis=2, dtype=jnp.uint32)
            return [sums[k] for k in streams]

        def body(source, *targets):
            row, page = jax.lax.axis_index("row"), jax.lax.axis_index("page")
            first = plgpu.broadcasted_iota(jnp.uint32, (words,), 0, layout=tile.layout) % jnp.uint32(2) == 0
            for stream, target in zip(streams, targets, strict=True):
                values = plgpu.load(source.at[stream, row, pl.ds(page * words, words)], layout=tile.layout, optimized=False)
                zero = jnp.zeros_like(values)
                target[row * pages + page, 0] = jnp.sum(jnp.where(first, values, zero), dtype=jnp.uint32)
                target[row * pages + page, 1] = jnp.sum(jnp.where(first, zero, values), dtype=jnp.uint32)

        return plgpu.kernel(
            body,
            out_type=tuple(jax.ShapeDtypeStruct((self.rows * pages, 2), jnp.uint32) for _ in streams),
            grid=(self.rows, pages),
            grid_names=("row", "page"),
            compiler_params=PARAMS,
            interpret=interpreter(interpret),
            kernel_name="leto_page_sums",
        )(by_stream)


def _index(value: Any) -> Any:
    return arith.index_cast(ir.IndexType.get(), value)


def _i32(value: int) -> Any:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _elements_sum(register: Any) -> Any:
    """Sum of the elements of a vector of i32."""
    [length] = ir.VectorType(register.type).shape
    element = lambda i: vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
    return functools.reduce(arith.addi, map(element, range(length)))


def _thread_sum(array: Any) -> Any:
    """Sum of what a thread holds of an array of i32."""
    return _elements_sum(functools.reduce(arith.addi, array.registers.flat))
