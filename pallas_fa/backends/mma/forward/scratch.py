"""Shared memory of the forward kernel."""

from typing import Any

from pallas_fa.backends.mma import cta
from pallas_fa.backends.mma.forward.plan import ForwardPlan


def scratch(plan: ForwardPlan) -> dict[str, Any]:
    """Returns shared memory by name, in the order in which it lies, and what the interpreter needs beside it."""
    return on_gpu(plan) | (cta.stand_ins(plan.config.wgs) if plan.interpret else {})


def on_gpu(plan: ForwardPlan) -> dict[str, Any]:
    """Returns the part of `scratch` that a GPU needs too."""
    c, tiles = plan.config, plan.tiles
    memory = {
        "q_smem": tiles.q.scratch(c.wgs, rows=c.rows),
        "k_smem": tiles.k.scratch(c.stages, rows=c.block_kv),
        "v_smem": tiles.v.scratch(c.stages, rows=c.block_kv),
    }
    if tiles.out != tiles.q:
        memory["out_smem"] = tiles.out.scratch(c.wgs, rows=c.rows)
    for i in plan.arrays.in_smem:
        array, stages = plan.arrays[i], plan.array_stages
        lead = dict(row=(stages,), column=(c.wgs,), tile=(stages, c.wgs))[array.kind]
        memory[f"array{i}_smem"] = array.scratch(*lead, rows=c.rows, columns=c.block_kv)
    return memory
