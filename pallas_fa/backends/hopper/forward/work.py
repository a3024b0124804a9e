"""The forward kernel's work: which CTA processes which queries, in which steps over key blocks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu import schedule
from pallas_fa.backends.gpu.grid import AXIS, quotient_and_remainder
from pallas_fa.backends.gpu.steps import Steps
from pallas_fa.backends.hopper.forward import by_tickets, windows
from pallas_fa.backends.hopper.forward.plan import ForwardPlan


class QueryBlock(NamedTuple):
    """A query block of one head: batch entry, query head, its number, its first query (negative in front padding).

    `s0`: the key that its key blocks are counted from.
    `column_part`: which part of the output's columns.
    `parts`: the first of the parts of its keys, and the end.
    `done`, `arrays_done`: how many steps, and steps that used streamed arrays, this CTA did for blocks before.
    """

    b: Any
    n: Any
    parts: tuple[Any, Any]
    column_part: Any
    number: Any
    t0: Any
    s0: Any
    done: Any
    arrays_done: Any


def for_blocks(
    plan: ForwardPlan,
    gmem: Any,
    scratch: dict[str, Any],
    role: Callable[[QueryBlock], tuple[Any, Any]],
    caller: by_tickets.Caller,
) -> tuple[Any, Any]:
    """Calls role(block) -> (its steps, those that used arrays) for each block of this CTA, and returns the sums."""
    if plan.by_tickets:
        of_place = lambda number, *done: _of_place(plan, number, role, done)
        return by_tickets.for_places(plan, gmem, scratch, of_place, caller)
    if not plan.config.persistent_ctas:
        return _of_place(plan, lax.axis_index(AXIS), role, (0, 0))
    first, ctas = lax.axis_index(AXIS), plan.ctas
    count = lax.div(plan.places - 1 - first, jnp.int32(ctas)) + 1
    one = lambda i, done: _of_place(plan, first + i * ctas, role, done)
    return lax.fori_loop(0, count, one, (jnp.int32(0), jnp.int32(0)))


def _of_place(plan, number, role, done):
    at, column_part, parts = (_place_of_parts if plan.split_heads else _place)(plan, number)

    def one(number, *done):
        t0 = plan.blocks.start(number)
        return role(QueryBlock(at.b, at.head, parts, column_part, number, t0, _first_key(plan, t0), *done))

    return plan.blocks.for_each(at.cta, one, done)


def _place(plan, number):
    """Returns (the place, whose `cta` is one that shares the query blocks; `column_part` and `parts` of `QueryBlock`)."""
    at = plan.grid.place(number)
    cta, column_part = _split(at.cta, plan.column_parts)
    cta, part = _split(cta, plan.config.kv_splits)
    return at._replace(cta=cta), column_part, (part, part + 1)


def _place_of_parts(plan, number):
    """As `_place`, where the last heads have their keys in parts."""
    parts, whole = plan.config.kv_splits, plan.grid.ctas
    at = plan.grid_of_parts.place(jnp.maximum(number - whole, 0) if whole else number)
    cta, column_part = _split(at.cta, plan.column_parts)
    cta, part = quotient_and_remainder(cta, parts)
    head, end = at.head + plan.whole_heads, part + 1
    if whole:
        of_whole = plan.grid.place(jnp.minimum(number, whole - 1))
        cta_of_whole, column_of_whole = _split(of_whole.cta, plan.column_parts)
        pairs = (cta, cta_of_whole), (column_part, column_of_whole), (head, of_whole.head), (part, 0), (end, parts)
        cta, column_part, head, part, end = (jnp.where(number >= whole, *pair) for pair in pairs)
    b, n = quotient_and_remainder(head, plan.problem.dims.N)
    return at._replace(b=b, head=n, cta=cta), column_part, (part, end)


def _first_key(plan, t0):
    if plan.group == 1:
        return 0
    first, _ = plan.problem.mask.kv_range(*_queries(plan, t0, plan.config.block_q))
    unit = windows.KEY_MULTIPLE
    return lax.div(jnp.clip(first, 0, plan.problem.dims.S - 1), jnp.int32(unit)) * unit


def _split(x, count):
    return quotient_and_remainder(x, count) if count > 1 else (x, 0)


def result_entry(plan: ForwardPlan, block: QueryBlock) -> Any:
    """Returns where the results of a block lie along the first dim of out and lse."""
    return block.b * plan.config.kv_splits + block.parts[0] if plan.all_in_parts else block.b


def steps_of(plan: ForwardPlan, block: QueryBlock, gmem: Any) -> Steps:
    """Returns all steps of a block over its part of the keys."""
    if plan.visit_lists:
        return Steps.of_list(plan.list_of(gmem.visit_table, block.b, block.n, block.number))
    if plan.visit_table:
        visits = schedule.in_table(gmem.visit_table, block.b, block.n, block.number)
    elif plan.scalar_visits:
        dims, arrays = plan.problem.dims, plan.arrays
        _, mask = arrays.with_scalars(arrays.scalars(gmem.arrays, block.b, block.n))
        visits = schedule.visits_of_queries(mask, (0, dims.T), dims.S, plan.config.block_kv)
    else:
        visits = _visits(plan, block.t0, plan.config.block_q, block.s0)
    if plan.config.kv_splits > 1:
        visits = schedule.part_of(visits, block.parts, plan.config.kv_splits, plan.kv_blocks)
    if plan.hides_count_of_steps and isinstance(visits.last, int):
        last = jnp.where(block.number >= 0, visits.last, 0)  # it always is
        full_last = last if schedule.is_equal(visits.full_last, visits.last) else visits.full_last
        visits = visits._replace(full_last=full_last, last=last)
    return Steps.of(visits)


def steps_of_warpgroup(plan: ForwardPlan, block: QueryBlock, steps: Steps, wg: Any) -> Steps:
    """Returns those `steps` of a block that warpgroup `wg` computes for its 64 queries; none where these are outside."""
    if not plan.skips_steps:
        return steps
    t0 = block.t0 + wg * 64
    part = steps.of_part(_visits(plan, t0, 64))
    if plan.config.kv_splits > 1:
        # A part of the keys that is past their end is masked. Others may end before the boundary blocks do.
        boundary_end = steps.boundary_end if part.starts_full else part.boundary_end
        if not schedule.is_equal(boundary_end, 0):
            part = part._replace(boundary_end=jnp.minimum(boundary_end, part.end))
    is_there = t0 >= 0 if plan.blocks.front_padding else t0 < plan.problem.dims.T
    first, end = (jnp.where(is_there, i, steps.end) for i in (part.first, part.end))
    return part._replace(first=first, end=end)


def array_steps(plan: ForwardPlan, steps: Steps, i: Any) -> Any:
    """Returns how many of a block's steps before step i used the streamed arrays."""
    return i if plan.score_streams or not plan.arrays.streamed else steps.boundary_steps_before(i)


def _visits(plan, t0, count, s0=0):
    """The key blocks, from key s0 on, that `count` queries from t0 on visit, under a mask without arrays."""
    if plan.single_step:
        return schedule.Visits(0, 0, 0, 1)
    queries, S, block_kv = _queries(plan, t0, count), plan.problem.dims.S, plan.config.block_kv
    return schedule.visits_of_queries(plan.problem.mask, queries, S, block_kv, s0)


def _queries(plan, t0, count):
    return plan.blocks.present(t0), jnp.minimum(t0 + count, plan.problem.dims.T)
