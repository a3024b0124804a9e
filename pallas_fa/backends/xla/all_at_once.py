"""Computes attention with all logits at once, without a loop: what a CPU does fast where logits are few.

XLA fuses the softmax with the matmul before it, and the backward's row sums with theirs, if no result in between is used
elsewhere. So the backward takes the row sums from P dP, not from the output, and P from the logits in the form of the
forward, of which it is then a common subexpression: the log-sum-exp has no use where nobody asked for it. Decision record:
xla/all-at-once-on-cpus.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa.backends.xla import tiles
from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.backends.xla.matmuls import ds_dtype, heads_first, matmul_dtype, prepare
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.scores import Bias
from pallas_fa.scores.base import float_arrays, free, with_float_arrays
from pallas_fa.softmax import sinks, tile


def forward(problem: Problem, operands: Operands) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv] in the inputs' dtype, lse [B, T, N])."""
    q, k, v = prepare(problem, operands)
    q, factor = _with_scale(problem, q)
    x, softmax = _before_scores(problem, operands, _qk(problem, q, k), factor)
    p, lse = softmax(_scores(problem, operands)(x, float_arrays(operands.score)))
    out = _pv(problem, _dropping(problem, operands)(p), v)
    return out.astype(problem.dtype), heads_first(lse)


def backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    """Returns the gradients of `operands.differentiable`, each in the dtype of its array.

    Args:
      problem: the problem, of no size 0 and of all keys.
      residuals: its operands, out [B, T, N, Hv] and lse [B, T, N].
      d_out: cotangent of out.
      d_lse: cotangent of lse.
    """
    operands, _, lse = residuals
    q, k, v = prepare(problem, operands)
    q_lengths = lengths_of(operands.mask).q_lengths
    d_out = tile.zero_padding(d_out, q_lengths).astype(matmul_dtype(problem))
    d_lse_of_keys = tile.zero_empty_rows(tile.zero_padding(d_lse[..., None], q_lengths)[..., 0], lse)

    q, factor = _with_scale(problem, q)
    x, softmax = _before_scores(problem, operands, _qk(problem, q, k), factor)
    x, pullback = jax.vjp(_scores(problem, operands), x, float_arrays(operands.score))
    p, _ = softmax(x)
    drop = _dropping(problem, operands)
    dp = drop(_qk(problem, d_out, v))
    row_sums = jnp.sum(p * dp, axis=-1)
    ds, d_arrays = p * (dp - (row_sums - heads_first(d_lse_of_keys))[..., None]), ()
    if operands.score is not None:
        ds, d_arrays = pullback(ds)
    ds = ds.astype(ds_dtype(problem))
    dq = problem.scale * _pv(problem, ds, k.astype(ds.dtype))
    dk = factor * _ptx(problem, ds, q.astype(ds.dtype))
    dv = _ptx(problem, drop(p).astype(d_out.dtype), d_out)
    d_sinks = () if operands.sinks is None else (sinks.gradient(operands.sinks, lse, heads_first(row_sums) - d_lse),)
    gradients = dq, dk, dv, *d_arrays, *d_sinks
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, operands.differentiable, strict=True))


def _with_scale(problem, q):
    """Returns (queries, factor): queries times the scale and 1, where this rounds no worse than a product of logits.

    Logits are then results of a matmul, and nothing multiplies them.
    """
    rounds = q.dtype.itemsize < 4 and math.frexp(problem.scale)[0] != 0.5
    if rounds or not 2.0**-40 <= problem.scale <= 1:  # so that no query leaves the range of its dtype
        return q, problem.scale
    return q * np.asarray(problem.scale, q.dtype), 1.0


def _before_scores(problem, operands, x, factor):
    """Returns (x, softmax): what scores and mask are of, and the softmax of their results, where logits are x * factor."""
    if problem.score is None and operands.sinks is None and factor > 0:
        return x, functools.partial(tile.fusible_softmax, factor=factor)
    is_product = factor != 1 if problem.score is None else not _is_sum_or_bounded(problem.score)
    x = x if factor == 1 else x * factor
    return x, functools.partial(tile.fusible_softmax, sinks=operands.sinks, is_product=is_product)


def _is_sum_or_bounded(score):
    return isinstance(free(score), Bias) or score.bound is not None


def _whole_axes(problem):
    """Queries and keys as one chunk each, and its index."""
    T, S = problem.dims.T, problem.dims.S
    return Chunks(2, T, T), 0, Chunks(3, S, S), 0


def _scores(problem, operands):
    """Returns the function from logits and the score's arrays to masked logits."""
    axes = _whole_axes(problem)

    def scores(x, arrays):
        score = tiles.cut_tile(with_float_arrays(operands.score, arrays), *axes)
        return tiles.masked_scores(x, score, operands.mask, *axes)

    return scores


def _dropping(problem, operands):
    return tiles.dropping(operands.dropout, *_whole_axes(problem))


def _qk(problem, a, b):
    """Multiplies [B, T, N, H] x [B, S, K, H] -> [B, N, T, S]."""
    B, T, N, _ = a.shape
    a = heads_first(a).reshape(B, b.shape[2], -1, a.shape[3])
    b, axes = _keys(b)
    return _einsum(problem, f"bkth,{axes}->bkts", a, b).reshape(B, N, T, -1)


def _pv(problem, p, b):
    """Multiplies [B, N, T, S] x [B, S, K, H] -> [B, T, N, H]."""
    B, N, T, S = p.shape
    p = p.astype(b.dtype).reshape(B, b.shape[2], -1, S)
    b, axes = _keys(b)
    return heads_first(_einsum(problem, f"bkts,{axes}->bkth", p, b).reshape(B, N, T, -1))


def _ptx(problem, p, x):
    """Multiplies [B, N, T, S] x [B, T, N, H] -> [B, S, K, H], summing over T and the query heads of a group."""
    B, N, T, S = p.shape
    p, x = p.reshape(B, problem.K, -1, T, S), x.reshape(B, T, problem.K, -1, x.shape[3])
    return _einsum(problem, "bkgts,btkgh->bskh", p, x)


def _keys(x):
    """Returns x [B, S, K, H] as a matmul reads it fast on a CPU, and the names of its axes.

    Heads first, which the matmuls share. But XLA computes a matmul of 16-bit arrays in float32 if it sees that one of them
    is a transpose: there, the matmul itself transposes.
    """
    return (x, "bskh") if x.dtype.itemsize == 2 else (heads_first(x), "bksh")


def _einsum(problem, subscripts, a, b):
    return jnp.einsum(subscripts, a, b, precision=problem.precision, preferred_element_type=problem.acc_dtype)
