"""The online softmax of a query block: of one tile of logits after another, and what remains at the end."""

from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.forward_plan import ForwardCore
from pallas_fa.backends.gpu.layouts import PER_ROW
from pallas_fa.backends.gpu.warps import any_above, largest_of_thread
from pallas_fa.problem import Problem

# By how much a row's maximum may lag behind, in base 2, by the dtype of the inputs: before the division, probabilities stay
# below two to this. That is below float16's largest number, and bfloat16 is as exact there as at 1. Exponents so far from 0
# are rounded more, which float32 would show.
LAG = {"bfloat16": 60.0, "float16": 15.0, "float32": 8.0}
SUM_COLUMNS = 8  # row sums are kept as partial sums over 8 columns, and added up once at the end


class SoftmaxPlan(Protocol):
    """What `online_softmax` knows of a kernel."""

    @property
    def problem(self) -> Problem: ...

    @property
    def interpret(self) -> bool: ...

    @property
    def subtract_max(self) -> bool: ...


def online_softmax(
    plan: SoftmaxPlan, x: Any, factor: float, m: Any, l: Any, is_boundary: bool, lag: float | None = None
) -> tuple[Any, ...]:
    """Returns (partial sums, p), then (maximum, rescaling factor) where a maximum is subtracted; all float32.

    Without a score the maximum is that of the logits in base 2. With one it is that of x: where a bias such as -1e10 takes
    the place of a mask, a difference of rounded products would have no correct digits. A row may still be all -inf only in
    a boundary block, or where a score gave -inf.

    Args:
      x, factor: [queries, keys] and a number > 0, whose product are the logits.
      m: [queries], the maximum so far.
      l: [queries, SUM_COLUMNS], the partial sums so far.
      is_boundary: whether the mask may hide some of the logits.
      lag: if not None, the maximum of a row is left as it is unless it would grow by more than this, in base 2. Then its
        factor is 1, and in a warp where no row's maximum grows so much, the largest logits of rows are not even found
        (evidence: forward/lagging-maximum).
    """
    base_2 = factor * LOG2E
    if not plan.subtract_max:
        p = jnp.exp2(x * base_2)
        return plus_columns(l, p), p
    has_score = plan.problem.score is not None
    in_unit = lambda top: top if has_score else top * base_2
    growth = lambda top: (top - m) * base_2 if has_score else top - m

    def of_rows(m):
        return jnp.where(m == -jnp.inf, 0.0, m) if is_boundary or has_score else m

    def raised(m, l):
        top = in_unit(x.max(axis=1))
        new_m = jnp.maximum(m, top)
        if lag is not None:
            new_m = jnp.where(growth(top) <= lag, m, new_m)
        rescale = jnp.exp2((m - of_rows(new_m)) * base_2 if has_score else m - of_rows(new_m))
        return new_m, l * lax.broadcast_in_dim(rescale, l.shape, [0]), rescale

    def unchanged(m, l):
        return m, l, plgpu.layout_cast(jnp.ones(m.shape, jnp.float32), PER_ROW)

    if lag is not None:
        grows = any_above(growth(in_unit(largest_of_thread(x, plan.interpret))), lag, plan.interpret)
        m, l, rescale = lax.cond(grows, raised, unchanged, m, l)
    else:
        m, l, rescale = raised(m, l)
    shifts = lax.broadcast_in_dim(of_rows(m), x.shape, [0])
    # Without a score, one instruction; evidence: forward/exponent-in-one-instruction.
    p = jnp.exp2((x - shifts) * base_2 if has_score else x * base_2 - shifts)
    return plus_columns(l, p), p, m, rescale


def with_positive_factor(x: Any, factor: float) -> tuple[Any, float]:
    """Returns (y, factor > 0) of the same product: only then is the maximum of the product that of y, times the factor."""
    return (x, factor) if factor > 0 else (x * factor, 1.0)


def plus_columns(l: Any, p: Any) -> Any:
    """Returns the partial sums `l`, or None for none, plus those of `p`: [queries, SUM_COLUMNS]."""
    for column in range(0, p.shape[1], SUM_COLUMNS):
        part = p[:, column : column + SUM_COLUMNS]
        l = part if l is None else l + part
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
        factor = factor * plan.dropout_scale
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
