"""What a compute warpgroup of the backward kernel works with."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.dropout import HeadDropout
from pallas_fa.backends.gpu.registers import opaque
from pallas_fa.backends.gpu.schedule import Visits
from pallas_fa.backends.hopper.backward.gmem import Refs
from pallas_fa.backends.hopper.backward.plan import BackwardPlan
from pallas_fa.backends.hopper.backward.scratch import barriers
from pallas_fa.backends.hopper.backward.work import Block
from pallas_fa.backends.hopper.ping_pong import PingPong
from pallas_fa.backends.hopper.wgmma import Wgmma

OF_DV, OF_DK = 0, 1  # the warpgroups of `by_gradient`


class Slots(NamedTuple):
    """The slots of one tile in the two rings of streamed operands, and in that of tiles of arrays."""

    qk: Any
    pv: Any
    arrays: Any


class Accumulators(NamedTuple):
    """Accumulators of the gradients of the stationary operands, one for each chunk; empty where not given."""

    qk: tuple[Any, ...]
    pv: tuple[Any, ...]


class Warpgroup:
    """Warpgroup `wg` of a CTA: its plan, its block, and the operands in shared memory by role.

    `gives`: the operands ("qk", "pv") whose gradients it adds up.
    """

    def __init__(self, plan: BackwardPlan, block: Block, wg: Any, gmem: Refs, scratch: dict[str, Any]):
        self.plan, self.block, self.wg, self.gmem, self.scratch = plan, block, wg, gmem, scratch
        self.wgmma = Wgmma(plan.interpret, plan.tiles.stationary_qk.parts, plan.statistics_last)
        self.barriers = barriers(plan, scratch)
        self.ping_pong = PingPong.of(self.barriers, wg)
        # Which rows of the block it has, and which part of the columns of a gradient.
        self.row_group, self.column_part = (0, wg) if plan.chunked else (wg, 0)
        given = dict(qk=plan.kind.accumulates_qk, pv=plan.kind.accumulates_pv)
        self.gives = tuple(name for name, is_given in given.items() if is_given)
        if plan.by_gradient:
            self.row_group, self.gives = 0, {OF_DV: ("pv",), OF_DK: ("qk",)}[wg]
        self.rows = pl.ds(self.row_group * 64, 64)
        matrix = lambda name: getattr(plan.tiles, name).matrix(scratch[f"{name}_smem"])
        self.stationary_qk = block.slot_of(matrix("stationary_qk"))
        self.streamed_qk, self.streamed_pv = matrix("streamed_qk"), matrix("streamed_pv")
        # Where the pass does not read it, and the tiles are alike, it shares memory with the other.
        self.stationary_pv_name = "stationary_pv" if "stationary_pv_smem" in scratch else "stationary_qk"
        self.stationary_pv = block.slot_of(matrix(self.stationary_pv_name))
        # Of a block's only query head they are read here, while its operands are loaded.
        self._scalars = self._load_scalars(block.head) if self._has_one_head else None
        self._visits = self._load_visits(block.head) if self._has_one_head and not plan.visits.known else None

    @property
    def qk_scale(self) -> Any:
        """What the sums of dQ and dK are multiplied by, loaded anew: it need not stay in a register across loops."""
        scale = self.plan.qk_scale
        return self.gmem.ds_factors[1] * scale if self.plan.scales_ds else scale

    def chunks_of_stationary(self, name: str, rows: Any = slice(None)) -> list[Any]:
        """Returns the rows of the chunks of a stationary operand, "qk" or "pv"."""
        smem = getattr(self, f"stationary_{name}")
        return [smem.at[i, rows] for i in range(smem.shape[0])]

    def first_chunk(self, accs: Any) -> Any:
        """Returns the first of the chunks whose gradients are `accs`."""
        return self.column_part * len(accs)

    @property
    def start(self) -> Any:
        """This warpgroup's first stationary position."""
        return self.block.start + self.row_group * 64

    def slots(self, done: Any) -> Slots:
        """Returns the slots of the tile of step `done`."""
        counts = *self.plan.config.stages, self.plan.array_slots
        slots = (lax.rem(done, jnp.int32(count)) for count in counts)
        return Slots(*(opaque(x, self.plan.interpret) if self.plan.makes_descriptors_anew else x for x in slots))

    def wait_for_qk(self, slots: Slots) -> None:
        """Waits for the tile of `streamed_qk`, its row statistics and arrays."""
        plgpu.barrier_wait(self.scratch["streamed_qk_ready"].at[slots.qk])

    def wait_for_pv(self, slots: Slots) -> None:
        """Waits for the tile of `streamed_pv` and its row statistics."""
        plgpu.barrier_wait(self.scratch["streamed_pv_ready"].at[slots.pv])

    def release_qk(self, slots: Slots) -> None:
        """Says that this warpgroup reads the tile of `streamed_qk` no more."""
        self.barriers["streamed_qk_free"].arrive(slots.qk)

    def release_pv(self, slots: Slots) -> None:
        """Says that this warpgroup reads the tile of `streamed_pv` no more."""
        self.barriers["streamed_pv_free"].arrive(slots.pv)

    def wait_for_array_tiles(self, slots: Slots) -> None:
        """Waits for the step's tiles of arrays."""
        if self.plan.array_tiles:
            plgpu.barrier_wait(self.scratch["array_tiles_ready"].at[slots.arrays])

    def release_array_tiles(self, slots: Slots) -> None:
        """Says that this warpgroup has them in registers."""
        if self.plan.array_tiles:
            plgpu.commit_smem()  # read by ordinary loads: order them before the next TMA write
            plgpu.barrier_arrive(self.scratch["array_tiles_free"].at[slots.arrays])

    def words(self, n: Any, tile: Any) -> dict[int, Any]:
        """Returns the arrays that have a word for each tile, by number."""
        return self.plan.arrays.words(self.gmem.arrays, self.block.b, n, self.block.number, tile)

    def dropout(self, n: Any) -> HeadDropout | None:
        """Returns the dropout of query head n; None where there is none."""
        dropout = self.plan.problem.dropout
        return dropout and HeadDropout.load(dropout, self.gmem.dropout, self.block.b, n, self.plan.interpret)

    def memory_of_draw(self, done: Any) -> Any:
        """Returns that of step `done` (see `HeadDropout.draw`); with one for all steps, ptxas spills registers."""
        return self.scratch["kept_smem"].at[lax.rem(done, jnp.int32(2)), self.wg]

    @property
    def _has_one_head(self):
        return self.plan.group == 1

    def visits(self, n: Any) -> tuple[tuple[Any, Any], Visits]:
        """Returns the tiles [first, last) that the block visits for query head n, and the visits of this warpgroup."""
        return self._load_visits(n) if self._visits is None else self._visits

    def _load_visits(self, n):
        visits, block, table = self.plan.visits, self.block, self.gmem.visit_table
        part = self.wg if visits.parts > 1 else 0
        of_block = visits.of_block(table, block.b, n, block.number)
        return of_block, visits.of_part(table, block.b, n, block.number, part)

    def scalars(self, n: Any) -> dict[int, Any]:
        """Returns the arrays without positions, by number, for query head n."""
        return self._load_scalars(n) if self._scalars is None else self._scalars

    def _load_scalars(self, n):
        arrays = self.plan.arrays
        return {i: self.gmem.arrays[i][arrays[i].index(self.block.b, n)] for i in arrays.of_kind("scalar")}


def on_first_part(w: Warpgroup, body: Any) -> None:
    """Calls body() in one of the warpgroups that hold the same positions."""
    if w.plan.column_parts > 1:
        pl.when(w.column_part == 0)(body)
    else:
        body()
