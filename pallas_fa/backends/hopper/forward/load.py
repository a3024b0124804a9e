"""The load warpgroup of the forward kernel: queries once for a block, then keys, arrays and values of every step."""

import functools
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper.forward import work
from pallas_fa.backends.hopper.forward.plan import ForwardPlan


class Load:
    """Loads all that one block of queries needs."""

    def __init__(self, plan: ForwardPlan, block: work.Block, gmem: Any, scratch: dict[str, Any]):
        self.plan, self.block, self.gmem, self.scratch = plan, block, gmem, scratch
        self.kv_head = lax.div(block.n, plan.problem.group)
        self.copied = {name: getattr(plan, name).views(scratch[f"{name}_smem"])[1] for name in ("q", "k", "v")}

    def run(self) -> tuple[Any, Any]:
        """Returns (steps, steps that use streamed arrays)."""
        plan, block, scratch = self.plan, self.block, self.scratch
        if not plan.pairs:
            self._queries()
        steps = work.steps_of(plan, block, self.gmem.visit_table)

        @pl.loop(0, steps.end)
        def _(i):
            step = block.done + i
            slot = lax.rem(step, plan.config.stages)
            keys = pl.ds((steps.last - i) * plan.config.block_kv, plan.config.block_kv)
            wait_free(plan, step, slot, scratch["k_free"])
            self._load("k", keys, slot, scratch["k_ready"].at[slot])
            if plan.pairs:  # the first keys come before the block of queries before is done
                pl.when(i == 0)(self._next_queries)
            if plan.streamed and plan.arrays_always:
                self._arrays(steps, i, keys)
            elif plan.streamed:
                is_cut = i < steps.cut_end
                is_cut = is_cut if steps.full_end is None else is_cut | (i >= steps.full_end)
                pl.when(is_cut)(lambda: self._arrays(steps, i, keys))
            wait_free(plan, step, slot, scratch["v_free"])
            load_v = functools.partial(self._load, "v", keys, slot)
            if not plan.zeroes_padding:
                load_v(scratch["v_ready"].at[slot])
                return
            # The first tile reaches past the key length, if one does: it is announced once its padding is zeroed.
            pl.when(i == 0)(lambda: load_v(scratch["v_loaded"]))
            pl.when(i > 0)(lambda: load_v(scratch["v_ready"].at[slot]))

        return steps.end, work.array_steps(plan, steps, steps.end)

    def _load(self, name, rows, slot, ready):
        tiles, gmem = getattr(self.plan, name), getattr(self.gmem, name)
        tiles.load(gmem, self.block.b, rows, self.kv_head, self.copied[name].at[slot], ready)

    def _queries(self):
        plan, block, ready = self.plan, self.block, self.scratch["q_ready"]
        for wg in range(plan.config.compute_wgs):
            rows = self._rows(wg)
            plan.q.load(self.gmem.q, block.b, rows, block.n, self.copied["q"].at[wg], ready)
            for a in plan.columns:
                source = self.gmem.arrays[a].at[(*plan.arrays[a].index(block.b, block.n), rows)]
                plgpu.copy_gmem_to_smem(source, self.scratch[f"array{a}_smem"].at[wg], ready)

    def _rows(self, wg):
        # In the place of absent rows others are loaded: the barriers count on it.
        return pl.ds(work.present(self.plan, self.block.t0 + wg * 64), 64)

    def _next_queries(self):
        pl.when(self.block.done > 0)(lambda: plgpu.barrier_wait(self.scratch["q_free"]))
        self._queries()

    def _arrays(self, steps, i, keys):
        """Rows and tiles of arrays for step i."""
        plan, block, c = self.plan, self.block, self.plan.config
        step = block.arrays_done + work.array_steps(plan, steps, i)
        slot = lax.rem(step, c.stages)
        wait_free(plan, step, slot, self.scratch["arrays_free"])
        ready = self.scratch["arrays_ready"].at[slot]
        for a in plan.streamed:
            smem, lead = self.scratch[f"array{a}_smem"].at[slot], plan.arrays[a].index(block.b, block.n)
            if plan.arrays[a].kind == "row":
                plgpu.copy_gmem_to_smem(self.gmem.arrays[a].at[(*lead, keys)], smem, ready)
                continue
            for wg in range(c.compute_wgs):
                rows = self._rows(wg)
                plgpu.copy_gmem_to_smem(self.gmem.arrays[a].at[(*lead, rows, keys)], smem.at[wg], ready)


def wait_free(plan: ForwardPlan, step: Any, slot: Any, free: Any) -> None:
    """Before a ring's slot is loaded again, waits until all compute warpgroups have released it."""
    pl.when(step >= plan.config.stages)(lambda: plgpu.barrier_wait(free.at[slot]))


def wait_for_the_rest(plan: ForwardPlan, done: Any, arrays_done: Any, scratch: dict[str, Any]) -> None:
    """Every completed phase of a barrier is waited for before the threads end."""
    rings = [("k_free", done), ("v_free", done), *([("arrays_free", arrays_done)] if plan.streamed else [])]
    for name, count in rings:
        for slot in range(plan.config.stages):
            pl.when(slot < count)(lambda name=name, slot=slot: plgpu.barrier_wait(scratch[name].at[slot]))
    if plan.pairs:
        plgpu.barrier_wait(scratch["q_free"])
