"""The load warpgroup of the forward kernel: queries once for a block, then keys, arrays and values of every step."""

import functools
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper import pages
from pallas_fa.backends.hopper.forward import work
from pallas_fa.backends.hopper.forward.plan import ForwardPlan


class Load:
    """Loads all that one query block needs."""

    def __init__(self, plan: ForwardPlan, block: work.QueryBlock, gmem: Any, scratch: dict[str, Any]):
        self.plan, self.block, self.gmem, self.scratch = plan, block, gmem, scratch
        self.kv_head = lax.div(block.n, plan.problem.group)
        tiles = {"q": plan.tiles.q, "k": plan.tiles.k} | {part.name: part.tiles for part in plan.value_rows}
        self.smem = {name: of_name.copied(scratch[f"{name}_smem"]) for name, of_name in tiles.items()}

    def run(self) -> tuple[Any, Any]:
        """Returns (steps, steps that use streamed arrays)."""
        plan, block = self.plan, self.block
        if not plan.several_blocks:
            self._queries()
        steps = work.steps_of(plan, block, self.gmem)
        if plan.wide:
            pl.loop(0, steps.end + 1)(functools.partial(self._step_of_pieces, steps))
        else:
            pl.loop(0, steps.end)(functools.partial(self._step, steps))
        return steps.end, work.array_steps(plan, steps, steps.end)

    def _step(self, steps, i):
        keys, at = self._rows_of_keys(steps, i)
        self._keys(i, keys, at)
        self._arrays_of_step(steps, i, keys)
        self._values(i, keys, at)

    def _step_of_pieces(self, steps, i):
        """Keys of step i, before the values of the step before, which are used, and released, later than these keys."""
        before = i - 1
        pl.when(i < steps.end)(lambda: self._keys(i, *self._rows_of_keys(steps, i)))
        pl.when(i > 0)(lambda: self._values(before, *self._rows_of_keys(steps, before)))
        # After these values: what is computed before it releases arrays may wait for them.
        pl.when(i < steps.end)(lambda: self._arrays_of_step(steps, i, self._rows_of_keys(steps, i)[0]))

    def _slot(self, i):
        step = self.block.done + i
        return step, lax.rem(step, self.plan.config.stages)

    def _rows_of_keys(self, steps, i):
        """Returns (rows of the key block of step i, where they lie in pages)."""
        block_kv = self.plan.config.block_kv
        keys = pl.ds(self.block.s0 + steps.key_block(i) * block_kv, block_kv)
        return keys, self._pages(keys)  # before the wait, so that it hides the latency of the table

    def _keys(self, i, keys, at):
        plan, scratch = self.plan, self.scratch
        step, slot = self._slot(i)
        if plan.k_pieces == 1:
            wait_free(plan, step, slot, scratch["k_free"])
            self._keys_or_values("k", keys, at, slot, scratch["k_ready"].at[slot])
        else:

            @functools.cache  # a tile of several pages asks for it several times
            def ready(piece):
                wait_free(plan, step, slot * plan.k_pieces + piece, scratch["k_free"])
                return scratch["k_ready"].at[slot * plan.k_pieces + piece]

            self._keys_or_values("k", keys, at, slot, ready)
        if plan.several_blocks:  # after the first keys, which need not wait for the end of the block before
            pl.when(i == 0)(self._next_queries)

    def _arrays_of_step(self, steps, i, keys):
        plan = self.plan
        if plan.arrays.streamed and plan.score_streams:
            self._arrays(steps, i, keys)
        elif plan.arrays.streamed:
            pl.when(steps.is_boundary(i))(lambda: self._arrays(steps, i, keys))

    def _values(self, i, keys, at):
        plan, scratch = self.plan, self.scratch
        step, slot = self._slot(i)
        wait_free(plan, step, slot, scratch["v_free"])
        load_v = functools.partial(self._keys_or_values, "v", keys, at, slot)
        if not plan.zeroes_padding:
            load_v(scratch["v_ready"].at[slot])
            return
        # If a key block reaches past the key length, it is the first. It is ready once its padding is zeroed.
        pl.when(i == 0)(lambda: load_v(scratch["v_loaded"]))
        pl.when(i > 0)(lambda: load_v(scratch["v_ready"].at[slot]))

    def _pages(self, rows):
        """Returns where these rows lie in pages; None where keys and values are arrays."""
        held = self.plan.problem.pages
        return None if held is None else pages.places(held, self.gmem.page_table, self.block.b, rows)

    def _keys_or_values(self, name, rows, at, slot, ready):
        tiles, gmem, smem = getattr(self.plan.tiles, name), getattr(self.gmem, name), self.smem[name].at[slot]
        held, column_part = self.plan.problem.pages, self.block.column_part if name == "v" else 0
        if held is None and name == "v":
            for part in self.plan.value_rows:
                there = pl.ds(rows.start + part.first, part.count)
                smem = self.smem[part.name].at[slot]
                part.tiles.load(gmem, self.block.b, there, self.kv_head, smem, ready, column_part)
            return
        if held is None:
            tiles.load(gmem, self.block.b, rows, self.kv_head, smem, ready, column_part)
            return
        head = self.kv_head if held.interleaved is None else 2 * self.kv_head + int(name == "v")
        pages.load(tiles, held, gmem, at, head, smem, ready, column_part)

    def _queries(self):
        plan, block = self.plan, self.block
        q_smem, ready = self.smem["q"], self.scratch["q_ready"]
        for wg in range(plan.config.compute_wgs):
            rows = self._rows(wg)
            plan.tiles.q.load(self.gmem.q, block.b, rows, block.n, q_smem.at[wg], ready)
            for a in plan.arrays.of_kind("column"):
                source = self.gmem.arrays[a].at[(*plan.arrays[a].index(block.b, block.n), rows)]
                plgpu.copy_gmem_to_smem(source, self.scratch[f"array{a}_smem"].at[wg], ready)

    def _rows(self, wg):
        # For front padding other rows are loaded: the barriers count on it.
        return pl.ds(self.plan.blocks.present(self.block.t0 + wg * 64), 64)

    def _next_queries(self):
        pl.when(self.block.done > 0)(lambda: plgpu.barrier_wait(self.scratch["q_free"]))
        self._queries()

    def _arrays(self, steps, i, keys):
        """Loads the rows and tiles of arrays for step i."""
        plan, block, c = self.plan, self.block, self.plan.config
        step = block.arrays_done + work.array_steps(plan, steps, i)
        slot = lax.rem(step, c.stages)
        wait_free(plan, step, slot, self.scratch["arrays_free"])
        ready = self.scratch["arrays_ready"].at[slot]
        for a in plan.arrays.streamed:
            smem, lead = self.scratch[f"array{a}_smem"].at[slot], plan.arrays[a].index(block.b, block.n)
            if plan.arrays[a].kind == "row":
                row = plan.arrays[a].place_in(smem, c.block_kv)
                plgpu.copy_gmem_to_smem(self.gmem.arrays[a].at[(*lead, keys)], row, ready)
                continue
            for wg in range(c.compute_wgs):
                place = plan.arrays[a].place(self._rows(wg), keys)
                plgpu.copy_gmem_to_smem(self.gmem.arrays[a].at[(*lead, *place)], smem.at[wg], ready)


def wait_free(plan: ForwardPlan, step: Any, slot: Any, free: Any) -> None:
    """Waits until all compute warpgroups have released a ring's slot, which is to be loaded again."""
    pl.when(step >= plan.config.stages)(lambda: plgpu.barrier_wait(free.at[slot]))


def drain(plan: ForwardPlan, done: Any, arrays_done: Any, scratch: dict[str, Any]) -> None:
    """Waits for every completed phase of a barrier that no step waited for: each must be, before the CTA ends."""
    rings = [("k_free", done, plan.k_pieces), ("v_free", done, 1)]
    rings += [("arrays_free", arrays_done, 1)] if plan.arrays.streamed else []
    for name, count, pieces in rings:
        for i in range(plan.config.stages * pieces):
            pl.when(i // pieces < count)(lambda name=name, i=i: plgpu.barrier_wait(scratch[name].at[i]))
    if plan.several_blocks:
        plgpu.barrier_wait(scratch["q_free"])
