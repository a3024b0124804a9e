"""The reference a few query rows at a time: derivatives of any order in O(rows * S) memory.

The kernels' own derivatives are single functions that JAX cannot differentiate again; second and higher derivatives
go through here.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.backends import reference
from pallas_fa.problem import Problem

_ROWS = 128


def attention(problem: Problem, q: Any, k: Any, v: Any, score: Any, mask: Any) -> tuple[Any, Any]:
    """(out [B, T, N, Hv], log-sum-exp [B, T, N]), as `reference.attention`; recomputed when differentiated."""

    @jax.checkpoint
    def rows(q, k, v, score, mask, t0):
        return reference.attention(problem, q, k, v, score, mask, t0)

    def chunk(t0, length):
        def cut(x, axis):
            return lax.dynamic_slice_in_dim(x, t0, length, axis) if x.shape[axis] > 1 else x

        return rows(cut(q, 1), k, v, *jax.tree.map(lambda x: cut(x, 2), (score, mask)), t0)

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
