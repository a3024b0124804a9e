"""Tiles of logits of few queries: the warps of a warpgroup hold the same queries, each with other keys of a key block.

An instruction of `mma.sync` takes 16 rows, and the tiles of a warpgroup have 64. Here the rows of a tile are those of its
queries several times: row r is query r % queries, and its columns are the keys of part r // queries of the key block. A
part's keys are read by its own warps alone. The softmax goes row by row, so that each part has statistics and sums of its
own until they are merged at the end.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_fa.backends.gpu.arrays import KernelArray
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.mma.matmuls import Mma

ROWS = 64  # of a tile


@dataclasses.dataclass(frozen=True)
class KeyParts:
    """The parts of key blocks for tiles of `queries` (16, 32 or 64) queries."""

    queries: int
    mma: Mma

    @property
    def count(self) -> int:
        """Parts of a key block."""
        return ROWS // self.queries

    def inner_products(self, q: Any, k: Any) -> Any:
        """Returns the tile of logits [64, keys] of q [64, dim], the queries `count` times, and k [count, keys, dim]."""
        if not self.mma.interpret:
            return self.mma.inner_products(q, k.at[self._own()])
        return jnp.concatenate([self.mma.inner_products(q.at[self._rows(i)], k.at[i]) for i in range(self.count)])

    def plus_product(self, acc: Any, p: Any, v: Any) -> Any:
        """Returns an accumulator [64, dim] plus the product of p [64, keys] and v [count, keys, dim], part by part."""
        if not self.mma.interpret:
            return self.mma.plus_product(acc, p, v.at[self._own()])
        parts = ((acc[part], p[part], v.at[i]) for i, part in enumerate(self._slices()))
        return jnp.concatenate([self.mma.plus_product(*part) for part in parts])

    def row_array(self, array: KernelArray, smem: Any, shape: tuple[int, int]) -> Any:
        """Loads an array's values for a key block, [keys of all parts], broadcast to a tile of logits."""
        keys = shape[1]
        if not self.mma.interpret:
            return array.load(smem.at[pl.ds(self._own() * keys, keys)], shape, TILE)
        return array.restore(jnp.repeat(smem[...].reshape(self.count, keys), self.queries, axis=0))

    def merged(self, combine: Any, x: Any, smem: Any) -> Any:
        """Returns x [64] combined over the rows of one query, by way of `smem`, [128] float32, which all have written to.

        `combine`: of two arrays, such as `jnp.maximum`.
        """
        total = x
        for i in range(1, self.count):  # in `smem`, x lies twice, one after the other
            total = combine(total, plgpu.load(smem.at[pl.ds(i * self.queries, ROWS)], layout=TILE.reduce(1)))
        return total

    def _rows(self, part):
        return pl.ds(part * self.queries, self.queries)

    def _slices(self):
        return [slice(i, i + self.queries) for i in range(0, ROWS, self.queries)]

    def _own(self):
        """The part of this thread: a number that differs between warps, which only addresses are made of."""
        if self.count == 1:
            return 0

        def number(_):
            i32 = ir.IntegerType.get_signless(32)
            thread = arith.remui(mgpu.thread_idx(), mgpu.c(128, i32))
            return mgpu.FragmentedArray.splat(arith.divui(thread, mgpu.c(2 * self.queries, i32)), (), is_signed=True)

        scalar: Any = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
        run: Any = plgpu.inline_mgpu(return_type=scalar)(number)
        return run()
