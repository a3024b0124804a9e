"""One step of a compute warpgroup of the backward kernel: its 64 stationary positions against one streamed tile."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.gradient_tile import TilePlace
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.gpu.registers import opaque
from pallas_fa.backends.hopper.backward import by_gradient, chunks
from pallas_fa.backends.hopper.backward.array_gradients import store_array_gradients
from pallas_fa.backends.hopper.backward.dq import DqSums
from pallas_fa.backends.hopper.backward.padding import zero_streamed
from pallas_fa.backends.hopper.backward.probabilities import probabilities
from pallas_fa.backends.hopper.backward.scale_ds import times
from pallas_fa.backends.hopper.backward.warpgroup import Accumulators, Slots, Warpgroup
from pallas_fa.backends.hopper.tiles import pieces as tiles_of_columns
from pallas_fa.backends.hopper.tma import fence_async_proxy


def step(w: Warpgroup, at: TilePlace, done: Any, sums: tuple[Any, ...], accs: Accumulators) -> tuple[Any, ...]:
    """Adds one tile to the accumulators, to `sums` (returned) and, through memory, to dQ. `done`: steps before."""
    plan, wgmma = w.plan, w.wgmma
    if plan.chunked:
        return _step_of_chunks(w, at, done, sums, accs)
    if plan.by_gradient:
        by_gradient.step(w, at, done, accs)
        return sums
    wg = opaque(w.wg, plan.interpret)
    rows = pl.ds(wg * 64, 64)
    slots = w.slots(done)
    streamed_qk, streamed_pv = w.streamed_qk.at[slots.qk], w.streamed_pv.at[slots.pv]
    w.wait_for_qk(slots)
    if plan.statistics_last:
        zero_streamed(w, at, slots, "qk")
    else:
        w.wait_for_pv(slots)
        zero_streamed(w, at, slots, "qk", "pv")

    p, ds, sums, gradients = probabilities(w, at, rows, slots, sums, done, accs)
    if not plan.dq:
        wgmma.weighted_sums(accs.pv, p, streamed_pv)
        store_array_gradients(w, at, gradients)
        issued = wgmma.weighted_sums(accs.qk, ds, streamed_qk)
        wgmma.wait(issued)
        w.release_pv(slots)
        wgmma.wait(0)
        w.release_qk(slots)
        return sums

    ds_smem = _ds_smem(w, done)
    d_pv = () if plan.p_before_dp else accs.pv
    dv_first = plan.problem.mask is not None or plan.statistics_last  # evidence: backward/dv-matmul-first
    dv_first = dv_first or bool(gradients)
    if dv_first:
        wgmma.weighted_sums(d_pv, p, streamed_pv)
    store_array_gradients(w, at, gradients)
    for smem, part in zip(ds_smem, ds, strict=True):
        smem[rows] = part
    if not dv_first:
        wgmma.weighted_sums(d_pv, p, streamed_pv)
    fence_async_proxy(plan.interpret)
    w.barriers["wgs_meet"].wait()
    ds_of_dk = [x.at[rows] for x in ds_smem] if plan.splits or plan.p_before_dp else ds
    _stage_dq(w, plan.dq, wg, done, ds_smem, accs.qk, ds_of_dk, slots)
    wgmma.wait(0)  # dK is done
    w.release_qk(slots)
    return sums


def _step_of_chunks(w, at, done, sums, accs):
    """As `step`, where the logits' products take chunk after chunk."""
    plan, wgmma = w.plan, w.wgmma
    again = lambda x: opaque(jnp.int32(x), plan.interpret)
    slot = again(lax.rem(done, jnp.int32(plan.config.stages[0])))
    rows, slots = pl.ds(again(w.row_group) * 64, 64), Slots(slot, slot, 0)
    if "beside_ready" in w.scratch:
        plgpu.barrier_wait(w.scratch["beside_ready"].at[slot])
    p, ds, sums, gradients = probabilities(w, at, rows, slots, sums, done, accs)
    chunks.wait_for_whole_tile(w, slot)
    if plan.padding.streamed and at.is_boundary:
        w.barriers["wgs_meet"].wait()  # no warpgroup reads the tile for its logits any more
        zero_streamed(w, at, slots, "qk", "pv")
    for name, weights in (("pv", p), ("qk", ds)):
        of_operand = getattr(accs, name)
        if of_operand:
            first = again(w.first_chunk(of_operand))
            wgmma.weighted_sums(of_operand, weights, getattr(w, f"streamed_{name}").at[slot], first)
    store_array_gradients(w, at, gradients)
    wgmma.wait(0)
    (w.release_pv if plan.in_ring == "qk" else w.release_qk)(slots)
    return sums


