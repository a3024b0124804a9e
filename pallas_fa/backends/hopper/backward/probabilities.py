"""P and dS of one tile of logits of the backward kernel."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.gradient_tile import TileOfLogits, TilePlace
from pallas_fa.backends.gpu.layouts import PER_COLUMN, PER_ROW, TILE
from pallas_fa.backends.gpu.registers import rounded
from pallas_fa.backends.hopper import products
from pallas_fa.backends.hopper.backward import chunks
from pallas_fa.backends.hopper.backward.padding import zero_keys, zero_streamed
from pallas_fa.backends.hopper.backward.plan import BackwardPlan
from pallas_fa.backends.hopper.backward.warpgroup import Accumulators, Slots, Warpgroup


def probabilities(
    w: Warpgroup,
    at: TilePlace,
    rows: Any,
    slots: Slots,
    sums: tuple[Any, ...],
    done: Any,
    accs: Accumulators,
) -> tuple[Any, Any, tuple[Any, ...], dict[int, Any]]:
    """Returns (P, dS) as operands of matmuls, `sums` plus the score's gradients of this tile, and those of arrays [T, S].

    An operand is a tuple of its parts, None where it is not needed. `done`: steps before.

    The accumulators start at -lse / scale and -delta, so that P = exp2(scale log2(e) S) and dS = P dP need no subtraction.
    With a score, logits are scaled, scored and shifted in registers instead. With `statistics_last`, statistics are added
    to what the matmuls give: S = K Q^T starts once Q is there, and they are loaded while it is under way.

    With `p_before_dp`, P is rounded, and the matmul that adds to dV issued, before that for dP, so that S and dP take
    registers one after the other.
    """
    plan, kind, wgmma = w.plan, w.plan.kind, w.wgmma
    problem, shape, scale = plan.problem, (64, plan.config.width), plan.problem.scale

    # Under a mask, a wait between matmuls makes ptxas serialise them (C7512).
    whole_step, waits_first = plan.array_slots > 1, problem.mask is not None
    if waits_first:
        w.wait_for_array_tiles(slots)
    statistics_last = plan.statistics_last

    def body(s_acc, dp_acc: Any = None):
        # Both start before the first matmul: ptxas would make them wait for it.
        if not plan.scored and not statistics_last:
            s_acc[...] = statistic(w, "neg_lse", slots.qk, rows)
        if dp_acc is not None and plan.delta_first:
            dp_acc[...] = statistic(w, "delta", slots.pv, rows)
        if plan.chunked:
            chunks.products(w, done, rows, slots.qk, {"qk": s_acc} | ({"pv": dp_acc} if kind.accumulates_qk else {}))
            return after_products(s_acc, dp_acc, 0)
        w.ping_pong.wait_to_issue()
        wgmma.inner_products(s_acc, w.chunks_of_stationary("qk", rows), w.streamed_qk.at[slots.qk])
        if statistics_last:
            w.wait_for_pv(slots)
            zero_streamed(w, at, slots, "pv")
        if plan.p_before_dp:
            _, p = tile_and_p(wgmma.result(s_acc, in_flight=0))
            if whole_step:
                w.release_array_tiles(slots)
            return rounded(p, problem.dtype, plan.interpret)
        if statistics_last and kind.accumulates_qk:
            return wgmma.scoped(functools.partial(after_logits, s_acc), shape)
        return after_logits(s_acc, dp_acc)

    def after_p(p, dp_acc):
        if plan.delta_first:
            dp_acc[...] = statistic(w, "delta", slots.pv, rows)
        streamed_pv = w.streamed_pv.at[slots.pv]
        wgmma.weighted_sums(accs.pv, (p,), streamed_pv)
        wgmma.inner_products(dp_acc, w.chunks_of_stationary("pv", rows), streamed_pv)
        dp = wgmma.result(dp_acc, in_flight=0)
        dp = dp if plan.delta_first else dp + statistic(w, "delta", slots.pv, rows)
        ds = products.operand(problem, p.astype(jnp.float32) * dp)
        return (p,), _padded(w, at, ds), sums, {}

    def after_logits(s_acc, dp_acc: Any):
        issued = 0
        if kind.accumulates_qk:
            issued = wgmma.inner_products(dp_acc, w.chunks_of_stationary("pv", rows), w.streamed_pv.at[slots.pv])
        w.ping_pong.let_next_issue()
        return after_products(s_acc, dp_acc, issued)

    def tile_and_p(s):
        if not waits_first:
            w.wait_for_array_tiles(slots)
        tile = TileOfLogits.of(plan, at, lambda i: array_of_tile(w, i, slots))
        if not whole_step:
            w.release_array_tiles(slots)
        p = exponentials(plan, tile, s, lambda: statistic(w, "neg_lse", slots.qk, rows))
        return tile, tile.zero_where_masked(p)

    def after_products(s_acc, dp_acc: Any, issued):
        kept = at.kept(plan, w.memory_of_draw(done) if plan.shares_draws else None)
        s = wgmma.result(s_acc, in_flight=issued)
        tile, p = tile_and_p(s)
        kept_p = p if kept is None else kept.select(p)
        p_operand = products.operand(problem, kept_p) if kind.accumulates_pv else None
        if not kind.accumulates_qk:
            if whole_step:
                w.release_array_tiles(slots)
            return p_operand, None, sums, {}
        # Gradients are linear in that of the scores: all but the last factor is known before dP.
        weights = tile.pullback(s, p, scale) if kept is None else None
        dp = wgmma.result(dp_acc, in_flight=0)
        if weights is None:  # delta is that of all P
            found = tile.pullback(s, kept_p * dp + p * statistic(w, "delta", slots.pv, rows), scale)
        else:
            dp = dp if plan.delta_first else dp + statistic(w, "delta", slots.pv, rows)
            found = [weight * dp for weight in weights]
        ds, *gradients = tile.without_nan(found, plan.padding.behind_mask or plan.scored)
        if whole_step:
            w.release_array_tiles(slots)
        scores = plan.score_gradients
        by_array = dict(zip(scores.floats, gradients, strict=True))
        new_sums = tuple(old + by_array[i].sum(axis=1) for i, old in zip(scores.summed, sums, strict=True))
        ds_operand = _padded(w, at, products.operand(problem, ds))
        return p_operand, ds_operand, new_sums, {i: by_array[i] for i in scores.added}

    if plan.p_before_dp:
        return wgmma.scoped(functools.partial(after_p, wgmma.scoped(body, shape)), shape)
    return wgmma.scoped(body, *(shape,) * (2 if kind.accumulates_qk and not statistics_last else 1))


def statistic(w: Warpgroup, name: str, slot: Any, rows: Any = None) -> Any:
    """Returns a row statistic, broadcast to a tile, from its slot. `rows`: this warpgroup's, where it holds queries."""
    smem, shape = w.scratch[f"{name}_smem"], (64, w.plan.config.width)
    if w.plan.kind.keys_stationary:
        return lax.broadcast_in_dim(plgpu.load(smem.at[slot], layout=PER_COLUMN), shape, [1])
    return lax.broadcast_in_dim(plgpu.load(smem.at[0, rows], layout=PER_ROW), shape, [0])


