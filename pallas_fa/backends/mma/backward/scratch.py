"""Shared memory of a pass of the backward kernels."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.mma import cta
from pallas_fa.backends.mma.backward.plan import BackwardPlan


def scratch(plan: BackwardPlan) -> dict[str, Any]:
    """Returns shared memory by name, in the order in which it lies, and what the interpreter needs beside it."""
    return on_gpu(plan) | (cta.stand_ins(plan.config.wgs) if plan.interpret else {})


def on_gpu(plan: BackwardPlan) -> dict[str, Any]:
    """Returns the part of `scratch` that a GPU needs too."""
    c, tiles, kind = plan.config, plan.tiles, plan.kind
    memory = {
        "stationary_qk_smem": tiles.stationary_qk.scratch(c.wgs, rows=c.rows),
        "streamed_qk_smem": tiles.streamed_qk.scratch(c.stages, rows=c.width),
        "streamed_pv_smem": tiles.streamed_pv.scratch(c.stages, rows=c.width),
    }
    if kind.accumulates_qk or tiles.stationary_pv != tiles.stationary_qk:
        # Where it is not read, dV only passes through it on its way out.
        memory["stationary_pv_smem"] = tiles.stationary_pv.scratch(c.wgs, rows=c.rows)
    statistic = (c.stages, c.width) if kind.keys_stationary else (c.wgs, c.rows)
    for name in ("neg_lse", "delta") if kind.accumulates_qk else ("neg_lse",):
        memory[f"{name}_smem"] = plgpu.SMEM(statistic, jnp.dtype(jnp.float32))
    for i in plan.arrays.in_smem:
        array = plan.arrays[i]
        lead = dict(row=(c.stages,), column=(c.wgs,), tile=(c.stages, c.wgs))[array.kind]
        memory[f"array{i}_smem"] = array.scratch(*lead, rows=c.rows, columns=c.width)
    return memory
