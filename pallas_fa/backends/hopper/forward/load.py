"""The load warpgroup of the forward kernel: a warp for queries, keys and arrays, and one for values."""

import functools
from collections.abc import Callable
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.hopper import pages
from pallas_fa.backends.hopper.forward import by_tickets, work
from pallas_fa.backends.hopper.forward.plan import ForwardPlan


def load(plan: ForwardPlan, gmem: Any, scratch: dict[str, Any]) -> None:
    """Loads all that the CTA needs; called by the load warpgroup.

    Keys need not wait for the slot of the values before, and the boxes of pages are issued by two warps (evidence:
    decode/boxes-of-pages).
    """

    @plgpu.warp_map
    def _(warp):
        for number, role in enumerate((Keys, Values)):
            pl.when(warp == number)(lambda role=role: role.run(plan, gmem, scratch))


class Load:
    """What one warp, or the load warpgroup, loads for one query block."""

    caller: by_tickets.Caller

    def __init__(self, plan: ForwardPlan, gmem: Any, scratch: dict[str, Any], block: work.QueryBlock):
        self.plan, self.block, self.gmem, self.scratch = plan, block, gmem, scratch
        self.kv_head = lax.div(block.n, plan.problem.group)

    @classmethod
    def run(cls, plan: ForwardPlan, gmem: Any, scratch: dict[str, Any]) -> None:
        """Loads for all query blocks."""
        of_block = lambda block: cls(plan, gmem, scratch, block).of_block()
        cls.drain(plan, scratch, *work.for_blocks(plan, gmem, scratch, of_block, cls.caller))

    def of_block(self) -> tuple[Any, Any]:
        """Returns (steps, steps that use streamed arrays)."""
        plan, block = self.plan, self.block
        steps = work.steps_of(plan, block, self.gmem)
        self.before_steps()

        @pl.loop(0, steps.end)
        def _(i):
            keys = self.rows_of_keys(steps, i)
            self.of_step(steps, i, keys, self.places(keys))  # before any wait, which hides the latency of the table

        return steps.end, work.array_steps(plan, steps, steps.end)

    def before_steps(self) -> None:
        """Loads what the block needs once, where its slots are free."""

    def of_step(self, steps: Any, i: Any, keys: Any, at: Any) -> None:
        """Loads for step i. `keys`: the rows of its key block; `at`: their `places`."""
        raise NotImplementedError

    @staticmethod
    def drain(plan: ForwardPlan, scratch: dict[str, Any], done: Any, arrays_done: Any) -> None:
        """Waits for every completed phase of a barrier that no step waited for: each must be, before the CTA ends."""
        raise NotImplementedError

    def announce_values(self, i: Any, announce: Callable[[Any], None]) -> None:
        """Calls `announce` with the barrier that says that the values of step i have come."""
        scratch, (_, slot) = self.scratch, self.slot(i)
        if not self.plan.zeroes_padding:
            announce(scratch["v_ready"].at[slot])
            return
        # If a key block reaches past the key length, it is the first. It is ready once its padding is zeroed.
        pl.when(i == 0)(lambda: announce(scratch["v_loaded"].at[slot]))
        pl.when(i > 0)(lambda: announce(scratch["v_ready"].at[slot]))

    def slot(self, i: Any) -> tuple[Any, Any]:
        """Returns (the steps before step i of all query blocks, the slot that it takes of a ring)."""
        step = self.block.done + i
        return step, lax.rem(step, self.plan.config.stages)

    def rows_of_keys(self, steps: Any, i: Any) -> Any:
        """Returns the rows of the key block of step i."""
        block_kv = self.plan.config.block_kv
        return pl.ds(self.block.s0 + steps.key_block(i) * block_kv, block_kv)

    def places(self, rows: Any) -> Any:
        """Returns the boxes of these rows in pages; None where keys and values are arrays."""
        held = self.plan.problem.pages
        return None if held is None else pages.places(held, self.gmem.page_table, self.block.b, rows)

    def load_rows(
        self, name: str, tiles: Any, rows: Any, at: Any, copied: Any, ready: Any, column_part: Any = 0
    ) -> None:
        """Starts copying rows of keys ("k") or values ("v"), or the boxes `at`, into a tile.

        The other arguments are those of `pages.load`.
        """
        held, gmem = self.plan.problem.pages, getattr(self.gmem, name)
        if held is None:
            tiles.load(gmem, self.block.b, rows, self.kv_head, copied, ready, column_part)
            return
        head = self.kv_head if held.interleaved is None else 2 * self.kv_head + int(name == "v")
        pages.load(tiles, held, gmem, at, head, copied, ready, column_part)


