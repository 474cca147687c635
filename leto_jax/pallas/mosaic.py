"""The few things that the kernels need of Mosaic GPU and that Pallas does not offer. The one place that writes MLIR.

A block is one warpgroup, 128 threads. Of each row it holds a *tile*: in the strided layout, thread t has elements [t * v, (t + 1) * v) of
every run of 128 * v elements, v = `Tile.vector`.

GPU interpret mode knows no inlined MLIR, so what is written with it has a second form in JAX, for tests on the CPU.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

THREADS = 128
WARPS = 4

# Barriers around every store would keep the warps of a block in step. The kernels need none: no thread reads what another wrote.
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
        arg_types=(tile.layout,), return_type=plgpu.ShapeDtypeStruct((words.elements,), jnp.uint32, layout=words.layout)
    )
    def pack(_, array):
        kind = ir.VectorType.get((words.vector,), ir.IntegerType.get_signless(32))
        registers = np.empty(array.registers.shape, dtype=object)
        for index, register in np.ndenumerate(array.registers):
            registers[index] = vector.bitcast(kind, register)
        return mgpu.FragmentedArray(_registers=registers, _layout=words.layout.to_mgpu(), _is_signed=False)

    return pack(value)


def store_sums(ref: Any, values: jax.Array, weighted: jax.Array, tile: Tile, interpret: bool) -> None:
    """The sums of both arrays over the threads of each warp: 2 times uint32[tile] -> uint32[2, WARPS] in global memory.

    Sums over the block would cost shared memory and barriers; one instruction sums over a warp.
    """
    if interpret:
        by_warp = lambda x: jnp.sum(x.reshape(-1, WARPS, tile.elements // tile_runs(tile) // WARPS), axis=(0, 2), dtype=jnp.uint32)
        ref[...] = jnp.stack([by_warp(values), by_warp(weighted)])
        return

    @plgpu.inline_mgpu(arg_types=(tile.layout, tile.layout, plgpu.RefType()))
    def reduce(_, first, second, target):
        i32, index = ir.IntegerType.get_signless(32), ir.IndexType.get()
        constant = lambda value: arith.constant(i32, value)

        def total(array):
            register = functools.reduce(arith.addi, array.registers.flat)
            parts = [
                vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i])) for i in range(tile.vector)
            ]
            return mgpu_utils.redux(functools.reduce(arith.addi, parts), constant(-1), mgpu_utils.ReductionKind.ADD)

        sums = total(first), total(second)
        thread = mgpu.thread_idx()
        lane = arith.remui(thread, constant(32))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, lane, constant(2))):
            mine = arith.select(arith.cmpi(arith.CmpIPredicate.eq, lane, constant(0)), *sums)
            where = [arith.index_cast(index, lane), arith.index_cast(index, arith.divui(thread, constant(32)))]
            vector.store(vector.broadcast(ir.VectorType.get((1,), i32), mine), target, where)

    reduce(values, weighted, ref)


def tile_runs(tile: Tile) -> int:
    """Vectors that each thread holds of a tile."""
    return tile.elements // (THREADS * tile.vector)


def sums_shape(rows: int, tiles: int) -> jax.ShapeDtypeStruct:
    """What the blocks leave for `page_sums`: [row, sum, tile, warp]."""
    return jax.ShapeDtypeStruct((rows, 2, tiles, WARPS), jnp.uint32)


def page_sums(partial: jax.Array, pages_per_row: int) -> jax.Array:
    """Checksums of the pages, from the sums of the warps: -> uint32[pages, 2]. A small program of its own."""
    rows = partial.shape[0]
    by_page = jnp.sum(partial.reshape(rows, 2, pages_per_row, -1), axis=-1, dtype=jnp.uint32)
    return by_page.transpose(0, 2, 1).reshape(rows * pages_per_row, 2)
