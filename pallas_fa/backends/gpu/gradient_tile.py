"""Masks, scores and their derivatives on one tile of logits [stationary, streamed] of a backward kernel."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu import elementwise
from pallas_fa.backends.gpu.allowed import Pairs, elementwise_test
from pallas_fa.backends.gpu.backward_plan import BackwardCore
from pallas_fa.backends.gpu.dropout import HeadDropout, Kept
from pallas_fa.backends.gpu.layouts import indices
from pallas_fa.masks.band import Causal
from pallas_fa.problem import Problem
from pallas_fa.scores.base import evaluate, float_arrays, with_float_arrays


class TilePlace(NamedTuple):
    """Where a tile of a warpgroup is: batch entry, query head, its first stationary and its first streamed position.

    `is_boundary`: whether the mask may hide some of it; `scalars`: the arrays without positions and the words, by number.
    `dropout`: that of the head, or None.
    """

    b: Any
    n: Any
    stationary: Any
    streamed: Any
    is_boundary: bool
    scalars: dict[int, Any]
    dropout: HeadDropout | None

    def kept(self, plan: BackwardCore, memory: Any = None) -> Kept | None:
        """Returns what dropout keeps of the tile; None without dropout. `memory`: as of `HeadDropout.draw`."""
        if self.dropout is None:
            return None
        by_keys, shape = plan.kind.keys_stationary, (plan.config.rows, plan.config.width)
        t0, s0 = (self.streamed, self.stationary) if by_keys else (self.stationary, self.streamed)
        return self.dropout.draw(shape, t0, s0, keys_by_queries=by_keys, memory=memory)


@dataclasses.dataclass(frozen=True)
class TileOfLogits:
    """Positions of queries `t` and keys `s`, the score with its arrays for this tile, `allowed`: which pairs are.

    None: not needed in this step, or all pairs allowed. `precise`: see `elementwise.inline`.
    """

    at: TilePlace
    t: Any = None
    s: Any = None
    score: Any = None
    allowed: Any = None
    precise: bool = False

    @classmethod
    def of(cls, plan: BackwardCore, at: TilePlace, load: Callable[[int], Any]) -> "TileOfLogits":
        """Returns it for a tile of a warpgroup; load(i) loads the part of array i in the tile, not of scalars and words."""
        dims, c, problem = plan.problem.dims, plan.config, plan.problem
        if problem.score is None and not at.is_boundary:
            return cls(at)
        shape = c.rows, c.width
        # Masks without arrays gain nothing by it, and ptxas then orders the loop over full tiles worse.
        shared = bool(jax.tree.leaves((problem.mask, problem.score)))
        stationary, streamed = (
            first + indices(shape, axis, plan.interpret, shared)
            for axis, first in enumerate((at.stationary, at.streamed))
        )
        t, s = (streamed, stationary) if plan.kind.keys_stationary else (stationary, streamed)
        score, mask = plan.arrays.unflatten([_array(plan, i, at, shape, load) for i in range(len(plan.arrays))])
        precise = problem.dtype == jnp.float32
        if not at.is_boundary:
            return cls(at, t, s, score, precise=precise)
        q_tile, kv_tile = (plan.tile, c.block) if plan.kind.keys_stationary else (c.block, plan.tile)
        s_end = dims.S if dims.S % kv_tile else None
        t_end = dims.T if plan.scored and dims.T % q_tile else None
        ends = (s_end, t_end) if plan.kind.keys_stationary else (t_end, s_end)
        question = "q_range" if plan.kind.keys_stationary else "kv_range"
        pairs = Pairs(shape, at.stationary, at.streamed, question, *ends, plan.interpret)
        tested = plan.tested(mask)
        # Alone, a causal mask is one comparison either way, and the loop over full tiles is ordered better so.
        by_element = isinstance(tested, Causal) and not shared and ends == (None, None)
        test = elementwise_test if by_element else pairs.allowed
        allowed = test(tested, at.b, at.n, t, s)
        return cls(at, t, s, score, allowed, precise)

    def zero_where_masked(self, x: Any) -> Any:
        """Returns x, with 0 in the places of pairs that are not allowed."""
        return x if self.allowed is None else jnp.where(self.allowed, x, 0.0)

    def without_nan(self, gradients: Sequence[Any], may_be_nan: bool) -> list[Any]:
        """Returns `gradients` of the tile's shape, with 0 in the places of pairs that are not allowed.

        `may_be_nan`: whether their factors may be NaN there; 0 * NaN is NaN. Else they are 0 already, since P is.
        """
        return [self.zero_where_masked(x) if may_be_nan else x for x in gradients]

    def scores(self, x: Any, scale: float) -> tuple[Any, float]:
        """Returns (y, factor), whose product are the logits after the score, where those before it are x * scale."""
        if self.score is None:
            return x, scale
        apply = lambda x, t, s, score: evaluate(score, _times(x, scale), self.at.b, self.at.n, t, s)
        return elementwise.inline_times(apply, x, self.t, self.s, self.score, precise=self.precise)

    def pullback(self, x: Any, dy: Any, scale: float) -> tuple[Any, ...]:
        """Returns (d(x * scale), gradients of the score's float arrays), float32 and of the tile's shape.

        All of them are linear in `dy`, element by element. The derivative is taken of the very function of x that `scores`
        evaluates, so that compilers find what they share, and the scale meets the numbers that the score multiplies by
        (evidence: backward/score-derivative).
        """
        if self.score is None:
            return (dy,)
        if not 2.0**-40 < scale < 2.0**40:
            x, scale = x * scale, 1.0
        pullback = lambda x, dy, t, s, score: score_pullback(x, dy, self.at.b, self.at.n, t, s, score, scale)
        products = elementwise.inline_products(pullback, x, dy, self.t, self.s, self.score, precise=self.precise)
        (dx, factor), *gradients = products
        return _times(dx, factor / scale), *(_times(*gradient) for gradient in gradients)


def _times(x, factor):
    """x * factor, but x where only the rounding of numbers keeps the factor from 1."""
    return x if abs(factor - 1) < 2.0**-40 else x * factor


def _array(plan, i, at, shape, load):
    """Array i for this tile: broadcast to it, or a scalar without a gradient; None for a mask's array in a full tile."""
    array, in_score = plan.arrays[i], i < plan.arrays.in_score
    if not in_score and not at.is_boundary:
        return None
    if array.kind not in ("scalar", "word"):
        return load(i)
    x = array.restore(at.scalars[i])
    gets_gradient = in_score and jnp.issubdtype(array.dtype, jnp.floating)
    return lax.broadcast_in_dim(x, shape, []) if gets_gradient else x


def score_pullback(x: Any, dy: Any, b: Any, n: Any, t: Any, s: Any, score: Any, scale: float = 1.0) -> tuple[Any, ...]:
    """Returns (dx, gradients of the score's float arrays), all float32 [like x], for a gradient dy of score(x * scale)."""
    apply = lambda x, arrays: evaluate(with_float_arrays(score, arrays), _times(x, scale), b, n, t, s)
    # As float32, so that no gradient is rounded before it is summed.
    arrays = tuple(a.astype(jnp.float32) for a in float_arrays(score))
    dx, gradients = jax.vjp(apply, x, arrays)[1](dy)
    return dx, *gradients


def why_not_pullback(problem: Problem) -> str | None:
    """Returns None if the derivative of the problem's score lowers in a kernel, else the reason."""
    if problem.score is None:
        return None
    x, i, scalar = (jax.ShapeDtypeStruct(*like) for like in (((64, 64), "float32"), ((64, 64), "int32"), ((), "int32")))
    is_scalar = lambda a: a.shape[2:4] == (1, 1) and not jnp.issubdtype(a.dtype, jnp.floating)
    score = jax.tree.map(lambda a: jax.ShapeDtypeStruct(() if is_scalar(a) else x.shape, a.dtype), problem.score)
    reason = elementwise.why_not(score_pullback, x, x, scalar, scalar, i, i, score)
    return reason and f"the score can't run in the backward kernel: {reason}"
