"""Shared memory of the kernel for few queries."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.mma import cta
from pallas_fa.backends.mma.decode.key_parts import ROWS
from pallas_fa.backends.mma.decode.plan import DecodePlan


def scratch(plan: DecodePlan) -> dict[str, Any]:
    """Returns shared memory by name, in the order in which it lies, and what the interpreter needs beside it."""
    return on_gpu(plan) | (cta.stand_ins(1) if plan.interpret else {})


def on_gpu(plan: DecodePlan) -> dict[str, Any]:
    """Returns the part of `scratch` that a GPU needs too.

    `statistics_smem`: maxima and row sums of all parts, each twice. `out_smem`: the sums of all parts, which take the place
    of keys that nothing reads any more, except in the interpreter, which has no unions.
    """
    c, tiles = plan.config, plan.tiles
    lead = c.stages, ROWS // c.rows
    memory: dict[str, Any] = {
        "q_smem": tiles.q.scratch(rows=ROWS),
        "k_smem": tiles.k.scratch(*lead, rows=plan.keys_of_part),
        "v_smem": tiles.v.scratch(*lead, rows=plan.keys_of_part),
        "statistics_smem": plgpu.SMEM((2, 2 * ROWS), jnp.float32),
    }
    out = plgpu.SMEM((ROWS, tiles.v.padded_dim), jnp.float32)
    if plan.interpret:
        memory["out_smem"] = out
    else:
        memory["k_smem"] = plgpu.RefUnion(memory["k_smem"], out)
    for i in plan.arrays.in_smem:
        array = plan.arrays[i]
        at = () if array.kind == "column" else (c.stages,)
        columns = c.block_kv if array.kind == "row" else plan.keys_of_part
        memory[f"array{i}_smem"] = array.scratch(*at, rows=ROWS, columns=columns)
    return memory
