"""Masks, scores and their derivatives on one tile of logits [stationary, streamed] of the backward kernel."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu import elementwise
from pallas_fa.backends.hopper.backward.plan import BackwardPlan
from pallas_fa.backends.hopper.dropout import HeadDropout
from pallas_fa.scores.base import evaluate, float_arrays, with_float_arrays

TILE, PER_STATIONARY, PER_STREAMED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class TilePlace(NamedTuple):
    """Where a tile is: batch entry, query head, its first stationary and streamed position, the warpgroup in its CTA.

    `is_boundary`: whether the mask may hide some of it; `scalars`: the arrays without positions and the words, by number.
    `dropout`: that of the head, or None.
    """

    b: Any
    n: Any
    stationary: Any
    streamed: Any
    wg: Any
    is_boundary: bool
    scalars: dict[int, Any]
    dropout: HeadDropout | None


@dataclasses.dataclass(frozen=True)
class TileOfLogits:
    """Positions of queries `t` and keys `s`, the score with its arrays for this tile, `allowed`: which pairs are.

    None: not needed in this step, or all pairs allowed.
    """

    at: TilePlace
    t: Any = None
    s: Any = None
    score: Any = None
    allowed: Any = None

    @classmethod
    def load(cls, plan: BackwardPlan, at: TilePlace, scratch: dict[str, Any], slot: Any) -> "TileOfLogits":
        """Loads what this tile needs, with arrays from slot `slot` of their rings."""
        dims, c, problem = plan.problem.dims, plan.config, plan.problem
        if problem.score is None and not at.is_boundary:
            return cls(at)
        shape = 64, c.width
        stationary = at.stationary + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
        streamed = at.streamed + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
        t, s = (streamed, stationary) if plan.kind.keys_stationary else (stationary, streamed)
        score, mask = plan.arrays.unflatten([_array(plan, i, at, scratch, slot) for i in range(len(plan.arrays))])
        if not at.is_boundary:
            return cls(at, t, s, score)
        tests = []
        q_tile, kv_tile = (c.width, c.block) if plan.kind.keys_stationary else (c.block, c.width)
        if dims.S % kv_tile:
            tests.append(s < dims.S)
        if plan.scored and dims.T % q_tile:
            tests.append(t < dims.T)
        if mask is not None:
            allowed = lambda t, s, mask: mask.allowed(at.b, at.n, t, s)
            tests.append(jnp.broadcast_to(elementwise.inline(allowed, t, s, mask), shape))
        allowed = None
        for test in tests:
            allowed = test if allowed is None else allowed & test
        return cls(at, t, s, score, allowed)

    def zero_where_masked(self, x: Any) -> Any:
        """Returns x, with 0 in the places of pairs that are not allowed."""
        return x if self.allowed is None else jnp.where(self.allowed, x, 0.0)

    def dropped(self, plan: BackwardPlan, p: Any) -> Any:
        """Returns P after dropout, unscaled; where dS is computed from it, -P in the places of what is dropped."""
        keys_by_queries, at = plan.kind.keys_stationary, self.at
        if at.dropout is None:
            return p
        t0, s0 = (at.streamed, at.stationary) if keys_by_queries else (at.stationary, at.streamed)
        options = dict(keys_by_queries=keys_by_queries, negate=plan.kind.accumulates_qk)
        return at.dropout.apply(p, t0, s0, **options)

    def scores(self, x: Any) -> Any:
        """Returns logits after the score."""
        if self.score is None:
            return x
        apply = lambda x, t, s, score: evaluate(score, x, self.at.b, self.at.n, t, s)
        return elementwise.inline(apply, x, self.t, self.s, self.score)

    def pullback(self, x: Any, dy: Any) -> tuple[Any, ...]:
        """Returns (dx, gradients of the score's float arrays), float32 and of the tile's shape."""
        pullback = lambda x, dy, t, s, score: score_pullback(x, dy, self.at.b, self.at.n, t, s, score)
        return elementwise.inline(pullback, x, dy, self.t, self.s, self.score)


def _array(plan, i, at, scratch, slot):
    """Array i for this tile: broadcast to it, or a scalar without a gradient; None for a mask's array in a full tile."""
    array, shape, in_score = plan.arrays[i], (64, plan.config.width), i < plan.arrays.in_score
    if not in_score and not at.is_boundary:
        return None
    if array.kind in ("scalar", "word"):
        x = array.restore(at.scalars[i])
        gets_gradient = in_score and jnp.issubdtype(array.dtype, jnp.floating)
        return lax.broadcast_in_dim(x, shape, []) if gets_gradient else x
    smem = scratch[f"array{i}_smem"].at[slot]
    if array.kind == "column":
        smem = smem.at[pl.ds(at.wg * 64, 64)]
    return array.load(smem.at[at.wg] if array.kind == "tile" else smem, shape, TILE)


def score_pullback(x: Any, dy: Any, b: Any, n: Any, t: Any, s: Any, score: Any) -> tuple[Any, ...]:
    """Returns (dx, gradients of the score's float arrays), all float32 [like x], for a gradient dy of the result."""
    apply = lambda x, arrays: evaluate(with_float_arrays(score, arrays), x, b, n, t, s)
    # As float32, so that no gradient is rounded before it is summed.
    arrays = tuple(a.astype(jnp.float32) for a in float_arrays(score))
    dx, gradients = jax.vjp(apply, x, arrays)[1](dy)
    return dx, *gradients
