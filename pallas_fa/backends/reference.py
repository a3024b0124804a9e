"""Defines attention in this library: dense, in float32 (float64 for float64), without options, in plain JAX.

Every other implementation is tested against it. JAX differentiates it any number of times, in forward and reverse mode.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.record import NO_TILES, Backend, Support, backward_in_btnh, forward_in_btnh
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.operands import diagonals
from pallas_fa.operands.pages import in_one_piece
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.softmax import tile


def probabilities(problem: Problem, operands: Operands, t0: Any = 0) -> tuple[Any, Any]:
    """Returns probabilities [B, N, T, S], some dropped, and log-sum-exp [B, N, T]; row 0 of q is query t0 of the problem."""
    q, k = operands.q.astype(problem.acc_dtype), jnp.repeat(operands.k.astype(problem.acc_dtype), problem.group, axis=2)
    x = problem.scale * jnp.einsum("btnh,bsnh->bnts", q, k, precision=problem.precision)
    b, n, t, s = (lax.broadcasted_iota(jnp.int32, _along(axis, x.shape), axis) for axis in range(4))
    score = diagonals.replace(operands.score, lambda a: diagonals.gathered(a.astype(x.dtype), t + t0, s))
    x, _ = tile.masked_scores(x, score, operands.mask, b, n, t + t0, s)
    p, lse = tile.softmax(x, operands.sinks)
    return p if operands.dropout is None else operands.dropout.apply(p, t + t0, s), lse


def attention(problem: Problem, operands: Operands, t0: Any = 0) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv] in the inputs' dtype, lse [B, T, N]); row 0 of q is query t0 of the problem."""
    lengths = lengths_of(operands.mask)
    q_lengths = None if lengths.q_lengths is None else lengths.q_lengths - t0
    q = tile.zero_padding(operands.q, q_lengths)
    k, v = (tile.zero_padding(in_one_piece(x), lengths.kv_lengths) for x in (operands.k, operands.v))
    p, lse = probabilities(problem, operands._replace(q=q, k=k, v=v), t0)
    v = jnp.repeat(v.astype(problem.acc_dtype), problem.group, axis=2)
    out = jnp.einsum("bnts,bsnh->btnh", p, v, precision=problem.precision)
    # Padding is 0 already. This zeroes its cotangent, which may be NaN.
    out = tile.zero_padding(out.astype(problem.dtype), q_lengths)
    return out, jnp.swapaxes(lse, 1, 2)


def _along(axis, shape):
    return tuple(size if i == axis else 1 for i, size in enumerate(shape))


def _backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    operands = residuals.operands
    forward = lambda arrays: attention(problem, operands.with_differentiable(arrays))
    return jax.vjp(forward, operands.differentiable)[1]((d_out, d_lse))[0]


def _supports(problem: Problem) -> Support:
    return Support() if problem.config is None else Support.neither(NO_TILES.format(config=problem.config))


BACKEND = Backend(
    "reference",
    _supports,
    forward_in_btnh(attention),
    backward_in_btnh(_backward),
    by_default=False,
    plain=True,
)
