"""The forward kernel's work: which block of threads does which queries, in which steps over tiles of keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu import schedule
from pallas_fa.backends.hopper.forward.plan import ForwardPlan


class Block(NamedTuple):
    """A block of queries of one head: batch entry, query head, its number, and its first query: negative where some lack.

    `done`, `arrays_done`: steps, and steps that used streamed arrays, of the block that the same threads did before.
    """

    b: Any
    n: Any
    number: Any
    t0: Any
    done: Any
    arrays_done: Any


class Steps(NamedTuple):
    """Steps over tiles of keys, from right to left: step i visits tile `last - i`, for first <= i < end.

    The mask cuts steps before `cut_end` and from `full_end` on, and none between. What is known while tracing: 0 for
    `cut_end` says that it cuts none at the start, None for `full_end` that it cuts none at the end.
    """

    last: Any
    first: Any
    cut_end: Any
    full_end: Any
    end: Any


def for_blocks(plan: ForwardPlan, role: Callable[[Block], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Calls role(block) -> (its steps, those that used arrays) for each block of these threads; returns the sums.

    A pair is one block from the end and one from the start: under a causal mask, all pairs are then the same work.
    """
    b, n, share, _ = schedule.place(plan.section, plan.shares, plan.problem.dims.N)
    last = plan.blocks - 1

    def one(number, done, arrays_done):
        return role(Block(b, n, number, number * plan.config.block_q - plan.absent_rows, done, arrays_done))

    if not plan.pairs:
        # Under most masks later queries see more keys: longest first.
        return one(share if plan.problem.mask is None else last - share, 0, 0)

    def following(i, sums):
        pair, is_second = schedule.quotient_and_rest(i, 2)
        pair = share + pair * plan.shares
        counts = one(jnp.where(is_second == 0, last - pair, pair), *sums)
        return tuple(a + b for a, b in zip(sums, counts, strict=True))

    pairs = -(-plan.blocks // 2)  # of one head
    count = 2 * lax.div(pairs - share + plan.shares - 1, jnp.int32(plan.shares))
    if plan.blocks % 2:  # the block in the middle is a pair of its own, the last
        count -= jnp.where(share == (pairs - 1) % plan.shares, 1, 0)
    return lax.fori_loop(0, count, following, (jnp.int32(0), jnp.int32(0)))


def steps_of(plan: ForwardPlan, block: Block, visit_table: Any) -> Steps:
    """All steps of a block."""
    if not plan.visit_table:
        return _steps(_visits(plan, block.t0, plan.config.block_q))
    return _steps(schedule.in_table(visit_table, block.b, block.n, block.number))


def steps_of_warpgroup(plan: ForwardPlan, block: Block, steps: Steps, wg: Any) -> Steps:
    """Those `steps` of a block that warpgroup `wg` computes for its 64 queries; none where they are outside."""
    if not plan.skips_steps:
        return steps
    t0 = block.t0 + wg * 64
    own = _steps(_visits(plan, t0, 64))
    shift = steps.last - own.last  # its own step i is step shift + i of the block
    first = jnp.clip(shift, 0, steps.end - 1)
    end = jnp.clip(shift + own.end, first + 1, steps.end)
    cut_end = 0 if schedule.is_equal(own.cut_end, 0) else jnp.maximum(shift + own.cut_end, first + 1)
    full_end = None if own.full_end is None else shift + own.full_end
    is_there = t0 >= 0 if plan.absent_rows else t0 < plan.problem.dims.T
    return Steps(
        steps.last, jnp.where(is_there, first, steps.end), cut_end, full_end, jnp.where(is_there, end, steps.end)
    )


def array_steps(plan: ForwardPlan, steps: Steps, i: Any) -> Any:
    """How many of a block's steps before step i used the streamed arrays."""
    if plan.arrays_always or not plan.streamed:
        return i
    full_end = steps.end if steps.full_end is None else steps.full_end
    return i - jnp.clip(i - steps.cut_end, 0, full_end - steps.cut_end)


def present(plan: ForwardPlan, row: Any) -> Any:
    """`row`, or the first of the head in the place of an absent one."""
    return jnp.maximum(row, 0) if plan.absent_rows else row


def _visits(plan, t0, count):
    """Tiles of keys that `count` queries from t0 on visit, under a mask without arrays."""
    dims, mask = plan.problem.dims, plan.problem.mask
    if mask is None:
        everything = (0, dims.S)
        return schedule.visits(everything, everything, dims.S, plan.config.block_kv)
    queries = present(plan, t0), jnp.minimum(t0 + count, dims.T)
    return schedule.visits(mask.kv_range(*queries), mask.full_kv_range(*queries), dims.S, plan.config.block_kv)


def _steps(found) -> Steps:
    # Where anything may be cut at the start, the first step is: it is compiled once, with the mask.
    cut_end = 0
    if not schedule.is_equal(found.full_last, found.last):
        cut_end = jnp.maximum(found.last - found.full_last, 1)
    full_end = None
    if not schedule.is_equal(found.full_first, found.first):
        full_end = jnp.maximum(found.last - found.full_first, cut_end)
    return Steps(found.last - 1, 0, cut_end, full_end, found.last - found.first)
