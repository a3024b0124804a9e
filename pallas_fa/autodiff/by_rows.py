"""Plain attention a few query rows at a time: derivatives of any order in O(rows * S) memory.

The kernels' own derivatives are single functions that JAX cannot differentiate again; second and higher derivatives
go through here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.problem import Operands, Problem

_ROWS = 128


def attention(plain: Callable[..., Any], problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """(out [B, T, N, Hv], log-sum-exp [B, T, N]) by `plain(problem, operands, t0)`, the attention of rows from t0 on.

    Recomputed when differentiated.
    """
    rows = jax.checkpoint(lambda operands, t0: plain(problem, operands, t0))

    def chunk(t0, length):
        cut = lambda x, axis: lax.dynamic_slice_in_dim(x, t0, length, axis)
        of_rows = lambda x: cut(x, 2) if x.shape[2] > 1 else x
        q, k, v, *others = operands
        return rows(Operands(cut(q, 1), k, v, *jax.tree.map(of_rows, others)), t0)

    T = problem.dims.T
    whole = T // _ROWS
    parts = []
    if whole:
        stacked = lax.map(lambda i: chunk(i * _ROWS, _ROWS), jnp.arange(whole))
        parts.append(jax.tree.map(_join, stacked))
    if T % _ROWS or not whole:
        parts.append(chunk(whole * _ROWS, T - whole * _ROWS))
    return jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=1), *parts)


def _join(x):
    """[chunks, B, rows, ...] -> [B, chunks * rows, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
