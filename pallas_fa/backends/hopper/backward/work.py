"""The backward kernel's work: which block of threads holds what, and which tiles of the other sequence it visits."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu import schedule
from pallas_fa.backends.hopper.backward.plan import Plan
from pallas_fa.operands import ranges


class Block(NamedTuple):
    """A block of the own sequence: batch entry, own head, its number, its first position.

    `down`: whether it goes through the tiles from the last one down (see `for_steps`).
    """

    b: Any
    head: Any
    number: Any
    start: Any
    down: Any


def block_here(plan: Plan) -> Block:
    """The block of these threads."""
    b, head, number, section = schedule.place(plan.section, plan.blocks, plan.heads)
    if not plan.by_keys and plan.problem.mask is not None:
        number = plan.blocks - 1 - number  # under most masks later queries see more keys: longest first
    down = plan.by_tile and lax.rem(section, jnp.int32(2)) == 0
    return Block(b, head, number, number * plan.config.block, down)


def for_heads(plan: Plan, block: Block, body: Any) -> Any:
    """`body(n, steps before)` -> steps after, for each query head of the block; returns the number of all steps."""
    group = plan.problem.group if plan.by_keys else 1
    first = block.head * group
    if group == 1:
        return body(first, jnp.int32(0))
    return lax.fori_loop(0, group, lambda g, done: body(first + g, done), jnp.int32(0))


def for_steps(plan: Plan, block: Block, visit_table: Any, step: Any) -> Any:
    """step(tile, n, steps before) for each step of a block; returns the number of all steps.

    Head after head, each from its first tile up, or around from a tile of its own (`turned`).

    Or (`Plan.by_tile`) tile after tile, each for all heads, in every other section of heads from the last tile down.
    Blocks of one key head then stay close to each other, and find in the cache what others loaded, if sections fill the
    GPU once: those of one start together at the last tile and end one after the other at their diagonals, and there
    those of the next begin. Neighbours start with different heads, since blocks that add to one tile of dQ at a time wait
    for each other.
    """
    if plan.by_tile:
        first, last = visits_of_block(plan, block, visit_table, None)
        return for_tiles(plan, block, first, last, jnp.int32(0), step)

    def head(n, done):
        first, last = visits_of_block(plan, block, visit_table, n)
        lax.fori_loop(first, last, lambda tile, _: step(turned(plan, block, tile), n, done + (tile - first)), None)
        return done + (last - first)

    return for_heads(plan, block, head)


def turned(plan: Plan, block: Block, tile: Any) -> Any:
    """The tile that the block visits in place of `tile`, so that blocks start at different ones (see `Plan.stagger`)."""
    return lax.rem(tile + block.number * plan.stagger, jnp.int32(plan.other_tiles)) if plan.stagger else tile


def for_tiles(plan: Plan, block: Block, first: Any, last: Any, done: Any, step: Any) -> Any:
    """step(tile, n, steps before) for all heads of each of the tiles [first, last); returns the steps after `done` too."""
    group = plan.problem.group

    def of_tile(i, _):
        tile, before = jnp.where(block.down, last - 1 - i, first + i), done + i * group

        def of_head(g, _):
            step(tile, block.head * group + lax.rem(g + block.number, jnp.int32(group)), before + g)

        lax.fori_loop(0, group, of_head, None)

    lax.fori_loop(0, last - first, of_tile, None)
    return done + (last - first) * group


def visits_of_block(plan: Plan, block: Block, visit_table: Any, n: Any) -> tuple[Any, Any]:
    """Tiles [first, last) that the block visits at query head n: from the first to the last that any share does."""
    found, *rest = (_visits(plan, block, visit_table, n, share) for share in range(plan.shares))
    first, last = found.first, found.last
    for other in rest:
        first, last = ranges.minimum(first, other.first), ranges.maximum(last, other.last)
    return first, last


def visits_of_warpgroup(plan: Plan, block: Block, visit_table: Any, n: Any, wg: Any) -> schedule.Visits:
    """Those that warpgroup `wg` of the block computes."""
    return _visits(plan, block, visit_table, n, wg if plan.shares > 1 else 0)


def visit_table(plan: Plan, mask: Any) -> Any:
    """The visits of all shares: int32 [B|1, N|1, shares of a head, 4]."""
    parts = plan.shares
    count = -(-plan.own_a.length * parts // plan.config.block)
    found = schedule.table(plan.visits(mask, parts), count, plan.blocks * parts)
    # A share without visits stands where its block starts, so that the block does not reach out for it.
    of_blocks = found.reshape(*found.shape[:2], plan.blocks, parts, 4)
    has_visits = of_blocks[..., :1] < of_blocks[..., 3:]
    starts = jnp.where(has_visits, of_blocks[..., :1], ranges.FAR)
    start = ranges.minimum(*(starts[:, :, :, part : part + 1] for part in range(parts)))  # in the same kernel on a GPU
    return jnp.where(has_visits, of_blocks, jnp.where(start < ranges.FAR, start, 0)).reshape(found.shape)


def _visits(plan, block, visit_table, n, share):
    lines = plan.known_visits
    if lines is not None:
        return schedule.Visits(*(x[0] + x[1] * block.number if isinstance(x, tuple) else x for x in lines))
    return schedule.in_table(visit_table, block.b, n, block.number * plan.shares + share)
