"""The store warps of the fused backward kernel, which add the tiles of dQ to device memory."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper.backward import first_store, work
from pallas_fa.backends.hopper.backward.gmem import Refs
from pallas_fa.backends.hopper.backward.plan import BackwardPlan
from pallas_fa.backends.hopper.backward.scratch import barriers
from pallas_fa.backends.hopper.tma import add_to_gmem
from pallas_fa.operands.layout import ordered


def store_dq(plan: BackwardPlan, index: Any, gmem: Refs, scratch: dict[str, Any]) -> None:
    """Adds the tiles of dQ that the compute warpgroups stage, or stores them where no CTA does so before.

    The warps alternate: warp `index` does the steps i with i modulo the number of these warps = `index`.
    """
    wgs, dq, dq_smem = plan.config.compute_wgs, plan.dq, scratch["dq_smem"]
    assert dq is not None
    copies = dq.tile.copies if dq.is_final else 1
    barrier = barriers(plan, scratch)
    dq_ready, dq_free = barrier["dq_ready"], barrier["dq_free"]

    @pl.when(index == 0)
    def _():
        for wg in range(wgs):
            dq_free.arrive(wg)

    def step(block, tile, n):
        part = (block.number,) if plan.interpret else ()
        is_first, counter = False, None
        if dq.first_store:
            counter = gmem.dq_claims.at[(*part, block.b, tile, pl.ds(n, 1))]
        if dq.claims_late:
            is_stored = first_store.is_stored(counter, plan.interpret)  # asked while the tile is computed
            for wg in range(wgs):
                dq_ready.wait(index * wgs + wg)
            claim = lambda: jnp.asarray(first_store.claim(counter, plan.interpret), jnp.int32)
            is_first = lax.cond(is_stored, lambda: jnp.int32(0), claim) > 0
        elif dq.first_store:
            is_first = first_store.claim(counter, plan.interpret)  # likewise
        for wg in range(wgs):
            if not dq.claims_late:
                dq_ready.wait(index * wgs + wg)
            row = tile * plan.config.width + (wg * 64 if dq.by_rows else 0)
            if dq.is_final:
                copied = dq.tile.copied(dq_smem).at[wg]
                dq.tile.store(copied, gmem.dq_sums, block.b, pl.ds(row, 64), n)
                continue
            column = 0 if dq.by_rows else wg * dq.columns
            place = ordered(dq.layout, (block.b, pl.ds(row, 64), n, pl.ds(column, dq.columns)))
            sums = gmem.dq_sums.at[(*part, *place)]
            lax.cond(
                is_first,
                lambda wg=wg, sums=sums: plgpu.copy_smem_to_gmem(dq_smem.at[wg], sums),
                lambda wg=wg, sums=sums: add_to_gmem(dq_smem.at[wg], sums, plan.interpret),
            )
        for wg in range(wgs):
            plgpu.wait_smem_to_gmem((wgs - 1 - wg) * copies, wait_read_only=True)
            dq_free.arrive(wg)
        if dq.first_store:
            pl.when(is_first)(lambda: first_store.publish(counter, plan.interpret))

    def of_block(block, after):
        if plan.order.by_tickets:  # this warp has read the number of the block
            pl.when(block.before > 0)(lambda: barrier["stationary_free"].arrive(work.slot_of(block.before - 1)))

        def step_of_this_warp(tile, n, done):
            pl.when(lax.rem(done, jnp.int32(dq.store_warps)) == index)(lambda: step(block, tile, n))

        return work.for_steps(plan, block, gmem.visit_table, step_of_this_warp), after()

    work.for_blocks(plan, gmem, scratch, of_block, in_warp=True)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
