"""The query heads of one key head as rows of one tile: they read the same keys, which are then loaded once.

Query t of head n = k * group + g becomes row t * group + g of key head k. In a problem of such rows every query head has
a key head of its own; its masks and scores are those of the call, asked at the head and the query of a row.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.masks.base import And, Mask, all_of, parts_of
from pallas_fa.masks.lengths import Lengths, lengths_of
from pallas_fa.operands.intervals import Range
from pallas_fa.problem import Operands, Problem
from pallas_fa.scores.base import Score


def of_operands(operands: Operands, group: int) -> Operands:
    """Returns operands whose queries are rows: q [B, T * group, K, H], arrays [B|1, K|1, T * group|1, S|1]; no sinks."""
    q, k, v, score, mask = operands[:5]
    B, T, N, H = q.shape
    rows = jnp.swapaxes(q.reshape(B, T, N // group, group, H), 2, 3).reshape(B, T * group, N // group, H)
    score, mask = jax.tree.map(lambda x: _array(x, T, group), (score, mask))
    score = None if score is None else _GroupedScore(score, group)
    mask = None if mask is None else _of_mask(mask, group)
    return Operands(rows, k, v, score, mask)


def of_problem(problem: Problem) -> Problem:
    """Returns the problem of rows."""
    dims, shape = problem.dims, jax.ShapeDtypeStruct
    q = shape((dims.B, dims.T, dims.N, problem.H), problem.dtype)
    k, v = (shape((dims.B, dims.S, problem.K, size), problem.dtype) for size in (problem.H, problem.Hv))
    operands = Operands(q, k, v, problem.score, problem.mask)
    return problem.with_operands(jax.eval_shape(lambda x: of_operands(x, problem.group), operands))


def per_query(x: Any, group: int) -> Any:
    """Returns [B, T * group, K, ...] of rows as [B, T, N, ...]."""
    B, rows, K, *rest = x.shape
    x = jnp.swapaxes(x.reshape(B, rows // group, group, K, *rest), 2, 3)
    return x.reshape(B, rows // group, K * group, *rest)


def has_lengths_by_head(problem: Problem) -> bool:
    """Whether a padding mask differs between the heads that would share a tile."""
    return any(x.shape[1] > 1 for x in jax.tree.leaves(lengths_of(problem.mask)))


def ask(question: Callable[[Any, Any], Range], group: int) -> Callable[[Any, Any], Range]:
    """Returns a range question of the mask of a call, such as `mask.kv_range`, as one about rows: [B|1, K|1, tiles]."""
    is_full = question.__name__.startswith("full")
    reduce_lo, reduce_hi = (jnp.max, jnp.min) if is_full else (jnp.min, jnp.max)

    def by_key_head(x, reduce):
        if jnp.ndim(x) < 3 or x.shape[1] == 1:
            return x
        return reduce(x.reshape(x.shape[0], -1, group, x.shape[2]), axis=2)

    def asked(lo, hi):
        a, b = question(*_queries(lo, hi, group))
        if not is_full and any(jnp.ndim(x) == 3 for x in (a, b)):  # an empty range must not widen the hull
            a, b = jnp.broadcast_arrays(a, b)
            a, b = jnp.where(a < b, a, 2**30), jnp.where(a < b, b, -(2**30))
        return by_key_head(a, reduce_lo), by_key_head(b, reduce_hi)

    return asked


def _queries(lo, hi, group):
    return lo // group, (hi - 1) // group + 1


def _array(x, T, group):
    """A bound array [B|1, N|1, T|1, S|1] by rows."""
    B, N, _, S = x.shape
    if N == 1:
        return x if x.shape[2] == 1 else jnp.repeat(x, group, axis=2)
    x = jnp.broadcast_to(x.reshape(B, N // group, group, -1, S), (B, N // group, group, T, S))
    return jnp.swapaxes(x, 2, 3).reshape(B, N // group, T * group, S)


def _of_mask(mask, group):
    lengths = parts_of(mask, Lengths)
    others = [part for part in parts_of(mask, Mask) if not isinstance(part, Lengths)]
    scaled = [Lengths(None if x.q_lengths is None else x.q_lengths * group, x.kv_lengths) for x in lengths]
    rest = [_GroupedMask(others[0] if len(others) == 1 else And(tuple(others)), group)] if others else []
    return all_of([*scaled, *rest])


def _head_and_query(n, row, group):
    return n * group + lax.rem(row, jnp.asarray(group, row.dtype)), lax.div(row, jnp.asarray(group, row.dtype))


@dataclasses.dataclass(frozen=True)
class _GroupedMask(Mask):
    """A bound mask whose arrays are already by rows."""

    mask: Mask
    group: int

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        return self.mask.allowed(b, *_head_and_query(n, t, self.group), s)

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self.mask.kv_range(*_queries(t_lo, t_hi, self.group))

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self.mask.full_kv_range(*_queries(t_lo, t_hi, self.group))


@dataclasses.dataclass(frozen=True)
class _GroupedScore(Score):
    """A bound score whose arrays are already by rows."""

    score: Score
    group: int

    @property
    def bound(self) -> float | None:
        return self.score.bound

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return self.score.apply(x, b, *_head_and_query(n, t, self.group), s)
