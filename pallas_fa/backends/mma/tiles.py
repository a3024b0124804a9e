"""Tiles of q, k, v, out and their gradients in shared memory, swizzled so that ldmatrix reads them without conflicts."""

import dataclasses
from typing import Any

import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.shared_memory import swizzle
from pallas_fa.backends.mma.copies import Copies
from pallas_fa.operands.layout import Layout, ordered


def columns(dim: int) -> int:
    """Returns the columns that a head dim takes in tables of tiles: a multiple of 64."""
    return -(-dim // 64) * 64


def row_bytes(dtype: Any, dim: int) -> int:
    """Returns how many bytes of a row of `dim` elements lie together: 128, or 64 where 8-bit rows are odd numbers of 64."""
    return 64 if np.dtype(dtype).itemsize == 1 and columns(dim) % 128 else 128


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How tiles of one operand, [B, length, heads, dim] in the order of `layout`, lie in shared memory."""

    length: int
    dim: int
    dtype: np.dtype
    layout: Layout
    interpret: bool
    block: int  # positions from one block to the next: of all warpgroups, where each has a tile

    @property
    def width(self) -> int:
        """Bytes of a row that lie together in shared memory."""
        return row_bytes(self.dtype, self.dim)

    @property
    def padded_dim(self) -> int:
        """The head dim rounded up to whole pieces of rows; the columns past it are 0. The interpreter has no layouts."""
        return self.dim if self.interpret else columns(self.dim)

    def scratch(self, *lead: int, rows: int) -> Any:
        """Returns shared memory for tiles of `rows` rows, with leading dims `lead`."""
        transforms = () if self.interpret else swizzle(self.dtype, self.width)
        return plgpu.SMEM((*lead, rows, self.padded_dim), self.dtype, transforms=transforms)

    def load(self, copies: Copies, gmem: Any, b: Any, first: Any, head: Any, smem: Any, length: Any = None) -> None:
        """Starts copying the rows of one head from row `first` on; those at and past `length` (None: the end) are zeros."""
        limit = self._left(first) if length is None else length - first
        self.load_from(copies, self._part(gmem, b, first, smem.shape[0], head), smem, limit)

    def load_from(self, copies: Copies, gmem: Any, smem: Any, count: Any) -> None:
        """Starts copying rows from `gmem`, [rows, dim]; those from the one number `count` (None: no such) on are zeros."""
        copies.tile(gmem, smem, self.width, count)

    def store(self, copies: Copies, smem: Any, gmem: Any, b: Any, first: Any, head: Any) -> None:
        """Stores a tile to rows of one head; rows outside are dropped."""
        copies.store(smem, self._part(gmem, b, first, smem.shape[0], head), self.width, self._left(first))

    def _left(self, first):
        """How many rows there are from `first` on; None where no block reaches past the last."""
        return None if self.length % self.block == 0 else self.length - first

    def _part(self, gmem, b, first, rows, head):
        return gmem.at[ordered(self.layout, (b, pl.ds(first, rows), head, slice(None)))]
