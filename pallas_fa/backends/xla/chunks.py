"""The query and the key axis in chunks: what the implementations in plain JAX loop over, so as to store no T x S array.

The last chunk of an axis starts earlier where its size does not divide the axis, and leaves out the positions that the
chunk before has done; so nothing is padded.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.masks import Mask
from pallas_fa.operands import intervals
from pallas_fa.problem import Problem
from pallas_fa.softmax import tile

# How many logits a pair of chunks has, for one batch entry and head: as many as its longer input has elements, so that
# memory stays in proportion to the inputs; more where all entries and heads together would have fewer than
# _FEW_LOGITS, since then the loops themselves cost; never more than _CHUNK_LOGITS. benchmarks/NOTES.md has the timings.
_CHUNK_LOGITS = 512**2
_FEW_LOGITS = 2**19
_MIN_CHUNK, _MAX_CHUNK = 64, 1024


@dataclasses.dataclass(frozen=True)
class Chunks:
    """One sequence axis in chunks: `axis` of [B, N, T, S], its size, the size of a chunk."""

    axis: int
    size: int
    chunk: int

    @property
    def count(self) -> int:
        return -(-self.size // self.chunk)

    def start(self, i: Any) -> Any:
        """Where chunk i starts, int32 (with 64-bit types enabled too); the last one so early that it fits."""
        start = jnp.int32(i) * self.chunk
        return start if self.size % self.chunk == 0 else intervals.minimum(start, self.size - self.chunk)

    def index(self, i: Any) -> Any:
        """Positions of chunk i, broadcastable to [B, N, T, S]."""
        shape = tuple(self.chunk if axis == self.axis else 1 for axis in range(4))
        return self.start(i) + lax.broadcasted_iota(jnp.int32, shape, self.axis)

    def only_new(self, x: Any, i: Any) -> Any:
        """Logits x with -inf at the positions of chunk i that the chunk before has done."""
        return x if self.size % self.chunk == 0 else jnp.where(self.index(i) >= i * self.chunk, x, -jnp.inf)

    def cut(self, x: Any, i: Any, axis: int | None = None) -> Any:
        """Chunk i of x along `axis`; x as it is where it does not span the axis."""
        axis = self.axis if axis is None else axis
        if x.shape[axis] == 1:
            return x
        return lax.dynamic_slice_in_dim(x, self.start(i), self.chunk, axis, allow_negative_indices=False)

    def put(self, x: Any, update: Any, i: Any, axis: int) -> Any:
        """x with `update` in the place of its chunk i."""
        return lax.dynamic_update_slice_in_dim(x, update, self.start(i), axis, allow_negative_indices=False)

    def add(self, x: Any, update: Any, i: Any, axis: int | None = None) -> Any:
        """x with `update` added to its chunk i: the transpose of `cut`."""
        axis = self.axis if axis is None else axis
        return self.put(x, self.cut(x, i, axis) + update, i, axis)

    def stacked(self, x: Any, axis: int) -> Any:
        """All chunks of x along `axis`: [count, ...]."""
        split = lambda x: jnp.moveaxis(x.reshape(*x.shape[:axis], -1, self.chunk, *x.shape[axis + 1 :]), axis, 0)
        if self.size % self.chunk == 0:
            return split(x)
        before = lax.slice_in_dim(x, 0, (self.count - 1) * self.chunk, axis=axis)
        last = lax.slice_in_dim(x, self.size - self.chunk, self.size, axis=axis)
        return jnp.concatenate([split(before), last[None]])

    def joined(self, parts: Any, axis: int) -> Any:
        """x of its chunks `stacked` along `axis`."""
        before = jnp.moveaxis(parts[:-1], 0, axis)
        done = (self.count - 1) * self.chunk
        before = before.reshape(*before.shape[:axis], done, *before.shape[axis + 2 :])
        new = lax.slice_in_dim(parts[-1], self.chunk - (self.size - done), self.chunk, axis=axis)
        return jnp.concatenate([before, new], axis)


def of_problem(problem: Problem) -> tuple[Chunks, Chunks]:
    """The query and the key axis in chunks: square ones, but long ones of the other axis where one is short."""
    B, T, S, N = problem.dims.B, problem.dims.T, problem.dims.S, problem.dims.N
    logits = min(max(max(T, S) * problem.H, _FEW_LOGITS // (B * N), 128**2), _CHUNK_LOGITS)
    side = max(2 ** int(math.log2(logits) / 2), _MIN_CHUNK)
    q_chunk, kv_chunk = (min(max(side, side**2 // other), _MAX_CHUNK) for other in (S, T))
    return Chunks(2, T, _even_chunk(T, q_chunk)), Chunks(3, S, _even_chunk(S, kv_chunk))


def _even_chunk(size: int, largest: int) -> int:
    """The size of as few chunks as chunks of `largest` would be, all alike but for a multiple of 16."""
    count = -(-size // largest)
    return size if count == 1 else -(-size // (16 * count)) * 16


def visits(
    mask: Mask | None, question: Literal["kv_range", "q_range"], own: Chunks, other: Chunks
) -> Callable[[Any], tuple[Any, Any]]:
    """A function of a chunk of `own`: the first and the last (exclusive) chunk of `other` that any batch entry needs."""
    if mask is None:
        return lambda i: (np.int32(0), np.int32(other.count))
    starts = np.minimum(np.arange(own.count) * own.chunk, own.size - own.chunk)
    lo, hi = getattr(mask, question)(starts, starts + own.chunk)
    xnp = intervals.array_module(lo, hi)
    lo, hi = xnp.maximum(xnp.asarray(lo, np.int32), 0), xnp.minimum(xnp.asarray(hi, np.int32), other.size)
    needed = lo < hi
    lo, hi = xnp.where(needed, lo, other.size), xnp.where(needed, hi, 0)
    lo, hi = (xnp.broadcast_to(x, (*x.shape[:-1], own.count)).reshape(-1, own.count) for x in (lo, hi))
    divide = np.floor_divide if xnp is np else lax.div  # nothing here is negative, and `//` is ten operations of XLA
    chunk = np.int32(other.chunk)
    first, last = divide(lo.min(axis=0), chunk), divide(hi.max(axis=0) + (chunk - 1), chunk)
    at = lambda x, i: lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False)
    return lambda i: (at(first, i), at(last, i))


def slices(tree: Any, queries: Chunks, i: Any, keys: Chunks, j: Any) -> Any:
    """A bound score or mask with its arrays cut to the pair of chunks (i, j)."""
    return jax.tree.map(lambda x: keys.cut(queries.cut(x, i), j), tree)


def masked_scores(x: Any, score_ij: Any, mask: Any, queries: Chunks, i: Any, keys: Chunks, j: Any) -> Any:
    """Logits x [B, N, t, s] of the pair of chunks (i, j), scored and masked; `score_ij` holds slices already."""
    if score_ij is None and mask is None:
        return x
    B, N = x.shape[:2]
    b, n = lax.broadcasted_iota(jnp.int32, (B, 1, 1, 1), 0), lax.broadcasted_iota(jnp.int32, (1, N, 1, 1), 1)
    mask_ij = slices(mask, queries, i, keys, j)
    return tile.masked_scores(x, score_ij, mask_ij, b, n, queries.index(i), keys.index(j))[0]


def add_slice(d: Any, d_slice: Any, queries: Chunks, i: Any, keys: Chunks, j: Any) -> Any:
    """Gradient d of a whole array, with the gradient of its slice for (i, j) added."""
    starts = [jnp.int32(0)] * 4
    for chunks, n in ((queries, i), (keys, j)):
        if d.shape[chunks.axis] > 1:
            starts[chunks.axis] = chunks.start(n)
    old = lax.dynamic_slice(d, starts, d_slice.shape, allow_negative_indices=False)
    return lax.dynamic_update_slice(d, old + d_slice.astype(d.dtype), starts, allow_negative_indices=False)
