"""The forward kernel's work: which CTA processes which queries, in which steps over key blocks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_fa.backends.gpu import schedule, visit_lists
from pallas_fa.backends.gpu.steps import Steps
from pallas_fa.backends.hopper.forward.plan import ForwardPlan


class QueryBlock(NamedTuple):
    """A query block of one head: batch entry, query head, its number, its first query (negative in front padding).

    `done`, `arrays_done`: how many steps, and steps that used streamed arrays, this CTA did for blocks before.
    """

    b: Any
    n: Any
    number: Any
    t0: Any
    done: Any
    arrays_done: Any


def for_blocks(plan: ForwardPlan, role: Callable[[QueryBlock], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Calls role(block) -> (its steps, those that used arrays) for each block of this CTA, and returns the sums."""
    at = plan.grid.place()
    one = lambda number, *done: role(QueryBlock(at.b, at.head, number, plan.blocks.start(number), *done))
    return plan.blocks.for_each(at.cta, one)


def steps_of(plan: ForwardPlan, block: QueryBlock, visit_table: Any) -> Steps:
    """Returns all steps of a block."""
    if plan.visit_lists:
        return Steps.of_list(visit_lists.in_table(visit_table, block.b, block.n, block.number))
    if not plan.visit_table:
        return Steps.of(_visits(plan, block.t0, plan.config.block_q))
    return Steps.of(schedule.in_table(visit_table, block.b, block.n, block.number))


def steps_of_warpgroup(plan: ForwardPlan, block: QueryBlock, steps: Steps, wg: Any) -> Steps:
    """Returns those `steps` of a block that warpgroup `wg` computes for its 64 queries; none where these are outside."""
    if not plan.skips_steps:
        return steps
    t0 = block.t0 + wg * 64
    part = steps.of_part(_visits(plan, t0, 64))
    is_there = t0 >= 0 if plan.blocks.front_padding else t0 < plan.problem.dims.T
    first, end = (jnp.where(is_there, i, steps.end) for i in (part.first, part.end))
    return part._replace(first=first, end=end)


def array_steps(plan: ForwardPlan, steps: Steps, i: Any) -> Any:
    """Returns how many of a block's steps before step i used the streamed arrays."""
    return i if plan.score_streams or not plan.arrays.streamed else steps.boundary_steps_before(i)


def _visits(plan, t0, count):
    """The key blocks that `count` queries from t0 on visit, under a mask without arrays."""
    dims, mask = plan.problem.dims, plan.problem.mask
    if mask is None:
        everything = (0, dims.S)
        return schedule.visits(everything, everything, dims.S, plan.config.block_kv)
    queries = plan.blocks.present(t0), jnp.minimum(t0 + count, dims.T)
    return schedule.visits(mask.kv_range(*queries), mask.full_kv_range(*queries), dims.S, plan.config.block_kv)
