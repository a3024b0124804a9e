"""Query heads of a key head in parts, each with CTAs of its own (`head_parts` of a backward configuration).

CTAs store what the query heads of their part give of the gradients of keys and values, in float32, and XLA adds up the
parts, always in the same order (evidence: backward/head-parts).
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.backends.gpu.backward_plan import BackwardCore
from pallas_fa.problem import Problem

_OPERAND = dict(dk="stationary_qk", dv="stationary_pv")


def why_not(problem: Problem, parts: int) -> str | None:
    """Returns None if the query heads of a key head can be in so many parts, which a call names; else the reason."""
    if problem.group % parts == 0:
        return None
    return f"head_parts={parts} of config= does not divide the {problem.group} query heads of a key head"


def remark(plans: Iterable[BackwardCore]) -> str | None:
    """Returns in how many parts query heads are in the passes of these plans, in words; None where they are in one."""
    parts = max(plan.head_parts for plan in plans)
    if parts == 1:
        return None
    return f"the query heads of a key head are in {parts} parts in the backward, which fills the GPU"


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
