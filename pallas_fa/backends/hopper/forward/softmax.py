"""The online softmax of one tile of logits."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.scratch import SUM_COLUMNS


def online_softmax(plan: ForwardPlan, x: Any, factor: float, m: Any, l: Any, is_boundary: bool) -> tuple[Any, ...]:
    """Returns (partial sums, p), then (maximum, rescaling factor) where the maximum is subtracted; all float32.

    Without a score the maximum is that of the logits in base 2. With one it is that of x: where a bias such as -1e10 takes
    the place of a mask, a difference of rounded products would have no correct digits. A row may still be all -inf only in
    a boundary block, or where a score gave -inf.

    Args:
      x, factor: [64, keys] and a number > 0, whose product are the logits.
      m: [64], the maximum so far.
      l: [64, SUM_COLUMNS], the partial sums so far.
      is_boundary: whether the mask may hide some of the logits.
    """
    base_2 = factor * LOG2E
    if not plan.subtract_max:
        p = jnp.exp2(x * base_2)
        return _plus_columns(l, p), p
    has_score = plan.problem.score is not None
    new_m = jnp.maximum(m, x.max(axis=1) if has_score else x.max(axis=1) * base_2)
    shift = jnp.where(new_m == -jnp.inf, 0.0, new_m) if is_boundary or has_score else new_m
    shifts = lax.broadcast_in_dim(shift, x.shape, [0])
    if has_score:
        p, rescale = jnp.exp2((x - shifts) * base_2), jnp.exp2((m - shift) * base_2)
    else:  # one instruction; evidence: forward/exponent-in-one-instruction
        p, rescale = jnp.exp2(x * base_2 - shifts), jnp.exp2(m - shift)
    return _plus_columns(l * lax.broadcast_in_dim(rescale, l.shape, [0]), p), p, new_m, rescale


def with_positive_factor(x: Any, factor: float) -> tuple[Any, float]:
    """Returns (y, factor > 0) of the same product: only then is the maximum of the product that of y, times the factor."""
    return (x, factor) if factor > 0 else (x * factor, 1.0)


def _plus_columns(l, p):
    for column in range(0, p.shape[1], SUM_COLUMNS):
        l = l + p[:, column : column + SUM_COLUMNS]
    return l
