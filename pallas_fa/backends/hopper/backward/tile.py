"""Masks, scores and their derivatives on one tile of logits [own, other] of the backward kernel."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu import elementwise
from pallas_fa.backends.hopper.backward.plan import Plan
from pallas_fa.scores import evaluate, float_arrays, with_float_arrays

TILE, PER_OWN, PER_OTHER = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class Step(NamedTuple):
    """Where a tile is: batch entry, query head, its first own and other position, the warpgroup in its block.

    `cut`: whether the mask cuts it; `scalars`: the arrays without positions, by number.
    """

    b: Any
    n: Any
    own: Any
    other: Any
    wg: Any
    cut: Any
    scalars: dict[int, Any]


@dataclasses.dataclass(frozen=True)
class TileOfLogits:
    """Positions of queries `t` and keys `s`, the score with its arrays for this tile, `ok`: allowed pairs.

    None: not needed in this step, or all pairs allowed.
    """

    at: Step
    t: Any
    s: Any
    score: Any
    ok: Any

    @classmethod
    def load(cls, plan: Plan, at: Step, arrays_gmem: Any, scratch: dict[str, Any], slot: Any) -> "TileOfLogits":
        """What this tile needs, with arrays from slot `slot` of their rings."""
        dims, c, problem = plan.problem.dims, plan.config, plan.problem
        if problem.score is None and not at.cut:
            return cls(at, None, None, None, None)
        shape = 64, c.width
        own = at.own + plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
        other = at.other + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)
        t, s = (other, own) if plan.by_keys else (own, other)
        in_score = len(jax.tree.leaves(problem.score))
        needed = [i < in_score or at.cut for i in range(len(plan.arrays))]
        gets_gradient = lambda i: i < in_score and jnp.issubdtype(plan.arrays[i].dtype, jnp.floating)
        loaded = [
            _array(plan, i, at, scratch, slot, shape, gets_gradient(i)) if x else None for i, x in enumerate(needed)
        ]
        score, mask = jax.tree.unflatten(plan.tree, loaded)
        tests = []
        q_tile, kv_tile = (c.width, c.block) if plan.by_keys else (c.block, c.width)
        if at.cut and dims.S % kv_tile:
            tests.append(s < dims.S)
        if at.cut and plan.scored and dims.T % q_tile:
            tests.append(t < dims.T)
        if at.cut and mask is not None:
            allowed = lambda t, s, mask: mask.allowed(at.b, at.n, t, s)
            tests.append(jnp.broadcast_to(elementwise.inline(allowed, t, s, mask), shape))
        ok = None
        for test in tests:
            ok = test if ok is None else ok & test
        return cls(at, t, s, score, ok)

    def zero_where_masked(self, x: Any) -> Any:
        return x if self.ok is None else jnp.where(self.ok, x, 0.0)

    def scores(self, x: Any) -> Any:
        """Logits after the score."""
        if self.score is None:
            return x
        apply = lambda x, t, s, score: evaluate(score, x, self.at.b, self.at.n, t, s)
        return elementwise.inline(apply, x, self.t, self.s, self.score)

    def pullback(self, x: Any, dy: Any) -> tuple[Any, ...]:
        """(dx, gradients of the score's float arrays), float32 and of the tile's shape."""
        pullback = lambda x, dy, t, s, score: score_pullback(x, dy, self.at.b, self.at.n, t, s, score)
        return elementwise.inline(pullback, x, dy, self.t, self.s, self.score)


def _array(plan, i, at, scratch, slot, shape, gets_gradient):
    """Array i for this tile: broadcast to it, or a scalar that gets no gradient."""
    array = plan.arrays[i]
    if array.kind == "scalar":
        x = array.restore(at.scalars[i])
        return lax.broadcast_in_dim(x, shape, []) if gets_gradient else x
    smem = scratch[f"array{i}_smem"].at[slot]
    if array.kind == "row":
        return array.restore(lax.broadcast_in_dim(plgpu.load(smem, layout=PER_OTHER), shape, [1]))
    if array.kind == "column":
        own = smem.at[pl.ds(at.wg * 64, 64)]
        return array.restore(lax.broadcast_in_dim(plgpu.load(own, layout=PER_OWN), shape, [0]))
    return array.restore(plgpu.load(smem.at[at.wg], layout=TILE))


def score_pullback(x: Any, dy: Any, b: Any, n: Any, t: Any, s: Any, score: Any) -> tuple[Any, ...]:
    """(dx, gradients of the score's float arrays), all float32 and of the shape of x, for a gradient dy of the result."""
    apply = lambda x, arrays: evaluate(with_float_arrays(score, arrays), x, b, n, t, s)
    # As float32, so that no gradient is rounded before it is summed.
    arrays = tuple(a.astype(jnp.float32) for a in float_arrays(score))
    dx, gradients = jax.vjp(apply, x, arrays)[1](dy)
    return dx, *gradients