class Keys(Load):
    """The queries, then keys and arrays of every step."""

    caller = "keys"

    def before_steps(self) -> None:
        if not self.plan.several_blocks:
            self._queries()

    def of_step(self, steps: Any, i: Any, keys: Any, at: Any) -> None:
        self._keys(i, keys, at)
        self.beside_keys(steps, i, keys)

    def beside_keys(self, steps: Any, i: Any, keys: Any) -> None:
        """Loads what follows the keys of step i: arrays, and before the first step the next queries."""
        plan = self.plan
        if plan.several_blocks:  # after the first keys, which need not wait for the end of the block before
            pl.when(i == 0)(self._queries)
        if plan.arrays.streamed and plan.score_streams:
            self._arrays(steps, i, keys)
        elif plan.arrays.streamed:
            pl.when(steps.is_boundary(i))(lambda: self._arrays(steps, i, keys))

    @staticmethod
    def drain(plan: ForwardPlan, scratch: dict[str, Any], done: Any, arrays_done: Any) -> None:
        drain(plan, done, scratch["k_free"], plan.k_pieces)
        if plan.arrays.streamed:
            drain(plan, arrays_done, scratch["arrays_free"])
        if plan.several_blocks:
            for wg in range(plan.config.compute_wgs):
                plgpu.barrier_wait(scratch["q_free"].at[wg])

    def _keys(self, i, keys, at):
        plan, free, ready = self.plan, self.scratch["k_free"], self.scratch["k_ready"]
        tiles, (step, slot) = plan.tiles.k, self.slot(i)
        copied = tiles.copied(self.scratch["k_smem"]).at[slot]

        @functools.cache  # a tile in one piece, or of several pages, asks for it several times
        def ready_once_free(chunk):
            barrier = slot * plan.k_pieces + (chunk if plan.k_pieces > 1 else 0)
            wait_free(plan, step, barrier, free)
            return ready.at[barrier]

        of_chunk = ready_once_free if plan.k_pieces > 1 else ready_once_free(0)
        self.load_rows("k", tiles, keys, at, copied, of_chunk)

    def _queries(self):
        plan, block = self.plan, self.block
        copied = plan.tiles.q.copied(self.scratch["q_smem"])
        for wg in range(plan.config.compute_wgs):
            rows, ready = self._rows(wg), self.scratch["q_ready"]
            if plan.several_blocks:
                ready = ready.at[wg]
                free = self.scratch["q_free"].at[wg]
                pl.when(block.done > 0)(functools.partial(plgpu.barrier_wait, free))
            plan.tiles.q.load(self.gmem.q, block.b, rows, block.n, copied.at[wg], ready)
            for a in plan.arrays.of_kind("column"):
                source = self.gmem.arrays[a].at[(*plan.arrays[a].index(block.b, block.n), rows)]
                plgpu.copy_gmem_to_smem(source, self.scratch[f"array{a}_smem"].at[wg], ready)

    def _rows(self, wg):
        # For front padding other rows are loaded: the barriers count on it.
        return pl.ds(self.plan.blocks.present(self.block.t0 + wg * 64), 64)

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


class Values(Load):
    """The values of every step."""

    caller = "values"

    def of_step(self, steps: Any, i: Any, keys: Any, at: Any) -> None:
        step, slot = self.slot(i)
        wait_free(self.plan, step, slot, self.scratch["v_free"])
        self.announce_values(i, functools.partial(self._values, keys, at, slot))

    @staticmethod
    def drain(plan: ForwardPlan, scratch: dict[str, Any], done: Any, arrays_done: Any) -> None:
        drain(plan, done, scratch["v_free"])

    def _values(self, keys, at, slot, ready):
        for part in self.plan.value_rows:
            rows = pl.ds(keys.start + part.first, part.count)
            copied = part.tiles.copied(self.scratch[f"{part.name}_smem"]).at[slot]
            self.load_rows("v", part.tiles, rows, at, copied, ready, self.block.column_part)


def wait_free(plan, step, slot, free):
    """Waits until all compute warpgroups have released a ring's slot, which is to be loaded again."""
    pl.when(step >= plan.config.stages)(lambda: plgpu.barrier_wait(free.at[slot]))


def drain(plan: ForwardPlan, done: Any, free: Any, pieces: int = 1) -> None:
    """Waits for every completed phase of the barriers of a ring that no step waited for: each must be, before the CTA ends.

    `done`: steps that used the ring. `pieces`: barriers of a slot.
    """
    for i in range(plan.config.stages * pieces):
        pl.when(i // pieces < done)(lambda i=i: plgpu.barrier_wait(free.at[i]))
