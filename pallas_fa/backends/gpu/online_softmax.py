"""The online softmax of a query block: of one tile of logits after another, and what remains at the end."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.forward_plan import ForwardCore

SUM_COLUMNS = 8  # row sums are kept as partial sums over 8 columns, and added up once at the end


def online_softmax(plan: ForwardCore, x: Any, factor: float, m: Any, l: Any, is_boundary: bool) -> tuple[Any, ...]:
    """Returns (partial sums, p), then (maximum, rescaling factor) where the maximum is subtracted; all float32.

    Without a score the maximum is that of the logits in base 2. With one it is that of x: where a bias such as -1e10 takes
    the place of a mask, a difference of rounded products would have no correct digits. A row may still be all -inf only in
    a boundary block, or where a score gave -inf.

    Args:
      x, factor: [queries, keys] and a number > 0, whose product are the logits.
      m: [queries], the maximum so far.
      l: [queries, SUM_COLUMNS], the partial sums so far.
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


def finish(plan: ForwardCore, m: Any, l: Any, unit: float, sink: Any) -> tuple[Any, Any]:
    """Returns (the factor of the sums of P V, lse), both [queries].

    Args:
      plan: the kernel's.
      m: [queries], the maximum, where lse = m * unit + log(row sum).
      l: [queries, SUM_COLUMNS], the partial row sums.
      unit: see `m`.
      sink: the logit of the head's sink, a scalar; None without sinks.
    """
    total = l.sum(axis=1)
    if sink is not None:
        m, total, rescale = _with_sink(sink, m, total, unit)
    empty = total == 0
    factor = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, total))
    if plan.problem.dropout is not None:
        factor = factor * plan.problem.dropout.scale
    if sink is not None:
        factor = factor * rescale
    return factor, jnp.where(empty, -jnp.inf, m * unit + jnp.log(jnp.where(empty, 1.0, total)))


def _with_sink(sink, m, total, unit):
    """Returns (maximum, row sum, factor of the sums so far), where the sink is one more logit of each row.

    `m`, `total`, `unit`: as in `finish`, without the sink; the maximum returned has the unit of m.
    """
    sink = jnp.broadcast_to(sink * (1 / unit), m.shape)
    top = jnp.maximum(m, sink)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    rescale, weight = (jnp.exp2((x - top) * (unit * LOG2E)) for x in (m, sink))
    return top, total * rescale + weight, rescale
