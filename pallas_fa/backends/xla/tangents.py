"""The tangents of attention in plain JAX, a pair of chunks at a time: O(T) memory, in any order of differentiation.

Of a row, chunk j of the keys has a share w_j = exp(lse_j - lse), and out is the sum of w_j out_j, where out_j and lse_j are
attention to that chunk alone. With lse held, these are sums over the chunks, which `jax.jvp` differentiates; what the change
of lse adds comes after:

    lse_dot = d(sum of w_j),   out_dot = d(sum of w_j out_j) - lse_dot out,   both d at fixed lse.

Nothing is carried from chunk to chunk but sums, chunks are scanned inputs, and each step is recomputed where it is
differentiated: so the transpose, which reverse mode takes, stores no logits either.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.xla import chunks
from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.backends.xla.matmuls import heads_first, matmul_dtype, pv, qk
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.operands import varying
from pallas_fa.problem import Operands, Problem
from pallas_fa.scores.base import float_arrays, with_float_arrays
from pallas_fa.softmax import tile


def attention(problem: Problem, operands: Operands, lse: Any, dots: Sequence[Any]) -> tuple[Any, Any]:
    """The tangents of out [B, T, N, Hv], in the inputs' dtype, and of lse [B, T, N], in its own.

    `dots`: the tangents of `operands.differentiable`; None for one that does not move.
    """
    primals = operands.differentiable
    moving = [(x, dot) for x, dot in zip(primals, dots, strict=True) if dot is not None]
    if not moving or 0 in (problem.dims.S, lse.size):
        return jnp.zeros((*lse.shape, problem.Hv), problem.dtype), jnp.zeros_like(lse)

    def sums(*moved):
        moved = iter(moved)
        arrays = (x if dot is None else next(moved) for x, dot in zip(primals, dots, strict=True))
        return _sums_of_shares(problem, operands.with_differentiable(arrays), lse)

    moved, moved_dots = zip(*moving, strict=True)
    (out, _), (out_dot, lse_dot) = jax.jvp(sums, moved, moved_dots)
    out_dot = (out_dot - lse_dot[..., None] * out).astype(problem.dtype)
    # It is 0 in padding already; this keeps a NaN in its cotangent out.
    return tile.zero_padding(out_dot, lengths_of(operands.mask).q_lengths), lse_dot


def _sums_of_shares(problem, operands, lse):
    """The sums over the chunks of keys of w_j out_j [B, T, N, Hv], which is `out`, and of w_j [B, T, N], which is 1."""
    q, k, v, score, mask = operands
    lengths = lengths_of(mask)
    queries, keys = chunks.of_problem(problem)
    visited = chunks.visits(mask, "kv_range", queries, keys)

    def of_pair(i, j, operands):
        lse, q, k, v, score = operands
        q, k, v = (jnp.squeeze(x, n).astype(matmul_dtype(problem)) for x, n in ((q, 3), (k, 2), (v, 2)))
        x = chunks.masked_scores(problem.scale * qk(problem, q, k), score, mask, queries, i, keys, j)
        p, lse_j = tile.softmax(keys.only_new(x, j))
        w = tile.probabilities(lse_j[..., None], jnp.squeeze(lse, 3))
        return w * pv(problem, p, v), jnp.squeeze(w, 3)

    def of_rows(_, i, operands):
        def add_pair(sums, j, operands):
            add = lambda sums: jax.tree.map(jnp.add, sums, of_pair(i, j, operands))
            if mask is None:
                return add(sums), None
            first, last = visited(i)
            return lax.cond((first <= j) & (j < last), add, lambda sums: sums, sums), None

        rows = operands[0].shape[:3]
        zeros = jnp.zeros((*rows, problem.Hv), problem.acc_dtype), jnp.zeros(rows, problem.acc_dtype)
        return None, _scan(keys, add_pair, *varying.made_alike(zeros, operands))[0]

    # In the dtype of accumulation, in which their cotangents are then added up.
    wide = lambda x: x.astype(problem.acc_dtype)
    # All as [B, heads, T | 1, S | 1, ...].
    lay_out = lambda x, n, axis: jnp.expand_dims(heads_first(wide(tile.zero_padding(x, n))), axis)
    operands = (
        heads_first(lse)[..., None],
        lay_out(q, lengths.q_lengths, 3),
        lay_out(k, lengths.kv_lengths, 2),
        lay_out(v, lengths.kv_lengths, 2),
        with_float_arrays(score, map(wide, float_arrays(score))),
    )
    _, sums = _scan(queries, of_rows, None, operands)
    return tuple(heads_first(queries.joined(x, 2)) for x in sums)


def _scan(over: Chunks, step: Callable[..., Any], start: Any, operands: Any) -> Any:
    """`lax.scan` of step(carry, i, operands), where operands that span the axis are cut to chunk i."""
    leaves, structure = jax.tree.flatten(operands)
    stacked = [over.stacked(x, over.axis) if x.shape[over.axis] > 1 else None for x in leaves]

    def cut(carry, at_i):
        i, parts = at_i
        leaves_i = [x if part is None else part for x, part in zip(leaves, parts, strict=True)]
        return step(carry, i, jax.tree.unflatten(structure, leaves_i))

    # In a loop XLA does not undo the recomputation, so that nothing has to prevent it.
    again = jax.checkpoint(cut, prevent_cse=False)
    return lax.scan(again, start, (jnp.arange(over.count, dtype=jnp.int32), stacked))
