"""Shared memory and barriers of a pass of the backward kernel."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.named_barriers import (
    WARP,
    WARPGROUP,
    NamedBarrier,
    Parties,
    interpreter_scratch,
    numbered,
)
from pallas_fa.backends.gpu.shared_memory import swizzle
from pallas_fa.backends.hopper import ping_pong
from pallas_fa.backends.hopper.backward.plan import SUM_COLUMNS, BackwardPlan
from pallas_fa.backends.hopper.backward.work import BLOCK_SLOTS
from pallas_fa.backends.hopper.tiles import over_another

_F32 = jnp.dtype(jnp.float32)


def scratch(plan: BackwardPlan) -> dict[str, Any]:
    """Returns shared memory and barriers by name, in the order in which they lie in memory.

    `x_ready`: what is loaded to `x_smem` has arrived, with the statistics and arrays that come with it.
    """
    return on_gpu(plan) | (_stand_ins(plan) if plan.interpret else {})


def on_gpu(plan: BackwardPlan) -> dict[str, Any]:
    """Returns the part of `scratch` that a GPU needs too."""
    # What threads share of dropout is at the start of memory: fewer registers hold its addresses.
    handed = _dq(plan) | _weights(plan)
    return _dropout(plan) | _arrays(plan) | _delta(plan) | handed | _score_gradients(plan) | _operands(plan)


def barriers(plan: BackwardPlan, scratch: dict[str, Any]) -> dict[str, NamedBarrier]:
    """Returns the barriers between warpgroups, by name.

    `wgs_meet`: all compute warpgroups. `streamed_x_free`: nothing reads a slot of that ring any more;
    `stationary_free`: nor a slot of stationary operands, of several blocks. `dq_ready`,
    `dq_free`: a warpgroup's part of a tile of dQ is staged, or may be staged again. `sums_ready`, `sums_free`: the same of
    the gradients that a warp of their own adds up, of all warpgroups. `weights_ready`, `weights_free`: the tile that the
    warpgroup for dV hands to that for dK (see `by_gradient`); `logits_done`: it has the logits of the next step, or there is
    none. `ping_pong`: those of `ping_pong.parties`.
    """
    return numbered(_parties(plan), scratch)


def _parties(plan):
    wgs = plan.config.compute_wgs
    ring = functools.partial(Parties, arrivals=wgs, arriving=WARPGROUP, waiting=WARP)
    parties = dict(
        wgs_meet=Parties(1, arrivals=wgs, arriving=WARPGROUP, waiting=0, meeting=True),
        streamed_qk_free=ring(plan.slots[0]),
        streamed_pv_free=ring(plan.slots[1]),
    )
    if plan.several_blocks:
        # Store warps read the numbers of blocks, too.
        others = plan.dq.store_warps if plan.dq and plan.order.by_tickets else 0
        parties["stationary_free"] = ring(BLOCK_SLOTS, others=others)
    if plan.dq:
        parties["dq_ready"] = Parties(plan.dq.store_warps * wgs, arrivals=1, arriving=WARPGROUP, waiting=WARP)
        parties["dq_free"] = Parties(wgs, arrivals=1, arriving=WARP, waiting=WARPGROUP)
    if plan.by_gradient:
        one = Parties(1, arrivals=1, arriving=WARPGROUP, waiting=WARPGROUP)
        parties |= dict(weights_ready=one, weights_free=one)
        if plan.dk_waits_for_logits:
            parties["logits_done"] = one
    if plan.ping_pong:
        parties |= ping_pong.parties(wgs)
    if plan.order.ordered_sums:
        parties["sums_ready"] = Parties(1, arrivals=wgs, arriving=WARPGROUP, waiting=WARP)
        parties["sums_free"] = Parties(1, arrivals=1, arriving=WARP, waiting=wgs * WARPGROUP)
    return parties


def _arrays(plan):
    c, tiles = plan.config, len(plan.array_tiles)
    lead = lambda array: (plan.array_slots, c.row_groups) if array.kind == "tile" else (c.stages[0],)
    rows = lambda array: 64 if array.kind == "tile" else c.block
    readers = 1 if plan.by_gradient else c.compute_wgs
    barrier = {"array_tiles_ready": c.row_groups * tiles, "array_tiles_free": readers} if tiles else {}
    slots = dict(num_barriers=plan.array_slots)
    return {name: plgpu.Barrier(num_arrivals=arrivals, **slots) for name, arrivals in barrier.items()} | {
        f"array{i}_smem": array.scratch(*lead(array), rows=rows(array), columns=c.width)
        for i, array in enumerate(plan.arrays)
        if i in plan.arrays.in_smem
    }


def _delta(plan):
    if not plan.kind.accumulates_qk:
        return {}
    return {"delta_smem": _statistic(plan, plan.config.stages[1])}


def _dropout(plan):
    c = plan.config
    return (
        dict(kept_smem=plgpu.SMEM((2, c.compute_wgs, c.rows * c.width // 32), jnp.int32)) if plan.shares_draws else {}
    )


def _statistic(plan, stages):
    """Of a stage of queries: the streamed ones, or the CTA's own."""
    c = plan.config
    return plgpu.SMEM((stages, c.width) if plan.kind.keys_stationary else (1, c.block), _F32)


