"""Computes the tangents of attention in plain JAX, a tile at a time: O(T) memory, differentiable to any order.

For one row, let (out_j, lse_j) be attention to key chunk j alone, and w_j = exp(lse_j - lse) its weight. Then out is the sum
of w_j out_j, and the sum of w_j is 1. `jax.jvp` differentiates both sums at fixed lse. The tangent of lse follows, and
corrects that of out:

    lse_dot = d(sum of w_j),   out_dot = d(sum of w_j out_j) - lse_dot out,   both d at fixed lse.

The loops carry sums only, chunks are scanned inputs, and each step is rematerialised. So the transpose, which reverse mode
runs, stores no logits either.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.xla import chunks, tiles
from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.backends.xla.matmuls import ds_dtype, heads_first, pv, qk
from pallas_fa.backends.xla.visits import visited_interval
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.operands import diagonals, varying
from pallas_fa.problem import Operands, Problem
from pallas_fa.scores.base import float_arrays, with_float_arrays
from pallas_fa.softmax import sinks, tile


def attention(
    problem: Problem, operands: Operands, lse: Any, operand_tangents: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    """Returns the tangents of out [B, T, N, Hv], in the inputs' dtype, and of lse [B, T, N], in its own.

    Args:
      problem: the problem.
      operands: its operands.
      lse: [B, T, N], from the forward.
      operand_tangents: the tangents of `operands.differentiable`; None for zero.
    """
    primals = operands.differentiable
    nonzero = [(x, dot) for x, dot in zip(primals, operand_tangents, strict=True) if dot is not None]
    if not nonzero or lse.size == 0:
        return jnp.zeros((*lse.shape, problem.Hv), problem.dtype), jnp.zeros_like(lse)

    def sums(*differentiated):
        differentiated = iter(differentiated)
        arrays = (x if dot is None else next(differentiated) for x, dot in zip(primals, operand_tangents, strict=True))
        moved = operands.with_differentiable(arrays)
        out, total = _weighted_sums(problem, moved, lse)
        # A sink is a key chunk of its own, whose value is 0.
        return out, total if moved.sinks is None else total + sinks.probabilities(moved.sinks, lse)

    differentiated, dots = zip(*nonzero, strict=True)
    (out, _), (out_dot, lse_dot) = jax.jvp(sums, differentiated, dots)
    # It is 0 already in a row that attends to nothing. This zeroes its cotangent there, which may be NaN, as lse is -inf.
    lse_dot = jnp.where(lse == -jnp.inf, 0, lse_dot)
    out_dot = (out_dot - lse_dot[..., None] * out).astype(problem.dtype)
    # Padding is 0 already. This zeroes its cotangent, which may be NaN.
    return tile.zero_padding(out_dot, lengths_of(operands.mask).q_lengths), lse_dot


def _weighted_sums(problem, operands, lse):
    """Returns the sums over key chunks of w_j out_j [B, T, N, Hv], which is out, and of w_j [B, T, N].

    The latter is 1, less the probability of a sink.
    """
    if problem.dims.S == 0:
        return jnp.zeros((*lse.shape, problem.Hv), problem.acc_dtype), jnp.zeros_like(lse)
    q, k, v, score, mask = operands[:5]
    dropout = operands.dropout
    lengths = lengths_of(mask)
    queries, keys = chunks.split_axes(problem)
    visited = visited_interval(mask, "kv_range", queries, keys)

    def tile_terms(i, j, operands):
        lse, q, k, v, score = operands
        q, k, v = (jnp.squeeze(x, n).astype(ds_dtype(problem)) for x, n in ((q, 3), (k, 2), (v, 2)))
        score = tiles.cut_diagonals(score, queries, i, keys, j)
        x = tiles.masked_scores(problem.scale * qk(problem, q, k), score, mask, queries, i, keys, j)
        p, lse_j = tile.softmax(keys.mask_overlap(x, j))
        w = tile.probabilities(lse_j[..., None], jnp.squeeze(lse, 3))
        p = tiles.dropping(dropout, queries, i, keys, j)(p)
        return w * pv(problem, p, v), jnp.squeeze(w, 3)

    def row_sums(_, i, operands):
        def add_tile(sums, j, operands):
            add = lambda sums: jax.tree.map(jnp.add, sums, tile_terms(i, j, operands))
            if mask is None:
                return add(sums), None
            first, end = visited(i)
            return lax.cond((first <= j) & (j < end), add, lambda sums: sums, sums), None

        rows = operands[0].shape[:3]
        zeros = jnp.zeros((*rows, problem.Hv), problem.acc_dtype), jnp.zeros(rows, problem.acc_dtype)
        return None, _scan(keys, add_tile, *varying.vary_together(zeros, operands))[0]

    # In the dtype of accumulation, so that their cotangents are summed in it, too.
    to_acc_dtype = lambda x: x.astype(problem.acc_dtype)
    # All as [B, heads, T | 1, S | 1, ...].
    lay_out = lambda x, n, axis: jnp.expand_dims(heads_first(to_acc_dtype(tile.zero_padding(x, n))), axis)
    operands = (
        heads_first(lse)[..., None],
        lay_out(q, lengths.q_lengths, 3),
        lay_out(k, lengths.kv_lengths, 2),
        lay_out(v, lengths.kv_lengths, 2),
        with_float_arrays(score, map(to_acc_dtype, float_arrays(score))),
    )
    _, sums = _scan(queries, row_sums, None, operands)
    return tuple(heads_first(queries.unstack(x, 2)) for x in sums)


def _scan(over: Chunks, step: Callable[..., Any], init: Any, operands: Any) -> Any:
    """Scans step(carry, i, operands) over the chunks i of an axis, rematerialised; operands that span it are cut to i."""
    leaves, structure = jax.tree.flatten(operands)
    is_cut = lambda x: not diagonals.spans(x) and x.shape[over.axis] > 1
    stacked = [over.stack(x, over.axis) if is_cut(x) else None for x in leaves]

    def step_on_chunk(carry, inputs):
        i, chunks_i = inputs
        leaves_i = [x if chunk is None else chunk for x, chunk in zip(leaves, chunks_i, strict=True)]
        return step(carry, i, jax.tree.unflatten(structure, leaves_i))

    # Inside a loop XLA cannot merge the recomputation with the original, so CSE need not be prevented.
    rematerialised = jax.checkpoint(step_on_chunk, prevent_cse=False)
    return lax.scan(rematerialised, init, (jnp.arange(over.count, dtype=jnp.int32), stacked))