def _padded(w, at, ds):
    """The parts of dS, with zeros in the rows of keys past a length if dQ sums over them."""
    return tuple(zero_keys(w, part, at.n) for part in ds) if w.plan.padding.ds else ds


def exponentials(plan: BackwardPlan, tile: TileOfLogits, s: Any, neg_lse: Callable[[], Any]) -> Any:
    """Returns P of the products `s`, before masks. `neg_lse`: loads the statistic, where the products do not start at it."""
    scale = plan.problem.scale
    if plan.scored:
        y, factor = tile.scores(s, scale)
        if plan.in_base_2:
            return jnp.exp2(y * (factor * LOG2E) + neg_lse())
        # A bias such as -1e10 instead of a mask leaves no digits for a rounded product.
        return jnp.exp2((y * factor + neg_lse()) * LOG2E)
    if plan.statistics_last:
        return jnp.exp2(s * (scale * LOG2E) + neg_lse())
    return jnp.exp2(s * (scale * LOG2E))


def array_of_tile(w: Warpgroup, i: int, slots: Slots) -> Any:
    """Returns the part of array i in a tile of this warpgroup, from its slot."""
    array, smem = w.plan.arrays[i], w.scratch[f"array{i}_smem"]
    smem = smem.at[slots.arrays, w.row_group] if array.kind == "tile" else smem.at[slots.qk]
    if array.kind == "column":
        smem = smem.at[pl.ds(w.row_group * 64, 64)]
    return array.load(smem, (64, w.plan.config.width), TILE)
