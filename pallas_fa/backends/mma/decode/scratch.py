"""Shared memory of the kernel for few queries."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.mma import cta
from pallas_fa.backends.mma.decode.key_parts import ROWS
from pallas_fa.backends.mma.decode.plan import DecodePlan

AT_THE_END = {"k_smem": "out_smem", "v_smem": "statistics_smem"}  # what takes whose place


def by_name(plan: DecodePlan, scratch: dict[str, Any]) -> dict[str, Any]:
    """Returns a kernel's scratch by name, what lies in the same place apart."""
    if plan.interpret:
        return scratch
    unions = {name: scratch[name] for name in AT_THE_END}
    first = {name: union[0] for name, union in unions.items()}
    return scratch | first | {AT_THE_END[name]: union[1] for name, union in unions.items()}


def scratch(plan: DecodePlan) -> dict[str, Any]:
    """Returns shared memory by name, in the order in which it lies, and what the interpreter needs beside it."""
    return on_gpu(plan) | (cta.stand_ins(1) if plan.interpret else {})


def on_gpu(plan: DecodePlan) -> dict[str, Any]:
    """Returns the part of `scratch` that a GPU needs too.

    `statistics_smem`: maxima and row sums of all parts, each twice. `out_smem`: columns of the outputs of all parts. Both
    are needed when no step is left, and take the place of values and keys, except in the interpreter, which has no unions.
    """
    c, tiles = plan.config, plan.tiles
    lead = c.stages, ROWS // c.rows
    memory: dict[str, Any] = {
        "q_smem": tiles.q.scratch(rows=ROWS),
        "k_smem": tiles.k.scratch(*lead, rows=plan.keys_of_part),
        "v_smem": tiles.v.scratch(*lead, rows=plan.keys_of_part),
    }
    at_the_end = {
        "k_smem": plgpu.SMEM((ROWS, plan.out_columns), jnp.float32),
        "v_smem": plgpu.SMEM((2, 2 * ROWS), jnp.float32),
    }
    if plan.interpret:
        memory |= {AT_THE_END[name]: x for name, x in at_the_end.items()}
    else:
        memory |= {name: plgpu.RefUnion(memory[name], x) for name, x in at_the_end.items()}
    for i in plan.arrays.in_smem:
        array = plan.arrays[i]
        at = () if array.kind == "column" else (c.stages,)
        columns = c.block_kv if array.kind == "row" else plan.keys_of_part
        memory[f"array{i}_smem"] = array.scratch(*at, rows=ROWS, columns=columns)
    return memory
