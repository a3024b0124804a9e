"""Attention in chunks with an online softmax, in plain JAX: any platform, any float dtype, O(T) memory.

Forward (Milakov and Gimelshein, arXiv 1805.02867; Rabe and Staats, arXiv 2112.05682): for each chunk of queries, a loop
over the chunks of keys that the mask does not rule out. Backward (Dao et al., arXiv 2205.14135): the same chunks with
the probabilities recomputed from the log-sum-exp.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.backends.xla import chunks
from pallas_fa.backends.xla.matmuls import heads_first, matmul_dtype, prepare, pv, qk, transposed, xp
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.scores.base import float_arrays, with_float_arrays
from pallas_fa.softmax import tile


def forward(problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """(out [B, T, N, Hv] in the inputs' dtype, log-sum-exp [B, T, N])."""
    score, mask = operands.score, operands.mask
    B, T, N = problem.dims.B, problem.dims.T, problem.dims.N
    start = jnp.zeros((B, T, N, problem.Hv), problem.dtype), jnp.full((B, T, N), -jnp.inf, problem.acc_dtype)
    if 0 in (B, T, N, problem.dims.S):
        return start  # nothing to attend to, and no chunk of size 0
    q, k, v = prepare(problem, operands)
    queries, keys = chunks.of_problem(problem)
    visited = chunks.visits(mask, "kv_range", queries, keys)

    def q_step(i, outputs):
        q_i = heads_first(queries.cut(q, i, 1))

        def kv_step(j, carry):
            state, acc = carry
            slices = chunks.slices(score, queries, i, keys, j)
            x = problem.scale * qk(problem, q_i, heads_first(keys.cut(k, j, 1)))
            x = keys.only_new(chunks.masked_scores(x, slices, mask, queries, i, keys, j), j)
            state, p, rescale = tile.softmax_step(state, x)
            return state, acc * rescale[..., None] + pv(problem, p, heads_first(keys.cut(v, j, 1)))

        rows = q_i.shape[:3]
        nothing = tile.softmax_start(rows, problem.acc_dtype), jnp.zeros((*rows, problem.Hv), problem.acc_dtype)
        state, acc = lax.fori_loop(*visited(i), kv_step, nothing)
        factor, lse_i = tile.softmax_finish(state)
        results = (acc * factor[..., None]).astype(problem.dtype), lse_i
        # Rows that two chunks share are complete in both: it does no harm that they are written twice.
        return tuple(queries.put(x, heads_first(x_i), i, 1) for x, x_i in zip(outputs, results, strict=True))

    return lax.fori_loop(np.int32(0), np.int32(queries.count), q_step, start)


def backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    """The gradients of `operands.differentiable`, each in its array's dtype."""
    operands, out, lse = residuals
    score, mask = operands.score, operands.mask
    arrays, acc_dtype = float_arrays(score), problem.acc_dtype
    if 0 in (problem.dims.B, problem.dims.T, problem.dims.N, problem.dims.S):
        return tuple(map(jnp.zeros_like, operands.differentiable))
    lengths = lengths_of(mask)
    d_out = tile.zero_padding(d_out, lengths.q_lengths)
    d_lse = tile.zero_padding(d_lse[..., None], lengths.q_lengths)[..., 0]
    # The row sums of p * dp, had from `out` without a pass over the logits; the cotangent of lse enters beside them.
    delta = jnp.sum(out.astype(acc_dtype) * d_out.astype(acc_dtype), axis=-1) - d_lse
    delta = jnp.where(lse == -jnp.inf, 0, delta)  # of a row with nothing to attend to, whatever d_lse is there
    d_out = d_out.astype(matmul_dtype(problem))
    q, k, v = prepare(problem, operands)
    queries, keys = chunks.of_problem(problem)
    visited = chunks.visits(mask, "q_range", keys, queries)

    def kv_step(j, carry):
        k_j, v_j = (heads_first(keys.cut(x, j, 1)) for x in (k, v))

        def q_step(i, carry):
            dq, dk_j, dv_j, d_arrays = carry
            q_i, d_out_i, lse_i, delta_i = (heads_first(queries.cut(x, i, 1)) for x in (q, d_out, lse, delta))

            def scores(x, slices):
                return chunks.masked_scores(x, with_float_arrays(score_ij, slices), mask, queries, i, keys, j)

            score_ij = chunks.slices(score, queries, i, keys, j)
            x, pullback = jax.vjp(scores, problem.scale * qk(problem, q_i, k_j), float_arrays(score_ij))
            p = tile.probabilities(queries.only_new(keys.only_new(x, j), i), lse_i)
            dx, d_slices = pullback(p * (qk(problem, d_out_i, v_j) - delta_i[..., None]))
            dx = dx * problem.scale
            d_arrays = tuple(
                chunks.add_slice(d, d_slice, queries, i, keys, j) for d, d_slice in zip(d_arrays, d_slices, strict=True)
            )
            dq = queries.add(dq, heads_first(pv(problem, dx, k_j)), i, 1)
            q_ti, d_out_ti = (queries.cut(x, i, 4) for x in (q_t, d_out_t))
            return dq, dk_j + xp(problem, q_ti, dx), dv_j + xp(problem, d_out_ti, p), d_arrays

        dq, dk, dv, d_arrays = carry
        zeros = (jnp.zeros((*x.shape[:2], x.shape[3], x.shape[2]), acc_dtype) for x in (k_j, v_j))
        dq, dk_j, dv_j, d_arrays = lax.fori_loop(*visited(j), q_step, (dq, *zeros, d_arrays))
        dk, dv = (keys.add(d, jnp.transpose(d_j, (0, 3, 1, 2)), j, 1) for d, d_j in ((dk, dk_j), (dv, dv_j)))
        return dq, dk, dv, d_arrays

    # No matmul inside of the loops transposes a chunk of logits: on a CPU that takes up to three times as long.
    q_t, d_out_t = (transposed(problem, x) for x in (q, d_out))
    zeros = tuple(jnp.zeros(x.shape, acc_dtype) for x in (q, k, v))
    d_arrays = tuple(jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32)) for a in arrays)
    dq, dk, dv, d_arrays = lax.fori_loop(np.int32(0), np.int32(keys.count), kv_step, (*zeros, d_arrays))
    found = dq, dk, dv, *d_arrays
    return tuple(d.astype(x.dtype) for d, x in zip(found, operands.differentiable, strict=True))
