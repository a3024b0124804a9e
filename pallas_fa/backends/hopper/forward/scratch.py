"""Shared memory and barriers of the forward kernel."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.named_barriers import NamedBarrier, interpreter_scratch, numbered
from pallas_fa.backends.gpu.online_softmax import SUM_COLUMNS
from pallas_fa.backends.hopper import ping_pong
from pallas_fa.backends.hopper.forward import by_tickets
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.tiles import over_another


def scratch(plan: ForwardPlan) -> dict[str, Any]:
    """Returns shared memory and barriers by name, in the order in which they lie in memory.

    `x_ready`: what is loaded to `x_smem` has arrived. `x_free`: nothing reads `x_smem` any more. Where a CTA processes
    several query blocks, each warpgroup has these barriers of its queries for itself.
    """
    return on_gpu(plan) | (interpreter_scratch(_parties(plan)) if plan.interpret else {})


def on_gpu(plan: ForwardPlan) -> dict[str, Any]:
    """Returns the part of `scratch` that a GPU needs too."""
    c = plan.config
    ring = functools.partial(plgpu.Barrier, num_barriers=c.stages)
    scratch: dict[str, Any] = {}
    arrays, streamed, columns = plan.arrays, plan.arrays.streamed, plan.arrays.of_kind("column")
    for i in sorted(streamed + columns):
        lead = dict(row=(c.stages,), column=(c.compute_wgs,), tile=(c.stages, c.compute_wgs))[arrays[i].kind]
        # TMA starts to write at multiples of 128 bytes: 32 elements of a row.
        width = pl.cdiv(c.block_kv, 32) * 32 if arrays[i].kind == "row" else c.block_kv
        scratch[f"array{i}_smem"] = arrays[i].scratch(*lead, rows=64, columns=width)
    if streamed:
        copies = sum(c.compute_wgs if arrays[i].kind == "tile" else 1 for i in streamed)
        scratch["arrays_free"] = ring(num_arrivals=c.compute_wgs)
        scratch["arrays_ready"] = ring(num_arrivals=copies)
    pieces = c.stages * plan.k_pieces
    scratch["k_free"] = plgpu.Barrier(num_arrivals=c.compute_wgs, num_barriers=pieces)
    scratch["k_ready"] = plgpu.Barrier(num_arrivals=plan.k_arrivals, num_barriers=pieces)
    scratch["k_smem"] = plan.tiles.k.scratch(c.stages, rows=c.block_kv)
    # The two together: each has 1024 bytes at least.
    name, rows = ("lse_and_pin", 2) if plan.pins_maximum else ("lse", 1)
    scratch[f"{name}_smem"] = plgpu.SMEM((rows * c.compute_wgs, 64), jnp.float32)
    if plan.separate_out and not plan.out_over_q:
        scratch["out_smem"] = plan.tiles.out.scratch(c.compute_wgs, rows=64, chunks=plan.out_slots)
    if c.pin_softmax and not plan.pins_maximum:
        scratch["pin_smem"] = plgpu.SMEM((c.compute_wgs, 64, SUM_COLUMNS), jnp.float32)
    arrivals = plan.tiles.q.arrivals(64) + len(columns)
    if plan.several_blocks:
        scratch["q_free"] = plgpu.Barrier(num_arrivals=1, num_barriers=c.compute_wgs)
        scratch["q_ready"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=c.compute_wgs)
    else:
        scratch["q_ready"] = plgpu.Barrier(num_arrivals=arrivals * c.compute_wgs)
    if plan.out_over_q:
        scratch["q_smem"] = plan.tiles.q.scratch_with(plan.tiles.out, c.compute_wgs, rows=64)
    else:
        scratch["q_smem"] = plan.tiles.q.scratch(c.compute_wgs, rows=64)
    scratch |= by_tickets.scratch(plan) if plan.by_tickets else {}
    scratch["v_free"] = ring(num_arrivals=c.compute_wgs)
    if plan.zeroes_padding:
        scratch["v_loaded"] = ring(num_arrivals=plan.v_arrivals)
    scratch["v_ready"] = ring(num_arrivals=plan.v_arrivals)
    for part in plan.value_rows:
        scratch[f"{part.name}_smem"] = part.tiles.scratch(c.stages, rows=part.count)
    for name, tiles in plan.narrow_tiles.items():
        scratch[f"{name}_narrow_ready"] = ring(num_arrivals=tiles.copies * plan.boxes)
        scratch[f"{name}_narrow_smem"] = tiles.scratch(c.stages, rows=c.block_kv)
    return scratch


def by_name(plan: ForwardPlan, scratch: dict[str, Any]) -> dict[str, Any]:
    """Returns the refs of `scratch` with those that share memory told apart."""
    if plan.pins_maximum:
        both, wgs = scratch["lse_and_pin_smem"], plan.config.compute_wgs
        scratch = scratch | {"lse_smem": both.at[pl.ds(0, wgs)], "pin_smem": both.at[pl.ds(wgs, wgs)]}
    return over_another(scratch, "q", plan.tiles.q, "out", plan.tiles.out, rows=64) if plan.out_over_q else scratch


def barriers(plan: ForwardPlan, scratch: dict[str, Any]) -> dict[str, NamedBarrier]:
    """Returns the barriers between warpgroups, by name: those of ping-pong scheduling, if it is on."""
    return numbered(_parties(plan), scratch)


def _parties(plan):
    return ping_pong.parties(plan.config.compute_wgs) if plan.ping_pong else {}
