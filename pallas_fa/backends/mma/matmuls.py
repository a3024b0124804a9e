"""Matmuls on the tensor cores by `mma.sync`, for the GPU and for JAX's interpreter.

A warpgroup multiplies: the left operand and the sums lie in its registers, the right operand comes from shared memory
piece by piece. Tiles of logits are float32 arrays in the layout `gpu.layouts.TILE`. Rounded to 16 bits, the registers of
such an array are those of a left operand, under another name. The interpreter has neither the instruction nor the names.

What accumulates over a loop has the layout `ACCUMULATOR` between the matmuls. From compute capability 10.0 on, LLVM holds
the pairs of TILE in 64-bit registers and multiplies them by `mul.f32x2`; ptxas then spills up to 600 bytes of an
accumulator that otherwise fits. Evidence: forward/mma-accumulators.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.mma import narrow
from pallas_fa.backends.mma.tiles import row_bytes

# The elements of TILE in the same threads, one in a register instead of two.
ACCUMULATOR = plgpu.Layout.TILED(
    mgpu.fragmented_array.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)
_K = 16  # of one instruction
_CHUNK = 64  # columns of the head dim that are in registers at a time


@dataclasses.dataclass(frozen=True)
class Mma:
    """Matmuls of operands of one dtype."""

    dtype: np.dtype
    interpret: bool

    def zeros(self, *shape: int) -> Any:
        """Returns sums [rows, columns], or one value per row, that start at 0."""
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), TILE if len(shape) == 2 else TILE.reduce(1))

    def accumulator(self, *shape: int) -> Any:
        """Returns sums [rows, columns] for `plus_product` that start at 0."""
        return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), ACCUMULATOR)

    def times_rows(self, acc: Any, factor: Any) -> Any:
        """Returns an accumulator [rows, columns], each row multiplied by its own factor [rows]."""
        return acc * plgpu.layout_cast(lax.broadcast_in_dim(factor, acc.shape, [0]), ACCUMULATOR)

    def accumulated(self, acc: Any) -> Any:
        """Returns what an accumulator holds, as a tile to store."""
        return plgpu.layout_cast(acc, TILE)

    def as_tile(self, x: Any) -> Any:
        """Returns `x` [rows, columns] as a tile: what a custom function gives may be one number for all of its elements."""
        return x if self.interpret else plgpu.layout_cast(x, TILE)

    def left_operand(self, a: Any) -> Any:
        """Returns `a` [rows, dim] in shared memory as a left operand of `inner_products` in registers."""
        return a[...] if self.interpret else plgpu.load(a, layout=self._lhs)

    def inner_products(self, a: Any, b: Any) -> Any:
        """Returns a b^T of a [rows, dim], in shared memory or a `left_operand`, and b [columns, dim] in shared memory."""
        if self.interpret:
            return _dot(a[...], b[...].T.astype(self.dtype))
        x = self.zeros(a.shape[0], b.shape[0])
        for c in range(0, a.shape[1], _CHUNK):
            end = min(c + _CHUNK, a.shape[1])
            chunk = pl.ds(c, end - c)
            left = a[:, c:end] if isinstance(a, jax.Array) else plgpu.load(a.at[:, chunk], layout=self._lhs)
            x = plgpu.mma(x, left, self._turned(b, c, end))
        return x

    def _turned(self, b, start, end):
        """Columns of `b` [columns, dim] in shared memory as a right operand [end - start, columns]."""
        if b.dtype != self.dtype:
            return narrow.keys(b, start, end - start, row_bytes(b.dtype, b.shape[1]), self.dtype)
        return plgpu.load(b.at[:, pl.ds(start, end - start)].transpose((1, 0)), layout=self._rhs)

    def plus_product(self, acc: Any, x: Any, b: Any) -> Any:
        """Returns an accumulator plus x b.

        `x`: [rows, positions], rounded here if it is float32. `b`: [positions, dim] in shared memory.
        """
        x = x.astype(self.dtype)
        if self.interpret:
            return acc + _dot(x, b[...].astype(self.dtype))
        acc = plgpu.layout_cast(acc, TILE)
        for c in range(0, x.shape[1], _K):
            left = self._as_left(x[:, c : c + _K])
            acc = plgpu.mma(acc, left, self._rows(b, c))
        return plgpu.layout_cast(acc, ACCUMULATOR)

    def _rows(self, b, start):
        """Rows of `b` [positions, dim] in shared memory as a right operand [_K, dim]."""
        if b.dtype != self.dtype:
            return narrow.values(b, start, _K, row_bytes(b.dtype, b.shape[1]), self.dtype)
        return plgpu.load(b.at[pl.ds(start, _K)], layout=self._rhs)

    def plus_products(self, acc: Any, x: Any, b: Any) -> Any:
        """Returns an accumulator plus x b.

        `x`: [parts, rows, positions] in shared memory, one part of all positions after the other. `b`: [all positions, dim]
        in shared memory.
        """
        parts, _, count = x.shape
        if self.interpret:
            return acc + sum(_dot(x[i], b[pl.ds(i * count, count)]) for i in range(parts))
        acc = plgpu.layout_cast(acc, TILE)
        for i in range(parts):
            left = plgpu.load(x.at[i], layout=self._lhs)
            for c in range(0, count, _K):
                right = plgpu.load(b.at[pl.ds(i * count + c, _K)], layout=self._rhs)
                acc = plgpu.mma(acc, left[:, c : c + _K], right)
        return plgpu.layout_cast(acc, ACCUMULATOR)

    def product_of_columns(self, a: Any, b: Any) -> Any:
        """Returns a^T b of a [positions, rows] and b [positions, columns] in shared memory."""
        if self.interpret:
            return _dot(a[...].T, b[...])
        x = self.zeros(a.shape[1], b.shape[1])
        for c in range(0, a.shape[0], _K):
            left = plgpu.load(a.at[pl.ds(c, _K)].transpose((1, 0)), layout=self._lhs)
            x = plgpu.mma(x, left, plgpu.load(b.at[pl.ds(c, _K)], layout=self._rhs))
        return x

    @functools.cached_property
    def _lhs(self):
        return plgpu.Layout.MMA_LHS(self.dtype)

    @functools.cached_property
    def _rhs(self):
        return plgpu.Layout.MMA_RHS(self.dtype)

    def _as_left(self, x):
        layout = self._lhs

        def relabel(_, x):
            target = layout.to_mgpu()
            registers = x.registers.reshape(target.registers_shape(x.shape))
            return mgpu.FragmentedArray(_registers=registers, _layout=target, _is_signed=x.is_signed)

        left: Any = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout)
        run: Any = plgpu.inline_mgpu(arg_types=(TILE,), return_type=left)(relabel)
        return run(x)


def _dot(a, b):
    return jnp.dot(a, b, preferred_element_type=jnp.float32)
