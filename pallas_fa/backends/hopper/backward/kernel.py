"""The body of a pass of the backward kernel: what each warpgroup of a CTA does.

In the memory warpgroup one warp loads: the stationary operands once, then streamed operands, row statistics and arrays,
step by step. One or two others add tiles of dQ to device memory, one more may add gradients of arrays. The compute
warpgroups hold 64 stationary positions each; the following is for keys, and a pass for dQ alone has the roles of queries
and keys exchanged. In a step they compute S^T = K Q^T and dP^T = V dO^T. P^T and dS^T stay in registers as left operands
of dV += P^T dO and dK += dS^T Q. dS^T also goes through shared memory, as operand of dQ = dS K, which needs the keys of
all warpgroups. Where registers are short, S and dP take them one after the other, and dK's matmul, too, reads dS^T there
(`p_before_dp`). Or the two compute warpgroups hold the same keys, one with dV and the other with dK (`by_gradient`).
"""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper.backward import by_gradient, work
from pallas_fa.backends.hopper.backward import gmem as device_memory
from pallas_fa.backends.hopper.backward.compute import compute
from pallas_fa.backends.hopper.backward.load import load
from pallas_fa.backends.hopper.backward.plan import BackwardPlan
from pallas_fa.backends.hopper.backward.scratch import barriers, by_name
from pallas_fa.backends.hopper.backward.store_dq import store_dq
from pallas_fa.backends.hopper.backward.store_sums import store_sums
from pallas_fa.backends.hopper.backward.warpgroup import Warpgroup
from pallas_fa.backends.hopper.ping_pong import PingPong


def kernel(plan: BackwardPlan, *refs: Any, **scratch: Any) -> None:
    """Runs a CTA. `refs`: the operands and results of a pass of `backward`; `scratch`: that of `scratch.scratch`."""
    gmem, c, dq, scratch = device_memory.named(plan, refs), plan.config, plan.dq, by_name(plan, scratch)
    wg = lax.axis_index("wg")
    compute_registers, memory_registers = c.registers

    def for_blocks(wg):
        of_block = lambda block, after: compute(Warpgroup(plan, block, wg, gmem, scratch), after)
        work.for_blocks(plan, gmem, scratch, of_block, in_warp=False)

    @pl.when(wg < c.compute_wgs)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        if plan.by_gradient:
            by_gradient.run(plan, wg, scratch, for_blocks)
        else:
            PingPong.of(barriers(plan, scratch), wg).run(lambda: for_blocks(wg))
        if dq:
            barriers(plan, scratch)["dq_free"].wait(wg)  # the last arrival, which no step waited for
        if plan.order.ordered_sums:
            barriers(plan, scratch)["sums_free"].wait()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(wg == c.compute_wgs)
    def _():
        plgpu.set_max_registers(memory_registers, action="decrease")

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                load(plan, gmem, scratch)

            if dq:
                stores = (warp >= 1) & (warp <= dq.store_warps)
                pl.when(stores)(lambda: store_dq(plan, warp - 1, gmem, scratch))
                if plan.order.ordered_sums:
                    pl.when(warp == dq.store_warps + 1)(lambda: store_sums(plan, gmem, scratch))
