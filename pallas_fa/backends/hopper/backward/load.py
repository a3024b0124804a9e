"""The load warp of the backward kernel: stationary operands once, then what every step needs."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu import tickets
from pallas_fa.backends.gpu.grid import AXIS
from pallas_fa.backends.hopper.backward import chunks, work
from pallas_fa.backends.hopper.backward.gmem import Refs
from pallas_fa.backends.hopper.backward.plan import BackwardPlan
from pallas_fa.backends.hopper.backward.scratch import barriers

_copy = plgpu.copy_gmem_to_smem


def load(plan: BackwardPlan, gmem: Refs, scratch: dict[str, Any]) -> None:
    """Runs the load warp."""

    def wait_for_slot(i):
        free = barriers(plan, scratch)["stationary_free"]
        pl.when(i >= work.BLOCK_SLOTS)(lambda: free.wait(work.slot_of(i)))

    def of_block(block, after):
        if plan.several_blocks:
            wait_for_slot(block.before)
        return _Load(plan, block, gmem, scratch).run(), after()

    def pass_on(i, number):
        wait_for_slot(i)
        tickets.pass_on(work.place_of_ticket(gmem.tickets, i), number, plan.interpret)

    def of_ticket(number, i, done):
        pass_on(i, number)
        done = _Load(plan, work.block_of(plan, number, i, done), gmem, scratch).run()
        counter = gmem.tickets.at[0, pl.ds(0, 1)]
        return tickets.take(counter, number, plan.order.ctas, plan.interpret), i + 1, done

    if plan.order.by_tickets:
        first, zero = lax.axis_index(AXIS), jnp.int32(0)
        number, count, steps = tickets.while_blocks(plan.order.grid.ctas, of_ticket, first, zero, zero, in_warp=True)
        pass_on(count, number)  # by which the others see that there is no other block
        for _ in range(plan.tiles.stationary_qk.copies):
            plgpu.barrier_arrive(scratch["stationary_qk_ready"].at[work.slot_of(count)])
    else:
        steps = work.for_blocks(plan, gmem, scratch, of_block, in_warp=True)
    _drain(plan, steps, scratch)


class _Load:
    """Loads all that one stationary block needs."""

    def __init__(self, plan: BackwardPlan, block: work.Block, gmem: Refs, scratch: dict[str, Any]):
        self.plan, self.block, self.gmem, self.scratch = plan, block, gmem, scratch
        self.barriers = barriers(plan, scratch)
        self.stationary = pl.ds(block.start, plan.config.block)

    def run(self) -> Any:
        """Loads everything; returns the steps after the block."""
        plan = self.plan
        self._stationary("stationary_qk", "neg_lse")
        if plan.chunked and plan.kind.accumulates_qk:
            self._stationary("stationary_pv", "delta")
        step = self._step_of_chunks if plan.chunked else self._step
        steps = work.for_steps(plan, self.block, self.gmem.visit_table, step)
        if plan.kind.accumulates_qk and not plan.chunked:
            pl.when(steps == self.block.done)(lambda: self._stationary("stationary_pv", "delta"))
        return steps

    def _step(self, tile, n, done):
        plan, c = self.plan, self.plan.config
        slots = tuple(lax.rem(done, jnp.int32(stages)) for stages in c.stages)
        streamed = pl.ds(tile * c.width, c.width)
        pl.when(done >= c.stages[0])(lambda: self.barriers["streamed_qk_free"].wait(slots[0]))
        self._streamed("streamed_qk", "neg_lse", n, slots[0], streamed)
        self._arrays(n, slots[0], streamed)
        if plan.kind.accumulates_qk:
            pl.when(done == self.block.done)(lambda: self._stationary("stationary_pv", "delta"))
        pl.when(done >= c.stages[1])(lambda: self.barriers["streamed_pv_free"].wait(slots[1]))
        self._streamed("streamed_pv", "delta" if plan.kind.accumulates_qk else None, n, slots[1], streamed)
        self._array_tiles(n, done, streamed)

    def _step_of_chunks(self, tile, n, done):
        plan, c = self.plan, self.plan.config
        slot = lax.rem(done, jnp.int32(c.stages[0]))
        positions = pl.ds(tile * c.width, c.width)
        for name, chunk in chunks.order(plan):
            tiles, smem = self._tiles(f"streamed_{name}"), self.scratch[f"streamed_{name}_smem"]
            ready, free = self.scratch[f"streamed_{name}_ready"], self.barriers[f"streamed_{name}_free"]
            copied, source = tiles.copied(smem), getattr(self.gmem, f"streamed_{name}")
            place = source, self.block.b, positions, self._streamed_head(n)
            if name == plan.in_ring:
                use, at = chunks.place_in_ring(plan, done, chunk)
                pl.when(use >= c.chunk_slots)(lambda free=free, at=at: free.wait(at))
                tiles.load_chunk(chunk, *place, copied.at[at, 0], ready.at[at])
                continue
            if chunk == 0:
                pl.when(done >= c.stages[0])(lambda free=free: free.wait(slot))
                self._beside(n, slot, positions)
                self._array_tiles(n, done, positions)
            tiles.load_chunk(chunk, *place, copied.at[slot, chunk], ready.at[slot * tiles.chunks + chunk])

    def _beside(self, n, slot, positions):
        """Loads row statistics and arrays of a step."""
        plan = self.plan
        statistics = ["neg_lse", *(["delta"] if plan.kind.accumulates_qk else [])] if plan.kind.keys_stationary else []
        for name in statistics:
            rows = getattr(self.gmem, name).at[self.block.b, n, positions]
            _copy(rows, self.scratch[f"{name}_smem"].at[slot], self.scratch["beside_ready"].at[slot])
        self._arrays(n, slot, positions, "beside_ready")

    def _streamed_head(self, n):
        return n if self.plan.kind.keys_stationary else lax.div(n, jnp.int32(self.plan.problem.group))

    def _stationary(self, name, statistic):
        tiles, slot_of, b, head = self._tiles(name), self.block.slot_of, self.block.b, self.block.head
        ready, copied = slot_of(self.scratch[f"{name}_ready"]), slot_of(tiles.copied(self.scratch[f"{name}_smem"]))
        in_memory = self.plan.head_in_memory(head)
        tiles.load(getattr(self.gmem, name), b, self.stationary, in_memory, copied, ready)
        if not self.plan.kind.keys_stationary:
            rows = getattr(self.gmem, statistic).at[b, head, self.stationary]
            _copy(rows, self.scratch[f"{statistic}_smem"].at[0], ready)

    def _streamed(self, name, statistic, n, slot, positions):
        plan, tiles, b = self.plan, self._tiles(name), self.block.b
        head = self._streamed_head(n)
        ready = self.scratch[f"{name}_ready"].at[slot]
        copied = tiles.copied(self.scratch[f"{name}_smem"])
        tiles.load(getattr(self.gmem, name), b, positions, head, copied.at[slot], ready)
        if plan.kind.keys_stationary and statistic:
            rows = getattr(self.gmem, statistic).at[b, n, positions]
            _copy(rows, self.scratch[f"{statistic}_smem"].at[slot], ready)

    def _tiles(self, name):
        return getattr(self.plan.tiles, name)

    def _arrays(self, n, slot, streamed, ready="streamed_qk_ready"):
        """Loads arrays with one value per position."""
        for a in self.plan.arrays.of_kind("row", "column"):
            array, smem = self.plan.arrays[a], self.scratch[f"array{a}_smem"].at[slot]
            place = streamed if array.kind == "row" else self.stationary
            _copy(self.gmem.arrays[a].at[(*array.index(self.block.b, n), place)], smem, self.scratch[ready].at[slot])

    def _array_tiles(self, n, done, streamed):
        """Loads tiles of arrays."""
        plan, block = self.plan, self.block
        if not plan.array_tiles:
            return
        slot = lax.rem(done, jnp.int32(plan.array_slots))
        pl.when(done >= plan.array_slots)(lambda: plgpu.barrier_wait(self.scratch["array_tiles_free"].at[slot]))
        for a in plan.array_tiles:
            array, smem = plan.arrays[a], self.scratch[f"array{a}_smem"].at[slot]
            for wg in range(plan.config.row_groups):
                place = array.place(pl.ds(block.start + wg * 64, 64), streamed)
                source = self.gmem.arrays[a].at[(*array.index(block.b, n), *place)]
                _copy(source, smem.at[wg], self.scratch["array_tiles_ready"].at[slot])


def _drain(plan: BackwardPlan, steps: Any, scratch: dict[str, Any]) -> None:
    """Waits until all slots of the rings are free: each completed phase of a barrier is to be waited for."""
    for slot in range(plan.array_slots if plan.array_tiles else 0):
        pl.when(slot < steps)(lambda slot=slot: plgpu.barrier_wait(scratch["array_tiles_free"].at[slot]))
    free = barriers(plan, scratch)
    for name, slots in zip(("qk", "pv"), plan.slots, strict=True):
        chunks_of = getattr(plan.tiles, f"streamed_{name}").chunks
        uses = steps * chunks_of if plan.chunked and name == plan.in_ring else steps
        for slot in range(slots):
            pl.when(slot < uses)(lambda name=name, slot=slot: free[f"streamed_{name}_free"].wait(slot))
