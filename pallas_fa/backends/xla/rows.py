"""Computes attention in whole rows of logits, a chunk of queries at a time: what a GPU does fast.

On a GPU the logits travel through memory, so each pass over them counts. A complete row needs no online softmax: the
forward writes the logits once, reads them once for the probabilities, and reads these once for the output; the log-sum-exp
takes one more pass, where a gradient or the caller needs it. Each chunk of queries takes the interval of keys that its mask
allows. Decision record: xla/whole-rows-on-gpus.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.backends.xla import chunks, intervals_of_keys
from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.backends.xla.cotangents import Cotangents
from pallas_fa.backends.xla.matmuls import ds_dtype, heads_first, prepare, ptx, pv, qk
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.scores.base import float_arrays, with_float_arrays
from pallas_fa.softmax import sinks, tile

Step = Callable[[Any, Chunks, Any, Any], Any]  # (query chunk, keys, their interval, carry) -> carry


def forward(problem: Problem, operands: Operands, queries: Chunks) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv] in the inputs' dtype, lse [B, T, N]).

    Args:
      problem: the problem, of no size 0.
      operands: its operands.
      queries: the query axis in chunks.
    """
    score, mask = operands.score, operands.mask
    q, k, v = map(heads_first, prepare(problem, operands))

    def step(i, keys, j, carry):
        k_j, v_j = (keys.cut(x, j, 2) for x in (k, v))
        x = problem.scale * qk(problem, queries.cut(q, i, 2), k_j)
        score_ij = chunks.cut_tile(score, queries, i, keys, j)
        x = chunks.masked_scores(x, score_ij, mask, queries, i, keys, j)
        p, lse_i = _softmax(problem, operands, x)
        out_i = pv(problem, chunks.dropping(operands.dropout, queries, i, keys, j)(p), v_j)
        if operands.sinks is not None:
            lse_i, share = sinks.add(operands.sinks, lse_i)
            out_i = out_i * share[..., None]
        # Rows in the overlap of two chunks are written twice, with the same values.
        return tuple(
            queries.replace(old, new, i, 2)
            for old, new in zip(carry, (out_i.astype(problem.dtype), lse_i), strict=True)
        )

    rows = q.shape[:3]
    lse = jnp.full(rows, -jnp.inf, problem.acc_dtype)
    if operands.sinks is not None:
        lse = sinks.add(operands.sinks, lse)[0]
    out, lse = _over_chunks(problem, mask, queries, step, (jnp.zeros((*rows, problem.Hv), problem.dtype), lse))
    return heads_first(out), heads_first(lse)


def backward(
    problem: Problem, residuals: Residuals, cotangents: Cotangents, queries: Chunks
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """Returns the gradients of q, k, v and of the score's arrays: the latter three in the dtype of accumulation.

    Args:
      problem: the problem, of no size 0.
      residuals: its operands, out and lse.
      cotangents: of out and lse.
      queries: the query axis in chunks.
    """
    operands = residuals.operands
    score, mask, dtype = operands.score, operands.mask, ds_dtype(problem)
    q, k, v = map(heads_first, prepare(problem, operands))
    d_out, delta, lse = map(heads_first, (cotangents.d_out, cotangents.delta, residuals.lse))

    # In the form of the forward, so that XLA keeps logits and probabilities of a program that has both, and all at once.
    own = queries.is_whole and operands.sinks is None and not problem.part_of_keys

    def step(i, keys, j, carry):
        dq, dk, dv, d_arrays = carry
        k_j, v_j = (keys.cut(x, j, 2) for x in (k, v))
        q_i, d_out_i, delta_i, lse_i = (queries.cut(x, i, 2) for x in (q, d_out, delta, lse))
        lse_i = queries.mask_overlap(lse_i[..., None], i)[..., 0]  # so that no row adds to a sum twice

        def scores(x, arrays):
            return chunks.masked_scores(x, with_float_arrays(score_ij, arrays), mask, queries, i, keys, j)

        score_ij = chunks.cut_tile(score, queries, i, keys, j)
        x, pullback = jax.vjp(scores, problem.scale * qk(problem, q_i, k_j), float_arrays(score_ij))
        p = _softmax(problem, operands, x)[0] if own else tile.probabilities(x, lse_i)
        drop = chunks.dropping(operands.dropout, queries, i, keys, j)
        dx, d_arrays_ij = pullback(p * (drop(qk(problem, d_out_i, v_j)) - delta_i[..., None]))
        dx = (dx * problem.scale).astype(dtype)
        dq = queries.add(dq, pv(problem, dx, k_j.astype(dtype)).astype(dq.dtype), i, 2)
        dk = keys.add(dk, ptx(problem, dx, q_i.astype(dtype)), j, 2)
        dv = keys.add(dv, ptx(problem, drop(p), d_out_i), j, 2)
        add = lambda d, d_ij: chunks.add_tile(d, d_ij, queries, i, keys, j)
        return dq, dk, dv, tuple(map(add, d_arrays, d_arrays_ij))

    zeros = lambda x, dtype: jnp.zeros(x.shape, dtype)
    d_arrays = tuple(zeros(a, jnp.promote_types(a.dtype, jnp.float32)) for a in float_arrays(score))
    # Each row of dq gets one sum, so it needs no wider dtype.
    start = zeros(q, problem.dtype), zeros(k, problem.acc_dtype), zeros(v, problem.acc_dtype), d_arrays
    dq, dk, dv, d_arrays = _over_chunks(problem, mask, queries, step, start)
    return *map(heads_first, (dq, dk, dv)), d_arrays


def _softmax(problem, operands, x):
    """Returns (probabilities, log-sum-exp) of masked logits x [B, N, t, S]."""
    if operands.score is not None or operands.mask is not None:
        return tile.whole_rows(x)
    # In the shape of the matmul, to which XLA moves reductions: it fuses a softmax only where no reshape splits it.
    p, lse = tile.whole_rows(x.reshape(x.shape[0], problem.K, -1, x.shape[3]))
    return p.reshape(x.shape), lse.reshape(x.shape[:3])


def _over_chunks(problem, mask, queries: Chunks, step: Step, carry: Any) -> Any:
    """Runs `step` for each chunk of queries, with the interval of keys that it needs."""
    for group in intervals_of_keys.groups(mask, queries, problem.dims.S):
        carry = group.loop(step, carry)
    return carry