def _dq(plan):
    if not plan.dq:
        return {}
    c, tiles = plan.config, plan.tiles.stationary_qk
    staged = _swizzled((c.compute_wgs, 64, plan.dq.columns), _F32, math.gcd(plan.dq.columns * 4, 128))
    return dict(
        dq_smem=plan.dq.tile.scratch(c.compute_wgs, rows=64) if plan.dq.is_final else staged,
        # The factors of dQ have the same swizzle.
        ds_smem=_swizzled((c.ds_stages * tiles.parts, c.block, c.width), tiles.dtype, tiles.swizzled),
    )


def _weights(plan):
    return dict(weights_smem=_swizzled((64, plan.config.width), _F32, 128)) if plan.by_gradient else {}


def _swizzled(shape, dtype, width):
    return plgpu.SMEM(shape, dtype, transforms=swizzle(dtype, width))


def _score_gradients(plan):
    wgs, width = plan.config.row_groups, plan.config.width
    assert width % SUM_COLUMNS == 0
    memory = {i: plgpu.SMEM((wgs, 64), _F32) for i in plan.score_gradients.summed}
    for i in plan.score_gradients.added:
        stored = plan.order.is_stored(i)
        shape = (wgs, width, 64) if stored else (wgs, 64, SUM_COLUMNS)
        piece = plan.arrays[i].piece(64) if stored else 128
        memory[i] = _swizzled(shape, plan.added_dtype(i), piece)
    return {f"gradient{i}_smem": memory[i] for i in sorted(memory)}


def _operands(plan):
    c, kind, tiles = plan.config, plan.kind, plan.tiles
    # A ring's barrier also counts the copies of statistics and arrays that come with each tile.
    statistic = int(kind.keys_stationary)
    arrays = len(plan.arrays.in_smem) - len(plan.array_tiles)
    if plan.chunked:
        streamed = _chunks(plan, (1 + kind.accumulates_qk) * statistic + arrays)
        return streamed | _held(plan) | {"neg_lse_smem": _statistic(plan, c.stages[0])}
    streamed = dict(
        streamed_qk_ready=plgpu.Barrier(
            num_arrivals=tiles.streamed_qk.copies + statistic + arrays, num_barriers=c.stages[0]
        ),
        streamed_qk_smem=tiles.streamed_qk.scratch(c.stages[0], rows=c.width),
        streamed_pv_ready=plgpu.Barrier(
            num_arrivals=tiles.streamed_pv.copies + (statistic if kind.accumulates_qk else 0), num_barriers=c.stages[1]
        ),
        streamed_pv_smem=tiles.streamed_pv.scratch(c.stages[1], rows=c.width),
    )
    return streamed | _held(plan) | {"neg_lse_smem": _statistic(plan, c.stages[0])}


