"""The warp of the fused backward kernel that adds up large gradients of arrays in device memory (`Order.ordered_sums`)."""

import itertools
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.gradient_tile import TilePlace
from pallas_fa.backends.hopper.backward import first_store, work
from pallas_fa.backends.hopper.backward.gmem import Refs
from pallas_fa.backends.hopper.backward.plan import SUM_COLUMNS, BackwardPlan
from pallas_fa.backends.hopper.backward.scratch import barriers
from pallas_fa.backends.hopper.tma import add_to_gmem


def store_sums(plan: BackwardPlan, gmem: Refs, scratch: dict[str, Any]) -> None:
    """Stores the tiles that the compute warpgroups stage where the CTA is the first to have one, else adds them."""
    barrier, config = barriers(plan, scratch), plan.config
    barrier["sums_free"].arrive()

    def of_block(block, after):
        def step(tile, n, _):
            claimed = []
            at = TilePlace(block.b, n, block.start, tile * config.width, False, {}, None)
            for i in plan.order.ordered_sums:  # asked while the tile is computed
                *lead, _, _ = plan.added_place(i, at, 64)
                counter = gmem.array_claims[i].at[(*lead, block.number, pl.ds(tile, 1))]
                claimed.append((i, counter, first_store.claim(counter, plan.interpret)))
            for column in range(0, config.width, SUM_COLUMNS):
                barrier["sums_ready"].wait()
                for (i, _, is_first), wg in itertools.product(claimed, range(config.row_groups)):
                    here = at._replace(stationary=block.start + wg * 64, streamed=at.streamed + column)
                    staged, sums = scratch[f"gradient{i}_smem"].at[wg], gmem.added[i].at[plan.added_place(i, here, 64)]
                    lax.cond(
                        is_first,
                        lambda staged=staged, sums=sums: plgpu.copy_smem_to_gmem(staged, sums),
                        lambda staged=staged, sums=sums: add_to_gmem(staged, sums, plan.interpret),
                    )
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                barrier["sums_free"].arrive()
            for _, counter, is_first in claimed:
                pl.when(is_first)(lambda counter=counter: first_store.publish(counter, plan.interpret))

        return work.for_steps(plan, block, gmem.visit_table, step), after()

    work.for_blocks(plan, gmem, scratch, of_block, in_warp=True)
