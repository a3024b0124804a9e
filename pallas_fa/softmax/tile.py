"""The maths of one tile of logits, in plain jnp: what every implementation computes between its two matmuls.

Shapes here are [..., t, s] for logits and [..., t] for row statistics; any leading dims.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa import masks, scores
from pallas_fa.scores.base import evaluate, float_arrays, with_float_arrays


class Softmax(NamedTuple):
    """Row statistics of the online softmax: running maximum and running sum of exp(logit - maximum), each [..., t]."""

    max: Any
    sum: Any


def masked_scores(x: Any, score: scores.Score | None, mask: masks.Mask | None, b: Any, n: Any, t: Any, s: Any) -> Any:
    """(logits after the score, -inf where masked; which pairs are allowed, or None for all).

    `x`: scaled logits; `score` and `mask` hold the slices of their arrays for this tile.
    """
    if mask is None:
        return evaluate(score, x, b, n, t, s), None
    ok = jnp.broadcast_to(mask.allowed(b, n, t, s), x.shape)
    if score is not None:
        # Behind the mask there may be NaN or Inf, and 0 * NaN is NaN: no gradient may pass there, to any array.
        gate = lambda z: jnp.where(ok, z.astype(x.dtype), lax.stop_gradient(z.astype(x.dtype)))
        gated: Any = with_float_arrays(score, map(gate, float_arrays(score)))
        x = gated.apply(gate(x), b, n, t, s)
    return jnp.where(ok, x, -jnp.inf), ok


def softmax(x: Any) -> tuple[Any, Any]:
    """(weights, log-sum-exp) of whole rows, for derivatives of any order; 0 and -inf for rows that attend to nothing."""
    top = lax.stop_gradient(jnp.max(x, axis=-1, keepdims=True, initial=-jnp.inf))
    p = jnp.exp(x - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(p, axis=-1, keepdims=True)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    return p / total, jnp.where(empty, -jnp.inf, top + jnp.log(total))[..., 0]


def softmax_start(shape: tuple[int, ...], dtype: Any) -> Softmax:
    """Statistics of rows that have seen no logits yet."""
    return Softmax(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))


def softmax_step(state: Softmax, x: Any) -> tuple[Softmax, Any, Any]:
    """(new statistics, exp(x - new maximum), the factor that rescales earlier results to the new maximum)."""
    new_max = jnp.maximum(state.max, jnp.max(x, axis=-1))
    finite_max = jnp.where(new_max == -jnp.inf, 0, new_max)  # a row that has seen only -inf: exp(-inf - 0) = 0, not NaN
    p = jnp.exp(x - finite_max[..., None])
    rescale = jnp.exp(state.max - finite_max)
    return Softmax(new_max, state.sum * rescale + jnp.sum(p, axis=-1)), p, rescale


def softmax_finish(state: Softmax) -> tuple[Any, Any]:
    """(what to multiply the accumulated P V with, log-sum-exp); 0 and -inf for rows that attend to nothing."""
    empty = state.sum == 0
    total = jnp.where(empty, 1, state.sum)
    return jnp.where(empty, 0, 1 / total), jnp.where(empty, -jnp.inf, state.max + jnp.log(total))


def probabilities(x: Any, lse: Any) -> Any:
    """exp(x - lse); 0 in rows that attend to nothing (lse -inf)."""
    return jnp.exp(x - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None])


def zero_padding(x: Any, lengths: Any) -> Any:
    """x [B, length, heads, dim] with zeros at and past `lengths` ([B|1, N|1, 1, 1] or None), so that no NaN there spreads.

    With a length per query head, padding of a key head is what lies past the longest of its group.
    """
    if lengths is None:
        return x
    lengths = lengths[:, :, 0, 0]
    if lengths.shape[1] not in (1, x.shape[2]):
        lengths = lengths.reshape(lengths.shape[0], x.shape[2], -1).max(axis=-1)
    position = lax.broadcasted_iota(jnp.int32, (1, x.shape[1], 1), 1)
    return jnp.where((position < lengths[:, None, :])[..., None], x, 0)
