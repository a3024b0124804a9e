"""Float32 sums of dQ in device memory, to which each CTA of the fused pass adds a tile in each step."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa.backends.gpu.addresses import as_global, i32, thread_index
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.layout import Layout, ordered

_QUERIES, _COLUMNS = 8, 8  # of a piece
_FLOAT = 4  # bytes


@dataclasses.dataclass(frozen=True)
class DqSums:
    """The sums, [B, N, pieces of 8 queries, pieces of 8 columns, 2, 4, 8].

    What the 32 threads of a warp hold of a tile of dQ^T in one register each lies together: query 2 j + i of a piece, and a
    column, at [i, j, column].

    Args:
      dims: sizes of the problem.
      layout: that of the queries.
      dim: columns of the queries.
      padded_dim: those of a tile.
      queries: those of all tiles.
      key_blocks: CTAs of a head.
      interpret: JAX's interpreter can't add to device memory: there each CTA has sums of its own, [key blocks, B, N,
        queries, columns].
    """

    dims: Dims
    layout: Layout
    dim: int
    padded_dim: int
    queries: int
    key_blocks: int
    interpret: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the sums."""
        lead = self.dims.B, self.dims.N
        if self.interpret:
            return self.key_blocks, *lead, self.queries, self.padded_dim
        return *lead, self.queries // _QUERIES, self.padded_dim // _COLUMNS, 2, 4, 8

    def add(self, gmem: Any, x: Any, b: Any, n: Any, key_block: Any, first: Any, first_column: int) -> None:
        """Adds a tile of dQ^T, [columns, queries] from these first ones on, of one head."""
        if self.interpret:
            gmem[key_block, b, n, pl.ds(first, x.shape[1]), pl.ds(first_column, x.shape[0])] = x.T
            return

        def add(_, sums, x):
            thread = thread_index()
            warp, lane = arith.divui(thread, i32(32)), arith.remui(thread, i32(32))
            column, query = arith.divui(lane, i32(4)), arith.remui(lane, i32(4))
            place = arith.addi(arith.muli(query, i32(8)), column)
            offset = arith.addi(arith.muli(warp, i32(2 * 64)), place)
            pointer = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(sums), [offset], ir.F32Type.get())
            pointer = as_global(pointer)
            tiles, pieces = x.shape[0] // 64, x.shape[1] // _QUERIES
            registers = x.registers.reshape(tiles, pieces, 2)
            for tile, piece, half in np.ndindex(*registers.shape):
                for i in range(2):
                    value = llvm.extractelement(registers[tile, piece, half], i32(i))
                    column_piece = first_column // _COLUMNS + tile * 8 + half
                    at = (piece * (self.padded_dim // _COLUMNS) + column_piece) * 64 + i * 32
                    text = f"red.relaxed.gpu.global.add.f32 [$0+{at * _FLOAT}], $1;"
                    llvm.inline_asm(ir.Type.parse("!llvm.void"), [pointer, value], text, "l,f", has_side_effects=True)

        run: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), TILE))(add)
        pieces = pl.ds(lax.div(first, jnp.int32(_QUERIES)), x.shape[1] // _QUERIES)
        run(gmem.at[b, n, pieces], x)

    def total(self, sums: Any, scale: float, dtype: Any) -> Any:
        """Returns dQ, from the sums and what they are multiplied by."""
        found = sums.sum(axis=0) if self.interpret else self._in_rows(sums)
        found = found if self.layout == "BNTH" else jnp.swapaxes(found, 1, 2)
        everything = slice(None)
        present = ordered(self.layout, (everything, slice(self.dims.T), everything, slice(self.dim)))
        return (found[present] * scale).astype(dtype)

    def _in_rows(self, sums):
        """[B, N, queries, columns]"""
        in_order = jnp.transpose(sums, (0, 1, 2, 5, 4, 3, 6))
        return in_order.reshape(self.dims.B, self.dims.N, self.queries, self.padded_dim)
