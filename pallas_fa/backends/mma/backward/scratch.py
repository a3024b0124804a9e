"""Shared memory of a pass of the backward kernels."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.shared_memory import swizzle
from pallas_fa.backends.mma import cta
from pallas_fa.backends.mma.backward.plan import BackwardPlan


def scratch(plan: BackwardPlan) -> dict[str, Any]:
    """Returns shared memory by name, in the order in which it lies, and what the interpreter needs beside it."""
    return on_gpu(plan) | (cta.stand_ins(plan.config.wgs) if plan.interpret else {})


def on_gpu(plan: BackwardPlan) -> dict[str, Any]:
    """Returns the part of `scratch` that a GPU needs too."""
    c, tiles, kind = plan.config, plan.tiles, plan.kind
    blocks = 1 if kind.fused else c.wgs
    memory = {
        "stationary_qk_smem": tiles.stationary_qk.scratch(blocks, rows=c.rows),
        "streamed_qk_smem": tiles.streamed_qk.scratch(c.stages, rows=c.tile),
        "streamed_pv_smem": tiles.streamed_pv.scratch(c.stages, rows=c.tile),
    }
    alike = tiles.stationary_pv.padded_dim == tiles.stationary_qk.padded_dim
    if not alike or (kind.accumulates_qk and not plan.values_in_registers):
        # Where no step reads it, V and dV only pass through it, on their way in and out.
        memory["stationary_pv_smem"] = tiles.stationary_pv.scratch(blocks, rows=c.rows)
    if kind.fused:
        memory |= {name: _shared(plan) for name in (("p_smem", "ds_smem") if c.wgs > 1 else ("ds_smem",))}
    statistic = (c.stages, c.tile) if kind.keys_stationary else (c.wgs, c.rows)
    for name in ("neg_lse", "delta") if kind.accumulates_qk else ("neg_lse",):
        memory[f"{name}_smem"] = plgpu.SMEM(statistic, jnp.dtype(jnp.float32))
    for i in plan.arrays.in_smem:
        array = plan.arrays[i]
        row = (c.stages, c.wgs) if kind.fused else (c.stages,)
        lead = dict(row=row, column=(c.wgs,), tile=(c.stages, c.wgs))[array.kind]
        memory[f"array{i}_smem"] = array.scratch(*lead, rows=c.rows, columns=c.width)
    return memory


def _shared(plan):
    """A tile of logits of each warpgroup, rounded to 16 bits."""
    c, dtype = plan.config, plan.problem.dtype
    transforms = () if plan.interpret else swizzle(dtype, c.width * dtype.itemsize)
    return plgpu.SMEM((c.wgs, c.rows, c.width), dtype, transforms=transforms)
