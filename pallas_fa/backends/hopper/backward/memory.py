"""Device memory of the backward kernel, and the warps that move it."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper.backward import first_store, work
from pallas_fa.backends.hopper.backward.plan import Plan
from pallas_fa.backends.hopper.backward.work import Block
from pallas_fa.backends.hopper.tma import add_to_gmem


class Refs(NamedTuple):
    """Device memory. `arrays`: of score and mask; `visit_table`: None where visits are known while tracing.

    `dq_sums` and `added` are added to; `dq_claims` has a counter for each tile of `dq_sums` (see `first_store`).
    """

    own_a: Any
    own_b: Any
    other_a: Any
    other_b: Any
    start: Any
    delta: Any
    arrays: tuple[Any, ...]
    visit_table: Any
    dq_claims: Any
    dq_sums: Any
    added: dict[int, Any]
    gradients: dict[str, Any]
    summed: dict[int, Any]


def named(plan: Plan, refs: tuple[Any, ...]) -> Refs:
    """The operands and results of a pass, by name."""
    queue = list(refs)
    take = lambda count: [queue.pop(0) for _ in range(count)]
    own_a, own_b, other_a, other_b, start, delta = take(6)
    arrays = tuple(take(len(plan.arrays)))
    visit_table = None if plan.known_visits else queue.pop(0)
    dq = queue.pop(0) if plan.fused else None
    added = dict(zip(plan.added, take(len(plan.added)), strict=True))
    claims, sums = (dq, queue.pop(0)) if plan.first_stores else (None, dq)
    gradients = dict(zip(plan.stored, take(len(plan.stored)), strict=True))
    summed = dict(zip(plan.summed, queue, strict=True))
    return Refs(
        own_a, own_b, other_a, other_b, start, delta, arrays, visit_table, claims, sums, added, gradients, summed
    )


def load(plan: Plan, block: Block, gmem: Refs, scratch: dict[str, Any]) -> None:
    """The load warp."""
    c, b = plan.config, block.b
    barriers = plan.barriers(scratch)
    copy = plgpu.copy_gmem_to_smem
    copied = {name: getattr(plan, name).views(scratch[f"{name}_smem"])[1] for name in ("own_a", "other_a", "other_b")}
    own = pl.ds(block.start, c.block)

    def load_own(name, statistic):
        tiles, ready = getattr(plan, name), scratch[f"{name}_ready"]
        tiles.load(getattr(gmem, name), b, own, block.head, tiles.views(scratch[f"{name}_smem"])[1], ready)
        if not plan.by_keys:
            copy(getattr(gmem, statistic).at[b, block.head, own], scratch[f"{statistic}_smem"].at[0], ready)

    def load_array(a, n, slot, others):
        array, smem = plan.arrays[a], scratch[f"array{a}_smem"].at[slot]
        source, ready = gmem.arrays[a].at[array.index(b, n)], scratch["other_a_ready"].at[slot]
        if array.kind != "tile":
            copy(source.at[others if array.kind == "row" else own], smem, ready)
            return
        for wg in range(c.compute_wgs):
            copy(source.at[pl.ds(block.start + wg * 64, 64), others], smem.at[wg], ready)

    def load_other(name, statistic, n, slot, others):
        head = n if plan.by_keys else lax.div(n, jnp.int32(plan.problem.group))
        ready = scratch[f"{name}_ready"].at[slot]
        getattr(plan, name).load(getattr(gmem, name), b, others, head, copied[name].at[slot], ready)
        if plan.by_keys and statistic:
            copy(getattr(gmem, statistic).at[b, n, others], scratch[f"{statistic}_smem"].at[slot], ready)

    load_own("own_a", "start")

    def step(tile, n, done):
        slots = tuple(lax.rem(done, jnp.int32(stages)) for stages in c.stages)
        others = pl.ds(tile * c.width, c.width)
        pl.when(done >= c.stages[0])(lambda: barriers["other_a_free"].wait(slots[0]))
        load_other("other_a", "start", n, slots[0], others)
        for a in plan.of_kind("row", "column", "tile"):
            load_array(a, n, slots[0], others)
        if plan.gives_a:
            pl.when(done == 0)(lambda: load_own("own_b", "delta"))
        pl.when(done >= c.stages[1])(lambda: barriers["other_b_free"].wait(slots[1]))
        load_other("other_b", "delta" if plan.gives_a else None, n, slots[1], others)

    steps = work.for_steps(plan, block, gmem.visit_table, step)
    if plan.gives_a:
        pl.when(steps == 0)(lambda: load_own("own_b", "delta"))
    for name, stages in (("other_a_free", c.stages[0]), ("other_b_free", c.stages[1])):
        for slot in range(stages):  # every completed phase of a barrier is waited for before the block ends
            pl.when(slot < steps)(lambda name=name, slot=slot: barriers[name].wait(slot))


def store_dq(plan: Plan, block: Block, turn: Any, gmem: Refs, scratch: dict[str, Any]) -> None:
    """A store warp: adds the tiles of dQ that the compute warpgroups stage, or stores them where nobody did before.

    The warps take turns: step i is done by warp `turn` = i modulo the number of these warps.
    """
    wgs, warps, dq_smem = plan.config.compute_wgs, plan.store_warps, scratch["dq_smem"]
    barriers = plan.barriers(scratch)
    dq_ready, dq_free = barriers["dq_ready"], barriers["dq_free"]

    @pl.when(turn == 0)
    def _():
        for wg in range(wgs):
            dq_free.arrive(wg)

    def step(tile, n):
        part = (block.number,) if plan.interpret else ()
        is_first = False
        if plan.first_stores:  # asked while the tile is computed
            counter = gmem.dq_claims.at[(*part, block.b, n, pl.ds(tile, 1))]
            is_first = first_store.claim(counter, plan.interpret)
        for wg in range(wgs):
            dq_ready.wait(turn * wgs + wg)
            row = tile * plan.config.width + (wg * 64 if plan.dq_by_rows else 0)
            column = 0 if plan.dq_by_rows else wg * plan.dq_columns
            dq = gmem.dq_sums.at[(*part, block.b, pl.ds(row, 64), n, pl.ds(column, plan.dq_columns))]
            lax.cond(
                is_first,
                lambda wg=wg, dq=dq: plgpu.copy_smem_to_gmem(dq_smem.at[wg], dq),
                lambda wg=wg, dq=dq: add_to_gmem(dq_smem.at[wg], dq, plan.interpret),
            )
        for wg in range(wgs):
            plgpu.wait_smem_to_gmem(wgs - 1 - wg, wait_read_only=True)
            dq_free.arrive(wg)
        if plan.first_stores:
            pl.when(is_first)(lambda: first_store.publish(counter, plan.interpret))

    def step_in_turn(tile, n, done):
        pl.when(lax.rem(done, jnp.int32(warps)) == turn)(lambda: step(tile, n))

    work.for_steps(plan, block, gmem.visit_table, step_in_turn)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
