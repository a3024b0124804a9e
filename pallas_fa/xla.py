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

# How many logits a pair of chunks has, for one batch entry and head: as many as its longer input has elements, so that
# memory stays in proportion to the inputs; more where all entries and heads together would have fewer than
# _FEW_LOGITS, since then the loops themselves cost; never more than _CHUNK_LOGITS. benchmarks/NOTES.md has the timings.
_CHUNK_LOGITS = 512**2
_FEW_LOGITS = 2**19
_MIN_CHUNK, _MAX_CHUNK = 64, 1024


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
        """Where chunk i starts, int32 (with 64-bit types enabled too); the last one so early that it fits."""
        return ranges.minimum(jnp.int32(i) * self.chunk, self.size - self.chunk)

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
    """The query and the key axis in chunks: square ones, but long ones of the other axis where one is short."""
    B, T, S, N = problem.dims.B, problem.dims.T, problem.dims.S, problem.dims.N
    logits = min(max(max(T, S) * problem.H, _FEW_LOGITS // (B * N), 128**2), _CHUNK_LOGITS)
    side = max(2 ** int(math.log2(logits) / 2), _MIN_CHUNK)
    q_chunk, kv_chunk = (min(max(side, side**2 // other), _MAX_CHUNK) for other in (S, T))
    return _Chunks(2, T, _even_chunk(T, q_chunk)), _Chunks(3, S, _even_chunk(S, kv_chunk))


def _even_chunk(size: int, largest: int) -> int:
    """The size of as few chunks as chunks of `largest` would be, all alike but for a multiple of 16."""
    count = -(-size // largest)
    return size if count == 1 else -(-size // (16 * count)) * 16


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
        q_i = _heads_first(queries.cut(q, i, 1))

        def kv_step(j, carry):
            state, acc = carry
            slices = _slices(score, queries, i, keys, j)
            x = problem.scale * _qk(problem, q_i, _heads_first(keys.cut(k, j, 1)))
            x = keys.only_new(_masked_scores(x, slices, mask, queries, i, keys, j), j)
            state, p, rescale = tile.softmax_step(state, x)
            return state, acc * rescale[..., None] + _pv(problem, p, _heads_first(keys.cut(v, j, 1)))

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
    d_out = d_out.astype(_matmul_dtype(problem))
    q, k, v = _prepare(problem, q, k, v, mask)
    queries, keys = _chunks(problem)
    first, last = _visits(mask and mask.q_range, keys, queries)

    def kv_step(j, carry):
        k_j, v_j = (_heads_first(keys.cut(x, j, 1)) for x in (k, v))

        def q_step(i, carry):
            dq, dk_j, dv_j, d_arrays = carry
            q_i, d_out_i, lse_i, delta_i = (_heads_first(queries.cut(x, i, 1)) for x in (q, d_out, lse, delta))

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
            dq = queries.add(dq, _heads_first(_pv(problem, dx, k_j)), i, 1)
            q_ti, d_out_ti = (queries.cut(x, i, 4) for x in (q_t, d_out_t))
            return dq, dk_j + _xp(problem, q_ti, dx), dv_j + _xp(problem, d_out_ti, p), d_arrays

        dq, dk, dv, d_arrays = carry
        zeros = (jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), acc_dtype) for x in (k_j, v_j))
        dq, dk_j, dv_j, d_arrays = lax.fori_loop(first[j], last[j], q_step, (dq, *zeros, d_arrays))
        dk, dv = (keys.add(d, jnp.transpose(d_j, (0, 3, 1, 2)), j, 1) for d, d_j in ((dk, dk_j), (dv, dv_j)))
        return dq, dk, dv, d_arrays

    # No matmul inside of the loops transposes a chunk of logits: on a CPU that takes up to three times as long.
    q_t, d_out_t = (_transposed(problem, x) for x in (q, d_out))
    zeros = tuple(jnp.zeros(x.shape, acc_dtype) for x in (q, k, v))
    d_arrays = tuple(jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)) for a in arrays)
    dq, dk, dv, d_arrays = lax.fori_loop(0, keys.count, kv_step, (*zeros, d_arrays))
    dq, dk, dv = (x.astype(problem.dtype) for x in (dq, dk, dv))
    return dq, dk, dv, tuple(d.astype(a.dtype) for d, a in zip(d_arrays, arrays, strict=True))


def _matmul_dtype(problem):
    """What the matmuls read: the inputs' dtype; float32 for 8-bit floats, which few platforms multiply."""
    return problem.dtype if problem.dtype.itemsize > 1 else jnp.float32


def _prepare(problem, q, k, v, mask):
    """q, k and v as the matmuls read them, padding zeroed."""
    lengths = masks.lengths_of(mask)
    padded = ((q, lengths.q_lengths), (k, lengths.kv_lengths), (v, lengths.kv_lengths))
    return tuple(tile.zero_padding(x, n).astype(_matmul_dtype(problem)) for x, n in padded)


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
    starts = [jnp.int32(0)] * 4
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


def _xp(problem, x, p):
    """[B, K, H, G, T] x [B, N, T, S] -> [B, K, H, S], summed over T and the query heads of a group."""
    B, K, _, G, T = x.shape
    p = p.astype(x.dtype).reshape(B, K, G, T, -1)
    dimensions = (((3, 4), (2, 3)), ((0, 1), (0, 1)))
    return lax.dot_general(x, p, dimensions, precision=problem.precision, preferred_element_type=problem.acc_dtype)


def _heads_first(x):
    """[B, T, N, ...] -> [B, N, T, ...] and back."""
    return jnp.swapaxes(x, 1, 2)


def _transposed(problem, x):
    """[B, T, N, H] -> [B, K, H, G, T]."""
    B, T, _, H = x.shape
    return jnp.transpose(x.reshape(B, T, problem.K, -1, H), (0, 2, 4, 3, 1))
