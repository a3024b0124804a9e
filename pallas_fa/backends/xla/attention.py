"""Computes attention in chunks, with an online softmax, in plain JAX.

Forward (Milakov and Gimelshein, arXiv 1805.02867; Rabe and Staats, arXiv 2112.05682): each query chunk loops over the key
chunks that the mask does not rule out. Backward (Dao et al., arXiv 2205.14135): each key chunk loops over query chunks, and
recomputes the probabilities from the log-sum-exp.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.backends.xla import all_at_once, chunks, plan, rows, tiles
from pallas_fa.backends.xla.cotangents import Cotangents
from pallas_fa.backends.xla.matmuls import (
    cut_keys,
    ds_dtype,
    heads_first,
    prepare,
    pv,
    qk,
    transpose_grouped,
    without_padding,
    xp,
)
from pallas_fa.backends.xla.visits import loop_over_visited
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.scores.base import float_arrays, with_float_arrays
from pallas_fa.softmax import tile
from pallas_fa.softmax.merging import PartialResult


def forward(problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv] in the inputs' dtype, lse [B, T, N])."""
    score, mask = operands.score, operands.mask
    B, T, N = problem.dims.B, problem.dims.T, problem.dims.N
    shape = B, T, N, problem.Hv
    start = jnp.zeros(shape, problem.dtype), PartialResult.empty(shape, problem.acc_dtype, operands.sinks).lse
    if 0 in (B, T, N, problem.dims.S):
        return start  # every row is empty; a chunk of size 0 would divide by 0
    if (queries := plan.whole_rows(problem)) is not None:
        return rows.forward(problem, operands, queries, start)
    if plan.all_at_once(problem):
        return all_at_once.forward(problem, operands)
    lengths = lengths_of(mask)
    q = without_padding(problem, operands.q, lengths.q_lengths)
    queries, keys = chunks.split_axes(problem)
    over_visited = loop_over_visited(mask, "kv_range", queries, keys)

    def q_step(i, outputs):
        q_i = heads_first(queries.cut(q, i, 1))

        def kv_step(j, carry):
            state, acc = carry
            score_ij = tiles.cut_tile(score, queries, i, keys, j)
            cut = lambda x: cut_keys(problem, x, lengths.kv_lengths, keys, j)
            k_j = cut(operands.k)
            v_j = k_j[..., : problem.Hv] if problem.values_in_keys else cut(operands.v)
            x = problem.scale * qk(problem, q_i, k_j)
            x = keys.mask_overlap(tiles.masked_scores(x, score_ij, mask, queries, i, keys, j), j)
            state, p, rescale = tile.softmax_step(state, x)
            p = tiles.dropping(operands.dropout, queries, i, keys, j)(p)
            return state, acc * rescale[..., None] + pv(problem, p, v_j)

        shape = q_i.shape[:3]
        zeros = jnp.zeros((*shape, problem.Hv), problem.acc_dtype)
        start = tile.softmax_start(shape, problem.acc_dtype, operands.sinks)
        state, acc = over_visited(i, kv_step, (start, zeros))
        factor, lse_i = tile.softmax_finish(state)
        results = (acc * factor[..., None]).astype(problem.dtype), lse_i
        # Rows in the overlap of two chunks are written twice, with the same values.
        return tuple(queries.replace(x, heads_first(x_i), i, 1) for x, x_i in zip(outputs, results, strict=True))

    return lax.fori_loop(np.int32(0), queries.last, q_step, start)


def backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    """Returns the gradients of `operands.differentiable`, each in the dtype of its array.

    Args:
      problem: the problem.
      residuals: its operands, out [B, T, N, Hv] and lse [B, T, N].
      d_out: cotangent of out.
      d_lse: cotangent of lse.
    """
    operands, _, lse = residuals
    if 0 in (problem.dims.B, problem.dims.T, problem.dims.N, problem.dims.S):
        d_sinks = Cotangents.of(problem, residuals, d_out, d_lse).d_sinks
        return *map(jnp.zeros_like, (operands.q, operands.k, operands.v, *float_arrays(operands.score))), *d_sinks
    if (queries := plan.whole_rows(problem)) is not None:
        return rows.backward(problem, residuals, d_out, d_lse, queries)
    if plan.all_at_once(problem, backward=True):
        return all_at_once.backward(problem, residuals, d_out, d_lse)
    score, mask = operands.score, operands.mask
    arrays, acc_dtype = float_arrays(score), problem.acc_dtype
    d_out, delta, d_sinks = Cotangents.of(problem, residuals, d_out, d_lse)
    q, k, v = prepare(problem, operands)
    queries, keys = chunks.split_axes(problem)
    over_visited = loop_over_visited(mask, "q_range", keys, queries)

    def kv_step(j, carry):
        k_j, v_j = (heads_first(keys.cut(x, j, 1)) for x in (k, v))

        def q_step(i, carry):
            dq, dk_j, dv_j, d_arrays = carry
            q_i, d_out_i, lse_i, delta_i = (heads_first(queries.cut(x, i, 1)) for x in (q, d_out, lse, delta))

            def scores(x, arrays_ij):
                return tiles.masked_scores(x, with_float_arrays(score_ij, arrays_ij), mask, queries, i, keys, j)

            score_ij = tiles.cut_tile(score, queries, i, keys, j)
            x, pullback = jax.vjp(scores, problem.scale * qk(problem, q_i, k_j), float_arrays(score_ij))
            x = queries.mask_overlap(keys.mask_overlap(x, j), i)
            p = tile.probabilities(jnp.minimum(x, lse_i[..., None]), lse_i)  # bounded as in `softmax.tile`
            drop = tiles.dropping(operands.dropout, queries, i, keys, j)
            dx, d_arrays_ij = pullback(p * (drop(qk(problem, d_out_i, v_j)) - delta_i[..., None]))
            dx = dx * problem.scale
            d_arrays = tuple(
                tiles.add_tile(d, d_ij, queries, i, keys, j) for d, d_ij in zip(d_arrays, d_arrays_ij, strict=True)
            )
            dx = dx.astype(ds_dtype(problem))
            dq = queries.add(dq, heads_first(pv(problem, dx, k_j.astype(dx.dtype))), i, 1)
            q_ti, d_out_ti = (queries.cut(x, i, 4) for x in (q_t, d_out_t))
            return dq, dk_j + xp(problem, q_ti, dx), dv_j + xp(problem, d_out_ti, drop(p)), d_arrays

        dq, dk, dv, d_arrays = carry
        zeros = (jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), acc_dtype) for x in (k_j, v_j))
        dq, dk_j, dv_j, d_arrays = over_visited(j, q_step, (dq, *zeros, d_arrays))
        dk, dv = (keys.add(d, jnp.transpose(d_j, (0, 3, 1, 2)), j, 1) for d, d_j in ((dk, dk_j), (dv, dv_j)))
        return dq, dk, dv, d_arrays

    # Transposed here, so that no matmul in the loops transposes a tile of logits: up to three times as slow on a CPU.
    q_t, d_out_t = (transpose_grouped(problem, x) for x in (q.astype(ds_dtype(problem)), d_out))
    zeros = tuple(jnp.zeros(x.shape, acc_dtype) for x in (q, k, v))
    d_arrays = tuple(jnp.zeros(a.shape, np.promote_types(a.dtype, np.float32)) for a in arrays)
    dq, dk, dv, d_arrays = lax.fori_loop(np.int32(0), keys.last, kv_step, (*zeros, d_arrays))
    gradients = dq, dk, dv, *d_arrays, *d_sinks
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, operands.differentiable, strict=True))
