"""The forward kernel's work: which CTA processes which queries, in which steps over key blocks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu import schedule, visit_lists
from pallas_fa.backends.gpu.grid import quotient_and_remainder
from pallas_fa.backends.gpu.steps import Steps
from pallas_fa.backends.gpu.stream_k import Segment
from pallas_fa.backends.hopper.forward.plan import Q_STAGES, ForwardPlan


class QueryBlock(NamedTuple):
    """A query block of one head: batch entry, query head, its number, its first query (negative in front padding).

    `part`: which part of its keys; `column_part`: which part of the output's columns; `segment`: which of its visits, with
    stream-K.
    `done`, `arrays_done`: how many steps, and steps that used streamed arrays, this CTA did for blocks before.
    """

    b: Any
    n: Any
    part: Any
    column_part: Any
    number: Any
    t0: Any
    segment: Segment | None
    done: Any
    arrays_done: Any


def for_blocks(plan: ForwardPlan, gmem: Any, role: Callable[[QueryBlock], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Calls role(block) -> (its steps, those that used arrays) for each block of this CTA, and returns the sums."""
    if plan.stream_k:
        block_of = lambda unit: _block(plan, unit, None, 0, 0)
        visits_of = lambda unit: _all_steps(plan, block_of(unit), gmem.visit_table).end
        of_segment = lambda segment, *done: role(_block(plan, segment.unit, segment, *done))
        return plan.stream_k.for_segments(gmem.share_table, visits_of, of_segment)
    at, splits = plan.grid.place(), plan.config.kv_splits
    cta, column_part = _split(at.cta, plan.column_parts)
    cta, part = _split(cta, splits)
    one = lambda number, *done: role(
        QueryBlock(at.b, at.head, part, column_part, number, plan.blocks.start(number), None, *done)
    )
    return plan.blocks.for_each(cta, one)


def _split(x, count):
    return quotient_and_remainder(x, count) if count > 1 else (x, 0)


def _block(plan, unit, segment, *done):
    """The query block that is unit `unit` of stream-K."""
    rest, number = quotient_and_remainder(unit, plan.blocks.count)
    b, n = quotient_and_remainder(rest, plan.problem.dims.N)
    return QueryBlock(b, n, 0, 0, number, plan.blocks.start(number), segment, *done)


def result_place(plan: ForwardPlan, block: QueryBlock, wg: Any) -> tuple[Any, Any, Any]:
    """Returns where the results of a block lie in out and lse: batch entry, head, first row of warpgroup `wg`."""
    if block.segment is not None:
        return block.segment.entry, 0, wg * 64
    splits = plan.config.kv_splits
    return block.b * splits + block.part if splits > 1 else block.b, block.n, block.t0 + wg * 64


def of_queries(block: QueryBlock, ref: Any) -> Any:
    """Returns the part of shared memory, or of barriers, that the queries of a block use."""
    return ref if block.segment is None else ref.at[lax.rem(block.segment.order, jnp.int32(Q_STAGES))]


def steps_of(plan: ForwardPlan, block: QueryBlock, visit_table: Any) -> Steps:
    """Returns the steps of a block that this CTA does."""
    steps = _all_steps(plan, block, visit_table)
    return steps if block.segment is None else steps.segment(block.segment.first, block.segment.last)


def _all_steps(plan, block, visit_table):
    if plan.visit_lists:
        return Steps.of_list(visit_lists.in_table(visit_table, block.b, block.n, block.number))
    if plan.visit_table:
        visits = schedule.in_table(visit_table, block.b, block.n, block.number)
    else:
        visits = _visits(plan, block.t0, plan.config.block_q)
    if plan.config.kv_splits > 1:
        visits = schedule.part_of(visits, block.part, plan.config.kv_splits, plan.kv_blocks)
    return Steps.of(visits)


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
