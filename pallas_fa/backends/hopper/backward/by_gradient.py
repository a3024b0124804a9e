"""Two compute warpgroups that hold the same keys: one adds to dV, the other to dK.

Past a head dim of 128 the registers of one warpgroup have no room for the sums of both gradients beside tiles of logits.
Here the first computes S^T = K Q^T and P^T, and hands what dS^T has beside dP^T as a factor to the second, in float32,
through shared memory. The second has computed dP^T = V dO^T meanwhile. So logits are computed once for both gradients, and
the exponentials of one warpgroup have the matmuls of the other beside them: the second leaves the tensor cores to the first
until the logits of the next step are there (evidence: backward/by-gradient).
"""

from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.gradient_tile import TileOfLogits, TilePlace
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.hopper import products
from pallas_fa.backends.hopper.backward.padding import zero_streamed
from pallas_fa.backends.hopper.backward.plan import BackwardPlan
from pallas_fa.backends.hopper.backward.probabilities import array_of_tile, exponentials, statistic
from pallas_fa.backends.hopper.backward.scratch import barriers
from pallas_fa.backends.hopper.backward.warpgroup import OF_DK, OF_DV, Accumulators, Slots, Warpgroup


def run(plan: BackwardPlan, wg: Any, scratch: dict[str, Any], body: Callable[[int], None]) -> None:
    """Calls body(number) in each of the two warpgroups, whose programs differ."""
    free = barriers(plan, scratch)["weights_free"]
    pl.when(wg == OF_DK)(free.arrive)
    for number in (OF_DV, OF_DK):
        pl.when(wg == number)(lambda number=number: body(number))
    pl.when(wg == OF_DV)(free.wait)  # the last arrival, which no step waited for


def step(w: Warpgroup, at: TilePlace, done: Any, accs: Accumulators) -> None:
    """Adds one tile to this warpgroup's gradient. `done`: steps before."""
    slots = w.slots(done)
    if w.plan.padding.streamed:
        finish(w, done)  # of two tiles of dO there may be memory for one
        w.wait_for_qk(slots)
        w.wait_for_pv(slots)
        zero_streamed(w, at, slots, "qk", "pv")
    if w.wg == OF_DV:
        _add_to_dv(w, at, slots, done, accs)
    else:
        _add_to_dk(w, slots, accs)


def finish(w: Warpgroup, done: Any) -> None:
    """Waits for what the step before has left under way. `done`: steps of the CTA, that one included."""
    if w.wg == OF_DV:
        w.wgmma.wait(0)
        _end_step_before(w, done)


def _add_to_dv(w: Warpgroup, at: TilePlace, slots: Slots, done: Any, accs: Accumulators) -> None:
    plan, wgmma, problem = w.plan, w.wgmma, w.plan.problem
    neg_lse = lambda: statistic(w, "neg_lse", slots.qk)
    if not plan.padding.streamed:
        w.wait_for_qk(slots)

    def body(acc):
        if not plan.scored and not plan.statistics_last:
            acc[...] = neg_lse()
        wgmma.inner_products(acc, w.chunks_of_stationary("qk"), w.streamed_qk.at[slots.qk])
        s = wgmma.result(acc, in_flight=0)
        if not plan.padding.streamed:
            _end_step_before(w, done)  # its matmul, issued before the products of this step, is done
        w.wait_for_array_tiles(slots)
        tile = TileOfLogits.of(plan, at, lambda i: array_of_tile(w, i, slots))
        p = tile.zero_where_masked(exponentials(plan, tile, s, neg_lse))
        weights = tile.without_nan(tile.pullback(s, p, problem.scale), plan.scored)
        return p, weights[0]

    p, weights = wgmma.scoped(body, (64, plan.config.width))
    w.release_array_tiles(slots)
    w.barriers["weights_free"].wait()
    w.scratch["weights_smem"][...] = weights
    w.barriers["weights_ready"].arrive()
    w.release_qk(slots)
    if not plan.padding.streamed:
        w.wait_for_pv(slots)
    wgmma.weighted_sums(accs.pv, products.operand(problem, p), w.streamed_pv.at[slots.pv])


def _end_step_before(w: Warpgroup, done: Any) -> None:
    @pl.when(done > w.block.done)
    def _():
        w.release_pv(w.slots(done - 1))
        if w.plan.dk_waits_for_logits:
            w.barriers["logits_done"].arrive()


def _add_to_dk(w: Warpgroup, slots: Slots, accs: Accumulators) -> None:
    plan, wgmma, problem = w.plan, w.wgmma, w.plan.problem
    if not plan.padding.streamed:
        w.wait_for_pv(slots)

    def body(acc):
        delta = lambda: statistic(w, "delta", slots.pv)
        if plan.delta_first:
            acc[...] = delta()
        wgmma.inner_products(acc, w.chunks_of_stationary("pv"), w.streamed_pv.at[slots.pv])
        dp = wgmma.result(acc, in_flight=0)
        dp = dp if plan.delta_first else dp + delta()
        w.release_pv(slots)
        w.barriers["weights_ready"].wait()
        weights = plgpu.load(w.scratch["weights_smem"], layout=TILE)
        return products.operand(problem, weights * dp)

    ds = wgmma.scoped(body, (64, plan.config.width))
    if plan.dk_waits_for_logits:
        w.barriers["logits_done"].wait()
    w.barriers["weights_free"].arrive()  # behind the wait for `logits_done`: the next arrival there needs this one
    if not plan.padding.streamed:
        w.wait_for_qk(slots)
    wgmma.weighted_sums(accs.qk, ds, w.streamed_qk.at[slots.qk])
    wgmma.wait(0)
    w.release_qk(slots)
