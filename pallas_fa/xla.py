"""Attention in chunks with an online softmax, in plain JAX: any platform, any float dtype, O(T) memory.

Forward (Milakov and Gimelshein, arXiv 1805.02867; Rabe and Staats, arXiv 2112.05682): for each chunk of queries, a loop
over the chunks of keys that the mask does not rule out. Backward (Dao et al., arXiv 2205.14135): the same chunks with
the probabilities recomputed from the log-sum-exp. The last chunk of an axis starts earlier where its size does not
divide the axis, and leaves out the positions that the chunk before has done; so nothing is padded.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa import masks, ranges, reference, tile
from pallas_fa.problem import Problem
from pallas_fa.scores import float_arrays, with_float_arrays

_CHUNK_LOGITS = 2**21  # logits of one pair of chunks, all batch entries and heads together
_MIN_CHUNK, _MAX_CHUNK = 64, 512


def supports(problem: Problem) -> str | None:
    """None if this implementation can do `problem`, else the reason why not."""
    if problem.config is not None:
        return f"xla has no tiles to configure, but config={problem.config!r} was given"
    return None


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """One sequence axis in chunks: `axis` of [B, N, T, S], its size, the size of a chunk."""

    axis: int
    size: int
    chunk: int

    @property
    def count(self) -> int:
        return -(-self.size // self.chunk)

    def start(self, i: Any) -> Any:
        """Where chunk i starts; the last one so early that it fits."""
        return ranges.minimum(i * self.chunk, self.size - self.chunk)

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
        return x if x.shape[axis] == 1 else lax.dynamic_slice_in_dim(x, self.start(i), self.chunk, axis)

    def add(self, x: Any, update: Any, i: Any, axis: int | None = None) -> Any:
        """x with `update` added to its chunk i: the transpose of `cut`."""
        axis = self.axis if axis is None else axis
        return lax.dynamic_update_slice_in_dim(x, self.cut(x, i, axis) + update, self.start(i), axis)


def _chunks(problem: Problem) -> tuple[_Chunks, _Chunks]:
    """The query and the key axis in chunks, so that a pair of chunks has about _CHUNK_LOGITS logits."""
    dims = problem.dims
    budget = max(_CHUNK_LOGITS // (dims.B * dims.N), _MIN_CHUNK**2)
    side = 2 ** int(math.log2(budget) / 2)
    q_chunk = min(dims.T, side, _MAX_CHUNK)
    kv_chunk = min(dims.S, max(side, budget // q_chunk))
    return _Chunks(2, dims.T, q_chunk), _Chunks(3, dims.S, kv_chunk)


def _visits(ask: Any, own: _Chunks, other: _Chunks) -> tuple[Any, Any]:
    """For each chunk of `own`, the first and the last (exclusive) chunk of `other` that any batch entry needs."""
    if ask is None:
        return jnp.zeros(own.count, jnp.int32), jnp.full(own.count, other.count, jnp.int32)
    starts = np.minimum(np.arange(own.count) * own.chunk, own.size - own.chunk)
    lo, hi = (jnp.clip(jnp.asarray(x, jnp.int32), 0, other.size) for x in ask(starts, starts + own.chunk))
    needed = lo < hi
    lo, hi = jnp.where(needed, lo, other.size), jnp.where(needed, hi, 0)
    lo, hi = (jnp.broadcast_to(x, (*x.shape[:-1], own.count)).reshape(-1, own.count) for x in (lo, hi))
    return jnp.min(lo, axis=0) // other.chunk, -(-jnp.max(hi, axis=0) // other.chunk)


def forward(problem: Problem, q: Any, k: Any, v: Any, score: Any, mask: Any) -> tuple[Any, Any]:
    """(out [B, T, N, Hv] in the inputs' dtype, log-sum-exp [B, T, N])."""
    B, T, N = problem.dims.B, problem.dims.T, problem.dims.N
    if 0 in (B, T, N, problem.dims.S):
        return reference.attention(problem, q, k, v, score, mask)  # nothing to compute, and no chunk of size 0
    q, k, v = _prepare(problem, q, k, v, mask)
    queries, keys = _chunks(problem)
    first, last = _visits(mask and mask.kv_range, queries, keys)

    def q_step(i, outputs):
        q_i = queries.cut(q, i, 2)

        def kv_step(j, carry):
            state, acc = carry
            slices = _slices(score, queries, i, keys, j)
            x = problem.scale * _qk(problem, q_i, keys.cut(k, j, 2))
            x = keys.only_new(_masked_scores(x, slices, mask, queries, i, keys, j), j)
            state, p, rescale = tile.softmax_step(state, x)
            return state, acc * rescale[..., None] + _pv(problem, p, keys.cut(v, j, 2))

        rows = q_i.shape[:3]
        start = tile.softmax_start(rows, problem.acc_dtype), jnp.zeros((*rows, problem.Hv), problem.acc_dtype)
        state, acc = lax.fori_loop(first[i], last[i], kv_step, start)
        factor, lse_i = tile.softmax_finish(state)
        results = (acc * factor[..., None]).astype(problem.dtype), lse_i
        # Rows that two chunks share are complete in both: it does no harm that they are written twice.
        return tuple(
            lax.dynamic_update_slice_in_dim(x, jnp.swapaxes(x_i, 1, 2), queries.start(i), 1)
            for x, x_i in zip(outputs, results, strict=True)
        )

    start = jnp.zeros((B, T, N, problem.Hv), problem.dtype), jnp.zeros((B, T, N), problem.acc_dtype)
    return lax.fori_loop(0, queries.count, q_step, start)


def backward(
    problem: Problem, q: Any, k: Any, v: Any, score: Any, mask: Any, out: Any, lse: Any, d_out: Any, d_lse: Any
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """(dq, dk, dv, gradients of the score's float arrays in the order of its leaves), each in its array's dtype."""
    arrays, acc_dtype = float_arrays(score), problem.acc_dtype
    if 0 in (problem.dims.B, problem.dims.T, problem.dims.N, problem.dims.S):
        return jax.tree.map(jnp.zeros_like, (q, k, v, arrays))
    lengths = masks.lengths_of(mask)
    d_out = tile.zero_padding(d_out, lengths.q_lengths)
    d_lse = tile.zero_padding(d_lse[..., None], lengths.q_lengths)[..., 0]
    # The row sums of p * dp, had from `out` without a pass over the logits; the cotangent of lse enters beside them.
    delta = jnp.sum(out.astype(acc_dtype) * d_out.astype(acc_dtype), axis=-1) - d_lse
    delta, lse, d_out = (jnp.swapaxes(x, 1, 2) for x in (delta, lse, d_out.astype(_matmul_dtype(problem))))
    q, k, v = _prepare(problem, q, k, v, mask)
    queries, keys = _chunks(problem)
    first, last = _visits(mask and mask.q_range, keys, queries)

    def kv_step(j, carry):
        k_j, v_j = (keys.cut(x, j, 2) for x in (k, v))

        def q_step(i, carry):
            dq, dk_j, dv_j, d_arrays = carry
            q_i, d_out_i, lse_i, delta_i = (queries.cut(x, i, 2) for x in (q, d_out, lse, delta))

            def scores(x, slices):
                return _masked_scores(x, with_float_arrays(score_ij, slices), mask, queries, i, keys, j)

            score_ij = _slices(score, queries, i, keys, j)
            x, pullback = jax.vjp(scores, problem.scale * _qk(problem, q_i, k_j), float_arrays(score_ij))
            p = tile.probabilities(queries.only_new(keys.only_new(x, j), i), lse_i)
            dx, d_slices = pullback(p * (_qk(problem, d_out_i, v_j) - delta_i[..., None]))
            dx = dx * problem.scale
            d_arrays = tuple(
                _add_slice(d, d_slice, queries, i, keys, j) for d, d_slice in zip(d_arrays, d_slices, strict=True)
            )
            dq = queries.add(dq, _pv(problem, dx, k_j), i, 2)
            return dq, dk_j + _ptx(problem, dx, q_i), dv_j + _ptx(problem, p, d_out_i), d_arrays

        dq, dk, dv, d_arrays = carry
        zeros = (jnp.zeros(x.shape, acc_dtype) for x in (k_j, v_j))
        dq, dk_j, dv_j, d_arrays = lax.fori_loop(first[j], last[j], q_step, (dq, *zeros, d_arrays))
        return dq, keys.add(dk, dk_j, j, 2), keys.add(dv, dv_j, j, 2), d_arrays

    zeros = tuple(jnp.zeros(x.shape, acc_dtype) for x in (q, k, v))
    d_arrays = tuple(jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)) for a in arrays)
    dq, dk, dv, d_arrays = lax.fori_loop(0, keys.count, kv_step, (*zeros, d_arrays))
    dq, dk, dv = (jnp.swapaxes(x, 1, 2).astype(problem.dtype) for x in (dq, dk, dv))
    return dq, dk, dv, tuple(d.astype(a.dtype) for d, a in zip(d_arrays, arrays, strict=True))


