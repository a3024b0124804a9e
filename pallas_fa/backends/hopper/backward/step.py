"""One step of a compute warpgroup of the backward kernel: its 64 stationary positions against one streamed tile."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.gradient_tile import TilePlace
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.gpu.registers import opaque
from pallas_fa.backends.hopper.backward.dq import DqSums
from pallas_fa.backends.hopper.backward.padding import zero_streamed
from pallas_fa.backends.hopper.backward.probabilities import probabilities
from pallas_fa.backends.hopper.backward.warpgroup import Accumulators, Slots, Warpgroup
from pallas_fa.backends.hopper.tma import fence_async_proxy


def step(w: Warpgroup, at: TilePlace, done: Any, sums: tuple[Any, ...], accs: Accumulators) -> tuple[Any, ...]:
    """Adds one tile to the accumulators, to `sums` (returned) and, through memory, to dQ. `done`: steps before."""
    plan, wgmma = w.plan, w.wgmma
    wg = opaque(w.wg, plan.interpret)
    rows = pl.ds(wg * 64, 64)
    slots = w.wait_for_tile(done)
    streamed_qk, streamed_pv = w.streamed_qk.at[slots.qk], w.streamed_pv.at[slots.pv]
    if plan.padding.streamed and at.is_boundary:
        zero_streamed(w, at, slots)

    p, ds, sums = probabilities(w, at, rows, slots, sums)
    if not plan.dq:
        wgmma.weighted_sums(accs.pv, p, streamed_pv)
        wgmma.weighted_sums(accs.qk, ds, streamed_qk)
        wgmma.wait(len(accs.qk))
        w.release_pv(slots)
        wgmma.wait(0)
        w.release_qk(slots)
        return sums

    ds_smem = _ds_smem(w, done)
    dv_first = plan.problem.mask is not None  # evidence: backward/dv-matmul-first
    if dv_first:
        wgmma.weighted_sums(accs.pv, p, streamed_pv)
    ds_smem[rows] = ds
    if not dv_first:
        wgmma.weighted_sums(accs.pv, p, streamed_pv)
    fence_async_proxy(plan.interpret)
    w.barriers["wgs_meet"].wait()
    _stage_dq(w, plan.dq, wg, done, ds_smem, accs.qk, ds, slots)
    wgmma.wait(0)  # dK is done
    w.release_qk(slots)
    return sums


def skip(w: Warpgroup, done: Any) -> None:
    """Takes part in a step that only other warpgroups compute; its dS is 0 in their matmul for dQ."""
    plan = w.plan
    slots = w.wait_for_tile(done)
    if plan.dq:
        wg = opaque(w.wg, plan.interpret)
        ds_smem = _ds_smem(w, done)
        zeros = jnp.zeros((64, plan.config.width), plan.problem.dtype)
        ds_smem[pl.ds(wg * 64, 64)] = plgpu.layout_cast(zeros, TILE)
        fence_async_proxy(plan.interpret)
        w.barriers["wgs_meet"].wait()
        _stage_dq(w, plan.dq, wg, done, ds_smem, (), None, slots)
    else:
        w.release_pv(slots)
    w.release_qk(slots)


def _ds_smem(w, done):
    """Where step `done` puts dS, once no warpgroup reads it any more."""
    c = w.plan.config
    if c.ds_stages == 1 and c.compute_wgs > 1:
        w.barriers["wgs_meet"].wait()
    return w.scratch["ds_smem"].at[lax.rem(done, jnp.int32(c.ds_stages))]


def _stage_dq(w: Warpgroup, dq: DqSums, wg: Any, done: Any, ds_smem: Any, qk_accs: Any, ds: Any, slots: Slots) -> None:
    """Computes dQ = dS K and stages it for a store warp; issues the matmul of dK after it, which stays under way."""
    plan, wgmma, wgs = w.plan, w.wgmma, w.plan.config.compute_wgs
    if dq.by_rows:
        ds_smem = ds_smem.at[:, pl.ds(wg * 64, 64)] if wgs > 1 else ds_smem
        keys = [w.stationary_qk.at[i] for i in range(plan.tiles.stationary_qk.chunks)]
    elif plan.tiles.stationary_qk.chunks > 1:
        keys = [w.stationary_qk.at[wg]]
    else:
        keys = [w.stationary_qk.at[0, :, pl.ds(wg * dq.columns, dq.columns)]]

    def matmuls(*dq_accs):
        for acc, k in zip(dq_accs, keys, strict=True):
            wgmma.matmul(acc, ds_smem, k, transpose_a=True)
        wgmma.wait(len(keys))  # dV is done
        w.release_pv(slots)
        if qk_accs:
            wgmma.weighted_sums(qk_accs, ds, w.streamed_qk.at[slots.qk])
        return tuple(wgmma.result(acc, in_flight=len(qk_accs)) for acc in dq_accs)

    parts = wgmma.scoped(matmuls, *((64, k.shape[1]) for k in keys))
    w.barriers["dq_free"].wait(wg)
    for i, x in enumerate(parts):
        w.scratch["dq_smem"][wg, :, i * x.shape[1] : (i + 1) * x.shape[1]] = x
    fence_async_proxy(plan.interpret)
    w.barriers["dq_ready"].arrive(lax.rem(done, jnp.int32(dq.store_warps)) * wgs + wg)
