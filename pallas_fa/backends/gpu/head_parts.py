"""Query heads of a key head in parts, each with CTAs of its own (`head_parts` of a backward configuration).

CTAs store what the query heads of their part give of the gradients of keys and values, in float32, and XLA adds up the
parts, always in the same order (evidence: backward/head-parts).
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.backends.gpu.backward_plan import BackwardCore
from pallas_fa.backends.gpu.grid import divisors
from pallas_fa.problem import Problem

MOST_CTAS = 4096  # past it, whatever their order, CTAs keep the GPU busy
_MERGE = 4.0  # us of the kernel that adds parts up, beside what it moves
_NEARLY = 1.005  # times as long as the fastest
_OPERAND = dict(dk="stationary_qk", dv="stationary_pv")


def why_not(problem: Problem) -> str | None:
    """Returns None if the query heads of a key head can be in as many parts as the call names, if any; else the reason."""
    named = problem.config and problem.config.backward
    if not named or problem.group % named.head_parts == 0:
        return None
    return f"head_parts={named.head_parts} of config= does not divide the {problem.group} query heads of a key head"


def remark(plans: Iterable[BackwardCore]) -> str | None:
    """Returns in how many parts query heads are in the passes of these plans, in words; None where they are in one."""
    parts = {plan.head_parts for plan in plans if plan.kind.keys_stationary}
    if parts == {1}:
        return None
    count = f"{max(parts)}" if len(parts) == 1 else f"up to {max(parts)}"
    return f"the query heads of a key head are in {count} parts in the backward, each with CTAs of its own"


def to_try(plan: BackwardCore, ctas: int) -> list[int]:
    """Returns the numbers of parts to try: 1, as in `plan`, whose CTAs are `ctas`, and those that may be faster.

    Past `MOST_CTAS` CTAs keep the GPU busy. Where key heads alone do not fill it, any number may be needed.
    """
    few = ctas <= plan.gpu.multiprocessors
    return [parts for parts in divisors(plan.group) if parts == 1 or few or parts * ctas <= MOST_CTAS]


def cost(plan: BackwardCore, bytes_per_us: float) -> float:
    """Returns how many us parts cost: whole blocks and tiles are written, keys among them read, and their sums written."""
    if not plan.has_head_parts:
        return 0.0
    stored, problem = types(plan), plan.problem
    written = sum(math.prod(x.shape) * x.dtype.itemsize for x in stored)
    columns = sum(getattr(plan.tiles, _OPERAND[name]).dim for name in plan.kind.stored)
    read = problem.dims.B * problem.dims.S * columns * (4 * plan.heads + problem.dtype.itemsize * problem.K)
    return _MERGE + (written + read) / bytes_per_us


def fewest[Plan: BackwardCore](timed: Sequence[tuple[float, Plan]]) -> tuple[float, Plan]:
    """Returns (time, plan) of the fastest of these with the fewest parts of which one is nearly as fast as any."""
    limit = min(time for time, _ in timed) * _NEARLY
    return min((x for x in timed if x[0] <= limit), key=lambda x: (x[1].head_parts, x[0]))


def types(plan: BackwardCore) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the gradients that the kernel stores, [batch, parts of all key heads, keys, columns].

    Keys are those of whole blocks, columns those of whole tiles.
    """
    lead = plan.problem.dims.B, plan.heads, plan.visits.blocks * plan.config.block
    dims = (getattr(plan.tiles, _OPERAND[name]).padded_dim for name in plan.kind.stored)
    return tuple(jax.ShapeDtypeStruct((*lead, dim), jnp.float32) for dim in dims)


def merged(plan: BackwardCore, name: str, parts: Any) -> Any:
    """Returns the gradient `name` in the problem's layout and dtype, from what the kernel stored."""
    dims, columns = plan.problem.dims, getattr(plan.tiles, _OPERAND[name]).dim
    x = parts.reshape(dims.B, plan.problem.K, plan.head_parts, *parts.shape[2:]).sum(axis=2)
    x = x[:, :, : dims.S, :columns].astype(plan.problem.dtype)
    return jnp.swapaxes(x, 1, 2) if plan.problem.layout == "BTNH" else x


def with_parts_merged(plan: BackwardCore, results: Any) -> list[Any]:
    """Returns the results of a pass with each gradient that CTAs store in parts, the first ones, merged."""
    count = len(plan.kind.stored) if plan.has_head_parts else 0
    return [*(merged(plan, *x) for x in zip(plan.kind.stored, results[:count], strict=False)), *results[count:]]
