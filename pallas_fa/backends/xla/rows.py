"""Computes attention in whole rows of logits, a chunk of heads or of queries at a time: what a GPU does fast.

On a GPU the logits travel through memory, so each pass over them counts. A complete row needs no online softmax: the
forward writes the logits once, reads them once for the probabilities, and reads these once for the output; the log-sum-exp
takes one more pass, where a gradient or the caller needs it. The backward writes probabilities P and dS in the dtype of the
inputs, and no logits: XLA computes exp(QK^T - lse) and P (dO V^T - delta) at the end of the two matmuls, provided that lse,
delta and P are parameters of the loop's body (`Group.loop_ahead`). Each chunk of queries takes the interval of keys that its
mask allows. Decision record: xla/whole-rows-on-gpus.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa.backends.float16_range import in_float16_range
from pallas_fa.backends.xla import intervals_of_keys, tiles
from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.backends.xla.chunks_of_rows import chunks_of_rows
from pallas_fa.backends.xla.cotangents import Cotangents
from pallas_fa.backends.xla.matmuls import (
    heads_first,
    in_groups,
    joined,
    matmul_dtype,
    prepare,
    ptx,
    pv,
    qk,
    qk_in_groups,
)
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.scores.base import float_arrays, with_float_arrays
from pallas_fa.softmax import sinks, tile


def forward(problem: Problem, operands: Operands, rows: Chunks, start: tuple[Any, Any]) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv] in the inputs' dtype, lse [B, T, N]).

    Args:
      problem: the problem, of no size 0.
      operands: its operands.
      rows: the query heads or the queries, in chunks.
      start: the results for rows without keys.
    """
    score, mask = operands.score, operands.mask
    parts = chunks_of_rows(problem, rows)
    q, k, v = map(parts.prepared, prepare(problem, operands))

    def step(i, keys, j, carry):
        k_j, v_j = (parts.cut_keys(x, i, keys, j) for x in (k, v))
        x = problem.scale * qk_in_groups(problem, parts.cut(q, i), k_j)
        score_ij = tiles.cut_tile(score, rows, i, keys, j)
        p, lse_i = map(joined, tile.whole_rows(tiles.masked_groups(x, score_ij, mask, rows, i, keys, j)))
        out_i = pv(problem, tiles.dropping(operands.dropout, rows, i, keys, j)(p), v_j)
        if operands.sinks is not None:
            lse_i, share = sinks.add(rows.cut(operands.sinks, i), lse_i)
            out_i = out_i * share[..., None]
        # Rows in the overlap of two chunks are written twice, with the same values.
        out, lse = carry
        return parts.replace(out, out_i, i), rows.replace(lse, lse_i, i, rows.axis)

    out, lse = start
    carry = parts.prepared(out), heads_first(lse)
    for group in intervals_of_keys.groups(mask, rows, problem.dims.S):
        carry = group.loop(step, carry)
    out, lse = carry
    return parts.prepared(out), heads_first(lse)


@in_float16_range
def backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any, rows: Chunks) -> tuple[Any, ...]:
    """Returns the gradients of `operands.differentiable`, each in the dtype of its array.

    Args:
      problem: the problem, of no size 0.
      residuals: its operands, out [B, T, N, Hv] and lse [B, T, N].
      d_out: cotangent of out.
      d_lse: cotangent of lse.
      rows: the query heads or the queries, in chunks.
    """
    operands = residuals.operands
    d_out, delta, d_sinks = Cotangents.of(problem, residuals, d_out, d_lse)
    score, mask, dtype = operands.score, operands.mask, matmul_dtype(problem)
    parts = chunks_of_rows(problem, rows)
    q, k, v, d_out = map(parts.prepared, (*prepare(problem, operands), d_out))
    delta, lse = map(heads_first, (delta, residuals.lse))
    neg_lse = jnp.where(lse == -jnp.inf, lse, -lse)  # exp(x + neg_lse) is 0 in empty rows

    # In the form of the forward, so that XLA keeps logits and probabilities of a program that has both, and all at once.
    own = rows.is_whole and operands.sinks is None and not problem.part_of_keys

    def scores_of(q_i, k_j, i, keys, j):
        """Returns the function from logits and the score's arrays to masked logits, both in groups, and its arguments."""
        score_ij = tiles.cut_tile(score, rows, i, keys, j)

        def scores(x, arrays):
            return tiles.masked_groups(x, with_float_arrays(score_ij, arrays), mask, rows, i, keys, j)

        return scores, problem.scale * qk_in_groups(problem, q_i, k_j), float_arrays(score_ij)

    def statistics(i):
        """Returns neg_lse and delta of chunk i, [B, n, t, 1]."""
        neg_lse_i, delta_i = (rows.cut(x, i)[..., None] for x in (neg_lse, delta))
        return rows.mask_overlap(neg_lse_i, i), delta_i  # masked, so that no row adds to a sum twice

    def ahead(i, keys, j, statistics_i):
        """Returns the probabilities of chunk i, and what else its step needs of it."""
        neg_lse_i, delta_i = statistics_i
        q_i, k_j = parts.cut(q, i), parts.cut_keys(k, i, keys, j)
        scores, *of_logits = scores_of(q_i, k_j, i, keys, j)
        x = scores(*of_logits)
        p = joined(tile.whole_rows(x)[0]) if own else jnp.exp(joined(x) + neg_lse_i)
        return p.astype(dtype), delta_i, q_i, k_j

    def step(i, keys, j, of_i, carry):
        (p, delta_i, q_i, k_j), (dq, dk, dv, d_arrays) = of_i, carry
        v_j, d_out_i = parts.cut_keys(v, i, keys, j), parts.cut(d_out, i)
        drop = tiles.dropping(operands.dropout, rows, i, keys, j)
        ds = p * (drop(qk(problem, d_out_i, v_j)) - delta_i).astype(dtype)
        if score is not None:
            _, pullback = jax.vjp(*scores_of(q_i, k_j, i, keys, j))
            ds, d_arrays_ij = pullback(in_groups(ds.astype(problem.acc_dtype), k_j.shape[1]))
            ds = joined(ds).astype(dtype)
            add = lambda d, d_ij: tiles.add_tile(d, d_ij, rows, i, keys, j)
            d_arrays = tuple(map(add, d_arrays, d_arrays_ij))
        dq = parts.add(dq, pv(problem, ds, k_j) * problem.scale, i)
        dk = parts.add_keys(dk, ptx(problem, ds, q_i, k_j.shape[1]) * problem.scale, i, keys, j)
        dv = parts.add_keys(dv, ptx(problem, drop(p), d_out_i, k_j.shape[1]), i, keys, j)
        return dq, dk, dv, d_arrays

    # Each row gets one sum, so it needs no wider dtype.
    one_sum = lambda x: len(x.shape) == 4 and x.shape[rows.axis] > 1
    sum_dtype = lambda x: x.dtype if one_sum(x) else np.promote_types(x.dtype, np.float32)
    d_arrays = tuple(jnp.zeros(x.shape, sum_dtype(x)) for x in float_arrays(score))
    carry = jnp.zeros(q.shape, problem.dtype), *map(parts.zeros_of_keys, (k, v)), d_arrays
    for group in intervals_of_keys.groups(mask, rows, problem.dims.S):
        carry = group.loop_ahead(statistics, ahead, step, carry)
    dq, dk, dv, d_arrays = carry
    gradients = *map(parts.prepared, (dq, dk, dv)), *d_arrays, *d_sinks
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, operands.differentiable, strict=True))
