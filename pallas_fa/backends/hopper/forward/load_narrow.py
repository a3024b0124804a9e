"""The load warpgroup where keys and values have 8 bits: it loads them, converts them, and hands them on as others are."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper.forward import work
from pallas_fa.backends.hopper.forward.convert import convert
from pallas_fa.backends.hopper.forward.load import Keys, drain, wait_free

_WARPS = 4  # of a warpgroup, which share the boxes of a tile


class NarrowLoad(Keys):
    """The queries, then keys, arrays and values of every step.

    Tiles of 8 bits lie in rings of their own, from which only this warpgroup reads. Keys come a step before values: their
    slot is free earlier.
    """

    def of_block(self) -> tuple[Any, Any]:
        """Returns what `Load.of_block` does."""
        plan, block = self.plan, self.block
        steps = work.steps_of(plan, block, self.gmem)
        self.before_steps()

        @pl.loop(0, jnp.minimum(plan.config.stages, steps.end))
        def _(i):
            rows = self.rows_of_keys(steps, i)
            for name in "kv":
                self._start(name, i, rows, self.places(rows))

        @pl.loop(0, steps.end + 1)
        def _(i):
            pl.when(i < steps.end)(lambda: self._keys_of_step(steps, i))
            pl.when(i > 0)(lambda: self._convert("v", steps, i - 1))

        return steps.end, work.array_steps(plan, steps, steps.end)

    @staticmethod
    def drain(plan: Any, scratch: dict[str, Any], done: Any, arrays_done: Any) -> None:
        Keys.drain(plan, scratch, done, arrays_done)
        drain(plan, done, scratch["v_free"])

    def _keys_of_step(self, steps, i):
        self._convert("k", steps, i)
        self.beside_keys(steps, i, self.rows_of_keys(steps, i))

    def _start(self, name, i, rows, at):
        """Starts loading a tile of 8 bits of step i, whose slot nothing reads any more."""
        plan, scratch = self.plan, self.scratch
        tiles, (_, slot) = plan.narrow_tiles[name], self.slot(i)
        copied, ready = tiles.copied(scratch[f"{name}_narrow_smem"]).at[slot], scratch[f"{name}_narrow_ready"].at[slot]
        column_part = self.block.column_part if name == "v" else 0
        load = lambda at: self.load_rows(name, tiles, rows, at, copied, ready, column_part)
        if self.plan.boxes == 1:
            load(at)
            return

        @plgpu.warp_map
        def _(warp):
            for number in range(_WARPS):
                pl.when(warp == number)(lambda number=number: load(at[number::_WARPS]))

    def _convert(self, name, steps, i):
        """Converts the tile of step i, announces it, and starts loading that of the step that takes its slot."""
        plan, scratch, (step, slot) = self.plan, self.scratch, self.slot(i)
        later = i + plan.config.stages
        # Before the waits, which hide the latency of the table of pages.
        rows = self.rows_of_keys(steps, jnp.minimum(later, steps.end - 1))
        at = self.places(rows)
        narrow, tiles = plan.narrow_tiles[name], getattr(plan.tiles, name)
        plgpu.barrier_wait(scratch[f"{name}_narrow_ready"].at[slot])
        wait_free(plan, step, slot, scratch[f"{name}_free"])
        source = narrow.matrix(scratch[f"{name}_narrow_smem"]).at[slot, 0]
        target = tiles.matrix(scratch[f"{name}_smem"]).at[slot]
        for chunk in range(tiles.chunks):
            first = chunk * tiles.chunk
            convert(source, target.at[chunk], first, narrow.swizzled, tiles.swizzled, plan.interpret)
        plgpu.commit_smem()  # what is written is seen by tensor cores, and all has been read
        if name == "v":
            self.announce_values(i, plgpu.barrier_arrive)
        else:
            plgpu.barrier_arrive(scratch["k_ready"].at[slot])
        pl.when(later < steps.end)(lambda: self._start(name, later, rows, at))
