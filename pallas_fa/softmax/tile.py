"""The maths between the two matmuls, for one tile of logits, in plain jnp.

Logits are [..., t, s] and row statistics [..., t], with any leading dims. An empty row is a query that attends to nothing.

Where a maximum is subtracted from x and x may be a product, x is first bounded by it, which changes no value. Without that,
XLA on a CPU may compute x once more inside the subtraction, with one rounding less (a fused multiply-add), and the
exponential of the difference overflows where logits are large.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa import masks, scores
from pallas_fa.scores.base import evaluate, float_arrays, free, with_float_arrays


class Softmax(NamedTuple):
    """Row statistics of the online softmax, each [..., t]: running maximum, running sum of exp(logit - maximum)."""

    max: Any
    sum: Any


def masked_scores(x: Any, score: scores.Score | None, mask: masks.Mask | None, b: Any, n: Any, t: Any, s: Any) -> Any:
    """Applies score and mask to a tile of logits.

    Args:
      x: scaled logits [B, N, t, s], float32 (float64 for float64 inputs).
      score: a bound score that holds the slices of its arrays for this tile, or None.
      mask: a bound mask, likewise, or None.
      b: batch entries, int32, broadcastable to x; so are the next three.
      n: query heads.
      t: query positions.
      s: key positions.

    Returns:
      The logits, -inf where masked, and which positions are allowed (bool like x; None without a mask).
    """
    if mask is None:
        return evaluate(score, x, b, n, t, s), None
    ok = jnp.broadcast_to(mask.allowed(b, n, t, s), x.shape)
    if score is not None:
        # Masked logits may be NaN or Inf, and 0 * NaN is NaN: block gradients there, for every array.
        gate = lambda z: jnp.where(ok, z.astype(x.dtype), lax.stop_gradient(z.astype(x.dtype)))
        score = free(score)
        gated: Any = with_float_arrays(score, map(gate, float_arrays(score)))
        x = gated.apply(gate(x), b, n, t, s)
    return jnp.where(ok, x, -jnp.inf), ok


def softmax(x: Any, sinks: Any = None) -> tuple[Any, Any]:
    """Returns (probabilities, log-sum-exp) of complete rows: 0 and -inf for empty ones. Differentiable to any order.

    `sinks`: None, or one more logit of each row, without a probability in the result: broadcastable to [..., t, 1].
    """
    top = jnp.max(x, axis=-1, keepdims=True, initial=-jnp.inf)
    top = lax.stop_gradient(top if sinks is None else jnp.maximum(top, sinks.astype(x.dtype)))
    finite_top = jnp.where(top == -jnp.inf, 0, top)
    x = lax.optimization_barrier(x)  # here not by `minimum`, which would take part of the largest logit's derivative
    p = jnp.exp(x - finite_top)
    total = jnp.sum(p, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks.astype(x.dtype) - finite_top)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    return p / total, jnp.where(empty, -jnp.inf, top + jnp.log(total))[..., 0]


def whole_rows(x: Any) -> tuple[Any, Any]:
    """Returns what `softmax` does, without derivatives, in a form of which XLA makes one GPU kernel for each result.

    A test for empty rows would use each reduction more than once, and so cost two more passes over x. Instead, maximum and
    sum are kept away from -inf and 0, which changes no other row. The log-sum-exp is a reduction of its own for the same
    reason.
    """
    lowest, tiny = (np.asarray(a, x.dtype) for a in (jnp.finfo(x.dtype).min, jnp.finfo(x.dtype).tiny))
    top = jnp.maximum(jnp.max(x, axis=-1, keepdims=True), lowest)
    p = jnp.exp(x - top)

    def join(a, b):
        (a_max, a_sum), (b_max, b_sum) = a, b
        top = jnp.maximum(a_max, b_max)
        return top, a_sum * jnp.exp(a_max - top) + b_sum * jnp.exp(b_max - top)

    one_each = jnp.maximum(x, lowest), (x > -jnp.inf).astype(x.dtype)
    top, total = lax.reduce(one_each, (lowest, np.zeros((), x.dtype)), join, (x.ndim - 1,))
    return p / jnp.maximum(jnp.sum(p, axis=-1, keepdims=True), tiny), top + jnp.log(total)


def fusible_softmax(x: Any, sinks: Any = None, factor: float = 1.0, *, is_product: bool = False) -> tuple[Any, Any]:
    """Returns what `softmax` does of x * factor, without derivatives, in a form that XLA fuses with a matmul on a CPU.

    A test for empty rows would use each reduction once more. Instead, logits and sums are kept away from -inf and 0, which
    changes no other row. Between the maximum and its use there is nothing: there, even one operation divides the fusion; so
    would a selection in the place of `minimum`, with which calls of 64 positions take 1.2 to 1.8 times as long.

    Args:
      x: [..., t, s].
      sinks: as in `softmax`; not with a factor.
      factor: a number > 0, by which differences are multiplied, not x: then nothing is to be bounded.
      is_product: whether the last operation that x comes from may be a multiplication (see the top of this module).
    """
    assert factor == 1 or sinks is None
    lowest, tiny = (np.asarray(a, x.dtype) for a in (jnp.finfo(x.dtype).min, jnp.finfo(x.dtype).tiny))
    top = jnp.max(jnp.maximum(x, lowest), axis=-1, keepdims=True)
    top = top if sinks is None else jnp.maximum(top, sinks.astype(x.dtype))
    difference = (jnp.minimum(x, top) if is_product else x) - top
    p = jnp.exp(difference if factor == 1 else difference * factor)
    total = jnp.sum(p, axis=-1, keepdims=True)
    total = total if sinks is None else total + jnp.exp(sinks.astype(x.dtype) - top)
    return p / jnp.maximum(total, tiny), (top * factor + jnp.log(total))[..., 0]


def softmax_start(shape: tuple[int, ...], dtype: Any, sinks: Any = None) -> Softmax:
    """Returns the row statistics before the first step: those of nothing, or of `sinks` alone.

    `shape` is [..., t]; `sinks` are None, or logits broadcastable to [..., t, 1].
    """
    if sinks is None:
        return Softmax(jnp.full(shape, -jnp.inf, dtype), jnp.zeros(shape, dtype))
    top = jnp.broadcast_to(sinks[..., 0].astype(dtype), shape)
    return Softmax(top, jnp.where(top == -jnp.inf, 0, jnp.ones_like(top)))


def softmax_step(state: Softmax, x: Any) -> tuple[Softmax, Any, Any]:
    """Adds a tile of logits x to the row statistics.

    Returns:
      The new statistics, exp(x - new maximum), and the factor that rescales earlier sums to the new maximum.
    """
    new_max = jnp.maximum(state.max, jnp.max(x, axis=-1))
    finite_max = jnp.where(new_max == -jnp.inf, 0, new_max)  # a row with only -inf so far: exp(-inf - 0) = 0, not NaN
    p = jnp.exp(jnp.minimum(x, new_max[..., None]) - finite_max[..., None])
    rescale = jnp.exp(state.max - finite_max)
    return Softmax(new_max, state.sum * rescale + jnp.sum(p, axis=-1)), p, rescale


def softmax_finish(state: Softmax) -> tuple[Any, Any]:
    """Returns (the factor that normalises the accumulated P V, log-sum-exp): 0 and -inf for empty rows."""
    empty = state.sum == 0
    total = jnp.where(empty, 1, state.sum)
    return jnp.where(empty, 0, 1 / total), jnp.where(empty, -jnp.inf, state.max + jnp.log(total))


def probabilities(x: Any, lse: Any) -> Any:
    """Returns exp(x - lse); 0 in empty rows (lse -inf)."""
    return jnp.exp(x - jnp.where(lse == -jnp.inf, jnp.inf, lse)[..., None])


def zero_empty_rows(d_lse: Any, lse: Any) -> Any:
    """Returns `d_lse`, a cotangent of `lse`, 0 in empty rows: there it may be anything, also what overflows 16 bits.

    XLA sees that constant zeros, those of a call without lse, need no lse here.
    """
    return jnp.where((d_lse == 0) | (lse != -jnp.inf), d_lse, 0)


def zero_padding(x: Any, lengths: Any) -> Any:
    """Zeroes the padding of x, so that NaN there cannot spread.

    If lengths differ between query heads, the padding of a key head starts at the longest of its group.

    Args:
      x: [B, length, heads, dim].
      lengths: int32 [B|1, N|1, 1, 1], or None for no padding.
    """
    if lengths is None:
        return x
    lengths = lengths[:, :, 0, 0]
    if lengths.shape[1] not in (1, x.shape[2]):
        lengths = lengths.reshape(lengths.shape[0], x.shape[2], -1).max(axis=-1)
    position = lax.broadcasted_iota(jnp.int32, (1, x.shape[1], 1), 1)
    return jnp.where((position < lengths[:, None, :])[..., None], x, 0)
