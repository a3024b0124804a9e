"""The backward kernel's work: which block of threads holds what, and which tiles of the other sequence it visits."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa import ranges
from pallas_fa.mosaic_gpu import schedule
from pallas_fa.mosaic_gpu.backward_plan import Plan


class Block(NamedTuple):
    """A block of the own sequence: batch entry, own head, its number, its first position; `down`: see `for_steps`."""

    b: Any
    head: Any
    number: Any
    start: Any
    down: Any


def block_here(plan: Plan, section: int) -> Block:
    """The block of these threads; `section`: heads whose blocks run side by side."""
    b, head, number = schedule.place(section, plan.blocks, plan.heads)
    if not plan.by_keys and plan.problem.mask is not None:
        number = plan.blocks - 1 - number  # under most masks later queries see more keys: longest first
    down = lax.rem(lax.div(lax.axis_index("block"), jnp.int32(section * plan.blocks)), jnp.int32(2)) == 0
    return Block(b, head, number, number * plan.config.block, down)


def for_heads(plan: Plan, block: Block, body: Any) -> Any:
    """`body(n, steps before)` -> steps after, for each query head of the block; returns the number of all steps."""
    group = plan.problem.group if plan.by_keys else 1
    first = block.head * group
    if group == 1:
        return body(first, jnp.int32(0))
    return lax.fori_loop(0, group, lambda g, done: body(first + g, done), jnp.int32(0))


def by_tile(plan: Plan) -> bool:
    """Whether blocks go through the query heads of a tile before the next tile; only where nothing depends on the head."""
    depends = plan.summed or plan.of_kind("scalar")
    return plan.config.by_tile and plan.by_keys and not depends and known_visits(plan) is not None


def for_steps(plan: Plan, block: Block, visit_table: Any, step: Any) -> Any:
    """step(tile, n, steps before) for each step of a block; returns the number of all steps.

    Head after head, each from its first tile up. Or (`by_tile`) tile after tile, each for all heads, in every other
    section of heads (`block.down`) from the last tile down. Blocks of one key head then stay close to each other, and
    find in the cache what others loaded, if sections fill the GPU once: those of one start together at the last tile and
    end one after the other at their diagonals, and there those of the next begin.
    """
    if by_tile(plan):
        first, last = visits_of_block(plan, block, visit_table, None)
        return for_tiles(plan, block, first, last, jnp.int32(0), step)

    def head(n, done):
        first, last = visits_of_block(plan, block, visit_table, n)
        lax.fori_loop(first, last, lambda tile, _: step(tile, n, done + (tile - first)), None)
        return done + (last - first)

    return for_heads(plan, block, head)


def for_tiles(plan: Plan, block: Block, first: Any, last: Any, done: Any, step: Any) -> Any:
    """step(tile, n, steps before) for all heads of each of the tiles [first, last); returns the steps after `done` too."""
    group = plan.problem.group

    def one(i, _):
        tile = jnp.where(block.down, last - 1 - i, first + i)
        lax.fori_loop(0, group, lambda g, _: step(tile, block.head * group + g, done + i * group + g), None)

    lax.fori_loop(0, last - first, one, None)
    return done + (last - first) * group


def shares(plan: Plan) -> int:
    """How many parts of a block have visits of their own: its warpgroups, where one can sit out what others visit.

    Measured at head dim 128: a window gains 4%, documents too, and plain causal blocks, whose visits are known, lose 5%.
    """
    c = plan.config
    # Zeroing a tile takes all warpgroups. A tile as wide as the block is rarely another's alone.
    can_differ = plan.problem.mask is not None and c.width < c.block and not plan.zeroes_other
    return c.compute_wgs if can_differ and known_visits(plan) is None else 1


def visits_of_block(plan: Plan, block: Block, visit_table: Any, n: Any) -> tuple[Any, Any]:
    """Tiles [first, last) that the block visits at query head n: from the first to the last that any share does."""
    found, *rest = (_visits(plan, block, visit_table, n, share) for share in range(shares(plan)))
    first, last = found.first, found.last
    for other in rest:
        first, last = ranges.minimum(first, other.first), ranges.maximum(last, other.last)
    return first, last


def visits_of_warpgroup(plan: Plan, block: Block, visit_table: Any, n: Any, wg: Any) -> schedule.Visits:
    """Those that warpgroup `wg` of the block computes."""
    return _visits(plan, block, visit_table, n, wg if shares(plan) > 1 else 0)


def known_visits(plan: Plan) -> schedule.Visits | None:
    """The visits of whole blocks as lines, where they are that and known while tracing; else a table is read."""
    is_known = not jax.tree.leaves(plan.problem.mask)
    return schedule.as_lines(_found(plan, plan.problem.mask, 1), plan.blocks) if is_known else None


def visit_table(plan: Plan, mask: Any) -> Any:
    """The visits of all shares: int32 [B|1, N|1, shares of a head, 4]."""
    parts = shares(plan)
    count = -(-plan.own_a.length * parts // plan.config.block)
    found = schedule.table(_found(plan, mask, parts), count, plan.blocks * parts)
    # A share without visits stands where its block starts, so that the block does not reach out for it.
    of_blocks = found.reshape(*found.shape[:2], plan.blocks, parts, 4)
    has_visits = of_blocks[..., :1] < of_blocks[..., 3:]
    starts = jnp.where(has_visits, of_blocks[..., :1], ranges.FAR)
    start = ranges.minimum(*(starts[:, :, :, part : part + 1] for part in range(parts)))  # in the same kernel on a GPU
    return jnp.where(has_visits, of_blocks, jnp.where(start < ranges.FAR, start, 0)).reshape(found.shape)


def _visits(plan, block, visit_table, n, share):
    lines = known_visits(plan)
    if lines is not None:
        return schedule.Visits(*(x[0] + x[1] * block.number if isinstance(x, tuple) else x for x in lines))
    return schedule.in_table(visit_table, block.b, n, block.number * shares(plan) + share)


def _found(plan, mask, parts):
    whole_only = plan.by_keys or plan.scored  # past the end are no keys; a score could make NaN there
    sizes = plan.config.block // parts, plan.own_a.length, _other_size(plan), plan.config.width
    return schedule.visits_of_blocks(*_questions(plan, mask), *sizes, whole_only, at_least=0)


def _questions(plan: Plan, mask: Any) -> tuple[Any, Any]:
    """What the mask is asked about a share: which positions of the other sequence are visited, which are full."""
    if mask is None:
        everything = lambda lo, hi: (0, ranges.FAR)
        return everything, everything
    return (mask.q_range, mask.full_q_range) if plan.by_keys else (mask.kv_range, mask.full_kv_range)


def _other_size(plan: Plan) -> int:
    """The size of the other sequence, where a tile past it does no harm rounded up to whole tiles."""
    size, width = plan.other_a.length, plan.config.width
    # Statistics of queries past the end make their probabilities 0, whatever the mask; but a score could make NaN there.
    return size if plan.scored or not plan.by_keys else -(-size // width) * width