def _matmul_dtype(problem):
    """What the matmuls read: the inputs' dtype; float32 for 8-bit floats, which few platforms multiply."""
    return problem.dtype if problem.dtype.itemsize > 1 else jnp.float32


def _prepare(problem, q, k, v, mask):
    """q [B, N, T, H], k [B, K, S, H], v [B, K, S, Hv], padding zeroed."""
    lengths = masks.lengths_of(mask)
    padded = ((q, lengths.q_lengths), (k, lengths.kv_lengths), (v, lengths.kv_lengths))
    return tuple(jnp.swapaxes(tile.zero_padding(x, n), 1, 2).astype(_matmul_dtype(problem)) for x, n in padded)


def _slices(tree, queries, i, keys, j):
    """A bound score or mask with its arrays cut to the pair of chunks (i, j)."""
    return jax.tree.map(lambda x: keys.cut(queries.cut(x, i), j), tree)


def _masked_scores(x, score_ij, mask, queries, i, keys, j):
    """Logits of the pair of chunks (i, j), scored and masked; `score_ij` holds slices already."""
    b, n = (lax.broadcasted_iota(jnp.int32, (size, 1, 1, 1), 0) for size in x.shape[:2])
    mask_ij = _slices(mask, queries, i, keys, j)
    return tile.masked_scores(x, score_ij, mask_ij, b, n.reshape(1, -1, 1, 1), queries.index(i), keys.index(j))[0]