def _chunks(plan, beside):
    """Of streamed operands of which one passes through a ring of chunks, with so many copies of what comes beside them."""
    c, scratch = plan.config, {}
    for name, slots in zip(("qk", "pv"), plan.slots, strict=True):
        tiles = getattr(plan.tiles, f"streamed_{name}")
        barriers = slots if name == plan.in_ring else slots * tiles.chunks
        scratch[f"streamed_{name}_ready"] = plgpu.Barrier(num_arrivals=1, num_barriers=barriers)
        one = dataclasses.replace(tiles, dim=64, multiple=64) if name == plan.in_ring else tiles
        scratch[f"streamed_{name}_smem"] = one.scratch(slots, rows=c.width)
    if beside:
        scratch["beside_ready"] = plgpu.Barrier(num_arrivals=beside, num_barriers=c.stages[0])
    return scratch


def _held(plan):
    """Of the stationary operands."""
    kind, tiles, slots = plan.kind, plan.tiles, BLOCK_SLOTS if plan.several_blocks else 1
    statistic = int(kind.keys_stationary)
    scratch = dict(
        stationary_qk_ready=plgpu.Barrier(num_arrivals=tiles.stationary_qk.copies + 1 - statistic, num_barriers=slots),
        stationary_qk_smem=_stationary(plan, "stationary_qk"),
    )
    if kind.accumulates_qk:
        scratch["stationary_pv_ready"] = plgpu.Barrier(
            num_arrivals=tiles.stationary_pv.copies + 1 - statistic, num_barriers=slots
        )
    if kind.accumulates_qk or (tiles.stationary_pv != tiles.stationary_qk and not plan.chunked):
        # Where it is not read, dV only passes through it on its way out.
        scratch["stationary_pv_smem"] = _stationary(plan, "stationary_pv")
    return scratch


def _stationary(plan, name):
    tiles, rows = getattr(plan.tiles, name), plan.config.block
    slots = (BLOCK_SLOTS,) if plan.several_blocks else ()
    if plan.splits and not plan.interpret:
        return tiles.scratch_with(plan.gradient_tiles(name), *slots, rows=rows)
    if plan.chunked and not plan.kind.accumulates_qk:  # dV passes through it, in chunks alike
        tiles = max(tiles, plan.tiles.stationary_pv, key=lambda tiles: tiles.chunks)
    return tiles.scratch(*slots, rows=rows)


def by_name(plan: BackwardPlan, scratch: dict[str, Any]) -> dict[str, Any]:
    """Returns the refs of `scratch` with those that share memory told apart: `d_x_smem` has the gradient of operand x."""
    for name in ("stationary_qk", "stationary_pv") if plan.splits and not plan.interpret else ():
        if f"{name}_smem" in scratch:
            tiles = getattr(plan.tiles, name), f"d_{name}", plan.gradient_tiles(name)
            scratch = over_another(scratch, name, *tiles, rows=plan.config.block)
    return scratch


def _stand_ins(plan):
    """What stands for register accumulators, named barriers and shared memory with two uses in the interpreter."""
    tiles = dict(qk=plan.tiles.stationary_qk, pv=plan.tiles.stationary_pv)
    accumulators = {
        f"d_{name}_stand_in": plgpu.SMEM((plan.config.compute_wgs, x.chunks, 64, x.chunk), _F32)
        for name, x in tiles.items()
    }
    slots = (BLOCK_SLOTS,) if plan.several_blocks else ()
    gradients = {
        f"d_{name}_smem": plan.gradient_tiles(name).scratch(*slots, rows=plan.config.block)
        for name in ("stationary_qk", "stationary_pv")
        if plan.splits
    }
    return accumulators | gradients | interpreter_scratch(_parties(plan))
