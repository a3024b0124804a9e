"""Recomputes attention a few query rows at a time: derivatives of any order in O(rows * S) memory.

JAX cannot differentiate a backward kernel. Second and higher derivatives recompute attention here, from the operands. Where
a length is symbolic, all rows are one chunk.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.operands import diagonals
from pallas_fa.problem import Operands, Problem

_ROWS = 128


def attention(plain: Callable[..., Any], problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv], lse [B, T, N]), rematerialised when differentiated.

    Args:
      plain: plain(problem, operands, t0) is attention of the query rows from t0 on, in operations JAX differentiates.
      problem: passed on to `plain`.
      operands: those of all rows.
    """
    rematerialised = jax.checkpoint(lambda operands, t0: plain(problem, operands, t0))

    def rows(t0, length):
        cut = lambda x, axis: lax.dynamic_slice_in_dim(x, t0, length, axis)
        cut_rows = lambda x: x if diagonals.spans(x) or x.shape[2] == 1 else cut(x, 2)
        q, k, v, *bound = operands
        return rematerialised(Operands(cut(q, 1), k, v, *jax.tree.map(cut_rows, bound)), t0)

    if problem.dims.has_symbolic_length:  # the number of chunks is not known
        return rematerialised(operands, 0)
    T = problem.dims.T
    full_chunks = T // _ROWS
    chunks = []
    if full_chunks:
        stacked = lax.map(lambda i: rows(i * _ROWS, _ROWS), jnp.arange(full_chunks))
        chunks.append(jax.tree.map(_unstack, stacked))
    if T % _ROWS or not full_chunks:
        chunks.append(rows(full_chunks * _ROWS, T - full_chunks * _ROWS))
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), *chunks)


def _unstack(x):
    """[chunks, B, rows, ...] -> [B, chunks * rows, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