def _add_slice(d, d_slice, queries, i, keys, j):
    """Gradient d of a whole array, with the gradient of its slice for (i, j) added."""
    starts = [0, 0, 0, 0]
    for chunks, n in ((queries, i), (keys, j)):
        if d.shape[chunks.axis] > 1:
            starts[chunks.axis] = chunks.start(n)
    old = lax.dynamic_slice(d, starts, d_slice.shape)
    return lax.dynamic_update_slice(d, old + d_slice.astype(d.dtype), starts)


def _qk(problem, a, b):
    """[B, N, T, H] x [B, K, S, H] -> [B, N, T, S]: query head n against key head n // (N // K)."""
    return _grouped_matmul(problem, a, b, 3)


def _pv(problem, p, b):
    """[B, N, T, S] x [B, K, S, H] -> [B, N, T, H]."""
    return _grouped_matmul(problem, p, b, 2)


def _grouped_matmul(problem, a, b, contracted):
    B, N, T, _ = a.shape
    a = a.astype(b.dtype).reshape(B, problem.K, -1, a.shape[-1])
    dimensions = (((3,), (contracted,)), ((0, 1), (0, 1)))
    result = lax.dot_general(a, b, dimensions, precision=problem.precision, preferred_element_type=problem.acc_dtype)
    return result.reshape(B, N, T, -1)


def _ptx(problem, p, x):
    """[B, N, T, S] x [B, N, T, H] -> [B, K, S, H], summed over T and the query heads of a group."""
    p, x = (y.astype(x.dtype).reshape(y.shape[0], problem.K, -1, y.shape[-1]) for y in (p, x))
    dimensions = (((2,), (2,)), ((0, 1), (0, 1)))
    return lax.dot_general(p, x, dimensions, precision=problem.precision, preferred_element_type=problem.acc_dtype)
