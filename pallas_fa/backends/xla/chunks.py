"""Splits the query and key axes into chunks, over which implementations in plain JAX loop: no T x S array is stored.

If the chunk size does not divide an axis, its last chunk starts early enough to fit, and masks its overlap with the chunk
before: nothing is padded.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.operands import intervals
from pallas_fa.problem import Problem

# Logits in a tile, for one batch entry and head: as many as the longer input has elements, so that memory stays
# proportional to the inputs; at least _FEW_LOGITS over all batch entries and heads, since loop overhead dominates below;
# at most _CHUNK_LOGITS. Decision record: xla/chunk-size.
_CHUNK_LOGITS = 512**2
_FEW_LOGITS = 2**19
_MIN_CHUNK, _MAX_CHUNK = 64, 1024
SYMBOLIC = 512  # what a symbolic size counts for in the choice of chunks


@dataclasses.dataclass(frozen=True)
class Chunks:
    """One sequence axis, split into chunks.

    Attributes:
      axis: its index in [B, N, T, S].
      size: its size.
      chunk: the size of a chunk.
    """

    axis: int
    size: int
    chunk: int

    @property
    def count(self) -> int:
        """The number of chunks."""
        return -(-self.size // self.chunk)

    @property
    def is_whole(self) -> bool:
        """Whether one chunk is the whole axis."""
        return isinstance(self.size, int) and self.chunk == self.size

    @property
    def last(self) -> Any:
        """`count` as the end of a loop, int32."""
        return np.int32(self.count) if isinstance(self.count, int) else jnp.asarray(self.count, jnp.int32)

    @property
    def whole_chunks(self) -> int:
        """The size, rounded up to whole chunks if it is symbolic."""
        return self.size if isinstance(self.size, int) else self.count * self.chunk

    def start(self, i: Any) -> Any:
        """Returns the start of chunk i, int32 (also where 64-bit types are enabled)."""
        start = jnp.int32(i) * self.chunk
        return start if self.size % self.chunk == 0 else intervals.minimum(start, self.size - self.chunk)

    def index(self, i: Any) -> Any:
        """Returns the positions of chunk i, broadcastable to [B, N, T, S]."""
        shape = tuple(self.chunk if axis == self.axis else 1 for axis in range(4))
        return self.start(i) + lax.broadcasted_iota(jnp.int32, shape, self.axis)

    def mask_overlap(self, x: Any, i: Any) -> Any:
        """Returns logits x of chunk i, -inf at positions that belong to the chunk before."""
        return x if self.size % self.chunk == 0 else jnp.where(self.index(i) >= i * self.chunk, x, -jnp.inf)

    def cut(self, x: Any, i: Any, axis: int | None = None) -> Any:
        """Returns chunk i of x along `axis`, or x where its size along the axis is 1."""
        axis = self.axis if axis is None else axis
        if x.shape[axis] == 1 or self.is_whole:
            return x
        return lax.dynamic_slice_in_dim(x, self.start(i), self.chunk, axis, allow_negative_indices=False)

    def replace(self, x: Any, update: Any, i: Any, axis: int) -> Any:
        """Returns x with another chunk.

        Args:
          x: an array of this axis' size along `axis`.
          update: the new chunk.
          i: its index.
          axis: an axis of x.
        """
        if self.is_whole:
            return update
        return lax.dynamic_update_slice_in_dim(x, update, self.start(i), axis, allow_negative_indices=False)

    def add(self, x: Any, update: Any, i: Any, axis: int | None = None) -> Any:
        """Adds to a chunk of x: the transpose of `cut`.

        Args:
          x: an array of this axis' size along `axis`.
          update: is added to the chunk.
          i: index of the chunk.
          axis: an axis of x; None for `self.axis`.
        """
        axis = self.axis if axis is None else axis
        return self.replace(x, self.cut(x, i, axis) + update, i, axis)

    def stack(self, x: Any, axis: int) -> Any:
        """Stacks all chunks of x along `axis`: [count, ...]."""
        split = lambda x: jnp.moveaxis(x.reshape(*x.shape[:axis], -1, self.chunk, *x.shape[axis + 1 :]), axis, 0)
        if self.size % self.chunk == 0:
            return split(x)
        before = lax.slice_in_dim(x, 0, (self.count - 1) * self.chunk, axis=axis)
        last = lax.slice_in_dim(x, self.size - self.chunk, self.size, axis=axis)
        return jnp.concatenate([split(before), last[None]])

    def unstack(self, chunks: Any, axis: int) -> Any:
        """Joins the chunks [count, ...] along `axis`: the inverse of `stack`."""
        before = jnp.moveaxis(chunks[:-1], 0, axis)
        before_size = (self.count - 1) * self.chunk
        before = before.reshape(*before.shape[:axis], before_size, *before.shape[axis + 2 :])
        last = lax.slice_in_dim(chunks[-1], self.chunk - (self.size - before_size), self.chunk, axis=axis)
        return jnp.concatenate([before, last], axis)


def split_axes(problem: Problem) -> tuple[Chunks, Chunks]:
    """Returns the query and key axes in chunks. Tiles are square, but long along one axis where the other is short."""
    dims = problem.dims
    B, T, S, N = (x if isinstance(x, int) else SYMBOLIC for x in (dims.B, dims.T, dims.S, dims.N))
    logits = min(max(max(T, S) * problem.H, _FEW_LOGITS // (B * N), 128**2), _CHUNK_LOGITS)
    side = max(2 ** int(math.log2(logits) / 2), _MIN_CHUNK)
    q_chunk, kv_chunk = (min(max(side, side**2 // other), _MAX_CHUNK) for other in (S, T))
    page = problem.pages.size if problem.pages else 16
    return Chunks(2, dims.T, even_chunk(T, q_chunk)), Chunks(3, dims.S, even_chunk(S, kv_chunk, page))


def even_chunk(size: int, largest: int, unit: int = 16) -> int:
    """Returns the size of equal chunks, as few as chunks of size `largest`; a multiple of `unit` if there are several."""
    count = -(-size // largest)
    return size if count == 1 else -(-size // (unit * count)) * unit
