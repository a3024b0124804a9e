"""The load warp of the backward kernel: stationary operands once, then what every step needs."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper.backward import work
from pallas_fa.backends.hopper.backward.gmem import Refs
from pallas_fa.backends.hopper.backward.plan import BackwardPlan
from pallas_fa.backends.hopper.backward.scratch import barriers

_copy = plgpu.copy_gmem_to_smem


class Load:
    """Loads all that one stationary block needs."""

    def __init__(self, plan: BackwardPlan, block: work.Block, gmem: Refs, scratch: dict[str, Any]):
        self.plan, self.block, self.gmem, self.scratch = plan, block, gmem, scratch
        self.barriers = barriers(plan, scratch)
        self.stationary = pl.ds(block.start, plan.config.block)

    def run(self) -> None:
        """Loads everything, and waits until all slots of the rings are free."""
        plan, stages = self.plan, self.plan.config.stages
        self._stationary("stationary_qk", "neg_lse")
        steps = work.for_steps(plan, self.block, self.gmem.visit_table, self._step)
        if plan.kind.accumulates_qk:
            pl.when(steps == 0)(lambda: self._stationary("stationary_pv", "delta"))
        for name, count in zip(("streamed_qk_free", "streamed_pv_free"), stages, strict=True):
            for slot in range(count):  # every completed phase of a barrier is to be waited for before the CTA ends
                pl.when(slot < steps)(lambda name=name, slot=slot: self.barriers[name].wait(slot))

    def _step(self, tile, n, done):
        plan, c = self.plan, self.plan.config
        slots = tuple(lax.rem(done, jnp.int32(stages)) for stages in c.stages)
        streamed = pl.ds(tile * c.width, c.width)
        pl.when(done >= c.stages[0])(lambda: self.barriers["streamed_qk_free"].wait(slots[0]))
        self._streamed("streamed_qk", "neg_lse", n, slots[0], streamed)
        for a in plan.arrays.in_smem:
            self._array(a, n, slots[0], streamed)
        if plan.kind.accumulates_qk:
            pl.when(done == 0)(lambda: self._stationary("stationary_pv", "delta"))
        pl.when(done >= c.stages[1])(lambda: self.barriers["streamed_pv_free"].wait(slots[1]))
        self._streamed("streamed_pv", "delta" if plan.kind.accumulates_qk else None, n, slots[1], streamed)

    def _stationary(self, name, statistic):
        tiles, ready, b, head = self._tiles(name), self.scratch[f"{name}_ready"], self.block.b, self.block.head
        copied = tiles.copied(self.scratch[f"{name}_smem"])
        tiles.load(getattr(self.gmem, name), b, self.stationary, head, copied, ready)
        if not self.plan.kind.keys_stationary:
            rows = getattr(self.gmem, statistic).at[b, head, self.stationary]
            _copy(rows, self.scratch[f"{statistic}_smem"].at[0], ready)

    def _streamed(self, name, statistic, n, slot, positions):
        plan, tiles, b = self.plan, self._tiles(name), self.block.b
        head = n if plan.kind.keys_stationary else lax.div(n, jnp.int32(plan.problem.group))
        ready = self.scratch[f"{name}_ready"].at[slot]
        copied = tiles.copied(self.scratch[f"{name}_smem"])
        tiles.load(getattr(self.gmem, name), b, positions, head, copied.at[slot], ready)
        if plan.kind.keys_stationary and statistic:
            rows = getattr(self.gmem, statistic).at[b, n, positions]
            _copy(rows, self.scratch[f"{statistic}_smem"].at[slot], ready)

    def _tiles(self, name):
        return getattr(self.plan.tiles, name)

    def _array(self, a, n, slot, streamed):
        array, smem = self.plan.arrays[a], self.scratch[f"array{a}_smem"].at[slot]
        source, block = self.gmem.arrays[a].at[array.index(self.block.b, n)], self.block
        ready = self.scratch["streamed_qk_ready"].at[slot]
        if array.kind != "tile":
            _copy(source.at[streamed if array.kind == "row" else self.stationary], smem, ready)
            return
        for wg in range(self.plan.config.compute_wgs):
            _copy(source.at[array.place(pl.ds(block.start + wg * 64, 64), streamed)], smem.at[wg], ready)
