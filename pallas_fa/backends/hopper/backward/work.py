"""The backward kernel's work: which CTA holds what, and in which order it visits the tiles of the streamed sequence."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu import tickets
from pallas_fa.backends.gpu.grid import AXIS
from pallas_fa.backends.hopper.backward.plan import BackwardPlan

BLOCK_SLOTS = 2  # for the stationary operands of several blocks
_SECTOR = 8  # numbers of one


class Block(NamedTuple):
    """A stationary block: batch entry, stationary head, its number, its first position.

    `down`: whether the CTA visits the tiles from the last one down (see `for_steps`). `done`: steps of the CTA before;
    `before`, `after`: how many blocks it processes before and after this one, 1 after it if that is not known. `slot`: that
    of its stationary operands, None where a CTA has but one block.
    """

    b: Any
    head: Any
    number: Any
    start: Any
    down: Any
    done: Any
    before: Any = 0
    after: Any = 0
    slot: Any = None

    def slot_of(self, ref: Any) -> Any:
        """Returns the part of this block of shared memory or barriers for stationary operands."""
        return ref if self.slot is None else ref.at[self.slot]


def for_blocks(
    plan: BackwardPlan,
    gmem: Any,
    scratch: dict[str, Any],
    role: Callable[..., tuple[Any, Any]],
    in_warp: bool,
) -> Any:
    """Calls role(block, next) -> (steps of the CTA after it, next()) for each block of this CTA; returns all steps.

    `in_warp`: whether the caller is a single warp of a warpgroup.
    By tickets, `next()` waits for the number of the next block; the earlier it is called, the less is left of the wait.
    """
    order, nothing = plan.order, lambda: None
    if not order.persistent:
        return role(_block(plan, order.grid.place(), jnp.int32(0)), nothing)[0]
    if order.by_tickets:
        return _for_tickets(plan, gmem.tickets, scratch["stationary_qk_ready"], role, in_warp)
    first, ctas = lax.axis_index(AXIS), order.ctas
    count = lax.div(order.grid.ctas - 1 - first, jnp.int32(ctas)) + 1
    one = lambda i, done: role(block_of(plan, first + i * ctas, i, done, count - 1 - i), nothing)[0]
    return lax.fori_loop(0, count, one, jnp.int32(0))


def _for_tickets(plan, memory, ready, role, in_warp):
    def number_of(i):
        plgpu.barrier_wait(ready.at[slot_of(i)])
        return tickets.passed_on(place_of_ticket(memory, i), plan.interpret)

    def one(number, i, done):
        done, after = role(block_of(plan, number, i, done), lambda: number_of(i + 1))
        return after, i + 1, done

    zero = jnp.int32(0)
    return tickets.while_blocks(plan.order.grid.ctas, one, number_of(zero), zero, zero, in_warp=in_warp)[2]


def memory_of_tickets(plan: BackwardPlan) -> tuple[int, int]:
    """Returns the shape of an int32 array: the counter of `tickets`, and for each CTA places of the numbers passed on.

    These are in device memory, since kernels fill shared memory. Each CTA writes to a sector of its own.
    """
    return 1 + plan.order.ctas, _SECTOR


def place_of_ticket(memory: Any, i: Any) -> Any:
    """Returns the place of the number of block i of this CTA."""
    return memory.at[1 + lax.axis_index(AXIS), pl.ds(slot_of(i), 1)]


def slot_of(i: Any) -> Any:
    """Returns that of the stationary operands of the CTA's block i."""
    return lax.rem(i, jnp.int32(BLOCK_SLOTS))


def block_of(plan: BackwardPlan, number: Any, i: Any, done: Any, after: Any = 1) -> Block:
    """Returns the block of that number in the grid, block i of the CTA."""
    return _block(plan, plan.order.grid.place(number), done, i, after, slot_of(i))


def _block(plan, at, done, *among):
    number = at.cta
    if not plan.kind.keys_stationary and plan.problem.mask is not None:
        number = plan.visits.blocks - 1 - number  # under most masks later queries see more keys: longest first
    down = plan.order.by_tile and lax.rem(at.group, jnp.int32(2)) == 0
    return Block(at.b, at.head, number, number * plan.config.block, down, done, *among)


def for_heads(plan: BackwardPlan, block: Block, body: Callable[[Any, Any], Any]) -> Any:
    """Calls body(n, steps before) -> steps after, for each query head of the block; returns the steps after it."""
    group = plan.group
    first = block.head * group
    if group == 1:
        return body(first, block.done)
    return lax.fori_loop(0, group, lambda g, done: body(first + g, done), block.done)


def for_steps(plan: BackwardPlan, block: Block, visit_table: Any, step: Callable[[Any, Any, Any], None]) -> Any:
    """Calls step(tile, n, steps before) for each step of a block; returns the steps after it.

    The steps go head after head, each from its first tile up, or as `tile_of_step` says.

    Or (`Order.by_tile`) they go tile after tile, each for all heads, and in every second head group from the last tile
    down. The CTAs of one key head then stay close to each other and find in the L2 cache what others loaded, if head
    groups fill the GPU once: the CTAs of one group start together at the last tile and end one after the other at their
    diagonals, where those of the next group begin. Neighbours start with different heads, since CTAs that add to the same
    tile of dQ serialise.
    """
    if plan.order.by_tile:
        first, last = plan.visits.of_block(visit_table, block.b, None, block.number)
        return for_tiles(plan, block, first, last, block.done, step)

    def head(n, done):
        first, last = plan.visits.of_block(visit_table, block.b, n, block.number)
        tile_of = functools.partial(tile_of_step, plan, block, visit_table, n, last)
        lax.fori_loop(first, last, lambda i, _: step(tile_of(i), n, done + (i - first)), None)
        return done + (last - first)

    return for_heads(plan, block, head)


def tile_of_step(plan: BackwardPlan, block: Block, visit_table: Any, n: Any, last: Any, tile: Any) -> Any:
    """Returns the tile that the CTA visits in the place of `tile`: the one of that number in its list, if it has one.

    Else one of the tiles [0, `last`) in an order of the CTA's own. CTAs that add to the same tile of dQ serialise; a start
    some tiles after the neighbour's avoids it.
    """
    if plan.visits.listed:
        return plan.visits.list_of(visit_table, block.b, n, block.number).tile(tile)
    stagger = plan.order.stagger
    return lax.rem(tile + block.number * stagger, jnp.int32(last)) if stagger else tile


def for_tiles(plan: BackwardPlan, block: Block, first: Any, last: Any, done: Any, step: Callable[..., None]) -> Any:
    """Calls step(tile, n, steps before) for all heads of each of the tiles [first, last); returns `done` plus the steps."""
    group = plan.group

    def of_tile(i, _):
        tile, before = jnp.where(block.down, last - 1 - i, first + i), done + i * group

        def of_head(g, _):
            step(tile, block.head * group + lax.rem(g + block.number, jnp.int32(group)), before + g)

        lax.fori_loop(0, group, of_head, None)

    lax.fori_loop(0, last - first, of_tile, None)
    return done + (last - first) * group
