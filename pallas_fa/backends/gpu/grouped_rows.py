"""The query heads of one key head as rows of one tile: they read the same keys, which are then loaded once.

Query t of head n = k * group + g becomes row t * group + g of key head k. In a problem of such rows every query head has
a key head of its own; its masks and scores are those of the call, asked at the head and the query of a row. Rows lie
together in memory, [B, K, rows, H]: with one query, that is how the heads lie already.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.masks.base import And, Mask, all_of, parts_of
from pallas_fa.masks.lengths import Lengths, lengths_of
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED, Range
from pallas_fa.operands.layout import ordered
from pallas_fa.problem import Operands, Problem
from pallas_fa.scores.base import Score


def of_operands(problem: Problem, operands: Operands) -> Operands:
    """Returns operands whose queries are rows: q [B, K, T * group, H], arrays [B|1, K|1, T * group|1, S|1]."""
    dims, group = problem.dims, problem.group
    by_query = ordered(problem.layout, (0, 1, 2, 3))
    q = operands.q.transpose(by_query).reshape(dims.B, dims.T, problem.K, group, problem.H)
    rows = q.transpose(0, 2, 1, 3, 4).reshape(dims.B, problem.K, dims.T * group, problem.H)
    return operands._replace(q=rows, score=_of_score(problem, operands.score), mask=_of_mask(problem, operands.mask))


def of_window(problem: Problem, operands: Operands) -> Operands:
    """Returns operands of a kernel that gathers rows itself, under a mask without arrays."""
    return operands._replace(mask=_of_mask(problem, operands.mask))


def of_problem(problem: Problem) -> Problem:
    """Returns the problem of rows."""
    dims = problem.dims
    rows = Dims(dims.batch, dims.T * problem.group, dims.S, problem.K)
    mask, score = (
        jax.eval_shape(functools.partial(of, problem), tree)
        for of, tree in ((_of_mask, problem.mask), (_of_score, problem.score))
    )
    return dataclasses.replace(problem, dims=rows, mask=mask, score=score)


def per_query(problem: Problem, x: Any) -> Any:
    """Returns [B, K, T * group, ...] of rows as [B, T, N, ...] of queries, in the order "BTNH"."""
    dims, rest = problem.dims, x.shape[3:]
    x = x.reshape(dims.B, problem.K, dims.T, problem.group, *rest)
    return jnp.swapaxes(x, 1, 2).reshape(dims.B, dims.T, dims.N, *rest)


def has_rows(problem: Problem) -> bool:
    """Whether masks and scores have a form by rows: not block masks, padding that differs between heads, diagonals."""
    by_head = any(x.shape[1] > 1 for x in jax.tree.leaves(lengths_of(problem.mask)))
    return not by_head and all(len(x.shape) == 4 for x in jax.tree.leaves((problem.score, problem.mask)))


def visited(problem: Problem, mask: Mask) -> Mask:
    """Returns a mask that answers range questions about rows, from the bound mask of the call: [B|1, K|1, tiles]."""
    return _GroupedMask(mask, problem.group)


def _array(x, T, group):
    """A bound array [B|1, N|1, T|1, S|1] by rows."""
    B, N, _, S = x.shape
    if N == 1:
        return x if x.shape[2] == 1 else jnp.repeat(x, group, axis=2)
    x = jnp.broadcast_to(x.reshape(B, N // group, group, -1, S), (B, N // group, group, T, S))
    return jnp.swapaxes(x, 2, 3).reshape(B, N // group, T * group, S)


def _of_score(problem, score):
    if score is None:
        return None
    return _GroupedScore(jax.tree.map(lambda x: _array(x, problem.dims.T, problem.group), score), problem.group)


def _of_mask(problem, mask):
    if mask is None:
        return None
    group = problem.group
    mask = jax.tree.map(lambda x: _array(x, problem.dims.T, group), mask)
    lengths = parts_of(mask, Lengths)
    others = [part for part in parts_of(mask, Mask) if not isinstance(part, Lengths)]
    scaled = [Lengths(None if x.q_lengths is None else x.q_lengths * group, x.kv_lengths) for x in lengths]
    rest = [_GroupedMask(others[0] if len(others) == 1 else And(tuple(others)), group)] if others else []
    return all_of([*scaled, *rest])


def _head_and_query(n, row, group):
    return n * group + lax.rem(row, jnp.asarray(group, row.dtype)), lax.div(row, jnp.asarray(group, row.dtype))


@dataclasses.dataclass(frozen=True)
class _GroupedMask(Mask):
    """A bound mask whose arrays are already by rows; or for range questions alone, still by query heads."""

    mask: Mask
    group: int

    @property
    def scalar_ranges(self) -> bool:
        return self.mask.scalar_ranges

    @property
    def exact_ranges(self) -> tuple[str, ...]:
        return tuple(x for x in self.mask.exact_ranges if x == "kv_range")

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        return self.mask.allowed(b, *_head_and_query(n, t, self.group), s)

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        lo, hi = self.mask.kv_range(t_lo // self.group, (t_hi - 1) // self.group + 1)
        if any(jnp.ndim(x) == 3 for x in (lo, hi)):  # an empty range must not widen the hull
            lo, hi = jnp.broadcast_arrays(lo, hi)
            lo, hi = jnp.where(lo < hi, lo, UNBOUNDED), jnp.where(lo < hi, hi, -UNBOUNDED)
        return self._by_key_head(lo, jnp.min), self._by_key_head(hi, jnp.max)

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        lo, hi = self.mask.full_kv_range(t_lo // self.group, (t_hi - 1) // self.group + 1)
        return self._by_key_head(lo, jnp.max), self._by_key_head(hi, jnp.min)

    def _by_key_head(self, x, reduce):
        if jnp.ndim(x) < 3 or x.shape[1] == 1:
            return x
        return reduce(x.reshape(x.shape[0], -1, self.group, x.shape[2]), axis=2)


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