def skip(w: Warpgroup, done: Any) -> None:
    """Takes part in a step that only other warpgroups compute; its dS is 0 in their matmul for dQ."""
    plan = w.plan
    slots = w.slots(done)
    w.wait_for_qk(slots)
    w.wait_for_pv(slots)
    w.ping_pong.wait_to_issue()
    w.ping_pong.let_next_issue()
    w.wait_for_array_tiles(slots)
    w.release_array_tiles(slots)
    if plan.dq:
        wg = opaque(w.wg, plan.interpret)
        ds_smem = _ds_smem(w, done)
        zeros = jnp.zeros((64, plan.config.width), plan.tiles.stationary_qk.dtype)
        for part_smem in ds_smem:
            part_smem[pl.ds(wg * 64, 64)] = plgpu.layout_cast(zeros, TILE)
        fence_async_proxy(plan.interpret)
        w.barriers["wgs_meet"].wait()
        _stage_dq(w, plan.dq, wg, done, ds_smem, (), None, slots)
    else:
        w.release_pv(slots)
    w.release_qk(slots)


def _ds_smem(w, done):
    """Where step `done` puts the parts of dS, once no warpgroup reads them any more."""
    c, parts = w.plan.config, w.plan.tiles.stationary_qk.parts
    if c.ds_stages == 1 and c.compute_wgs > 1:
        w.barriers["wgs_meet"].wait()
    stage = lax.rem(done, jnp.int32(c.ds_stages))
    return [w.scratch["ds_smem"].at[stage * parts + i if parts > 1 else stage] for i in range(parts)]


def _stage_dq(w: Warpgroup, dq: DqSums, wg: Any, done: Any, ds_smem: Any, qk_accs: Any, ds: Any, slots: Slots) -> None:
    """Computes dQ = dS K and stages it for a store warp; issues the matmul of dK, which stays under way."""
    plan, wgmma, wgs, tiles = w.plan, w.wgmma, w.plan.config.compute_wgs, w.plan.tiles.stationary_qk
    place = lambda part, i, *columns: (part * tiles.chunks + i if part else i, *columns)
    parts_at = lambda *at: [w.stationary_qk.at[place(part, *at)] for part in range(tiles.parts)]
    if dq.by_rows:
        ds_smem = [x.at[:, pl.ds(wg * 64, 64)] if wgs > 1 else x for x in ds_smem]
        columns = [(slice(None), pl.ds(i, 64)) for i in range(0, tiles.chunk, 64)] if plan.splits else [()]
        keys = [parts_at(i, *at) for i in range(tiles.chunks) for at in columns]
    elif tiles.chunks > 1:
        keys = [parts_at(wg)]
    else:
        keys = [parts_at(0, slice(None), pl.ds(wg * dq.columns, dq.columns))]

    def issue_dk():
        return wgmma.weighted_sums(qk_accs, ds, w.streamed_qk.at[slots.qk]) if qk_accs else 0

    def matmuls(keys, is_first, is_last, *dq_accs):
        issued = sum(wgmma.sum_of_products(acc, ds_smem, k) for acc, k in zip(dq_accs, keys, strict=True))
        if is_first:
            wgmma.wait(issued)  # dV is done
            w.release_pv(slots)
        issued = issue_dk() if is_last and not plan.config.dk_last else 0
        return tuple(wgmma.result(acc, in_flight=issued) for acc in dq_accs)

    # Split operands leave registers for 64 columns at a time.
    groups, column = [[k] for k in keys] if plan.splits else [keys], 0
    for group in groups:
        body = functools.partial(matmuls, group, group is groups[0], group is groups[-1])
        pieces = wgmma.scoped(body, *((64, k[0].shape[1]) for k in group))
        if group is groups[0]:
            w.barriers["dq_free"].wait(wg)
        for x in tiles_of_columns(pieces, dq.tile.chunk) if dq.is_final else pieces:
            if dq.is_final:
                chunk, first = divmod(column, dq.tile.chunk)
                place = dq.tile.matrix(w.scratch["dq_smem"]).at[wg, chunk, :, pl.ds(first, x.shape[1])]
                place[...] = times(x, w.qk_scale).astype(dq.tile.dtype)
            else:
                w.scratch["dq_smem"][wg, :, column : column + x.shape[1]] = x
            column += x.shape[1]
    if plan.config.dk_last:
        issue_dk()
    fence_async_proxy(plan.interpret)
    w.barriers["dq_ready"].arrive(lax.rem(done, jnp.int32(dq.store_warps)) * wgs + wg)
