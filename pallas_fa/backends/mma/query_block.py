"""What the forward kernels do alike for a query block of one head: the key blocks it visits, masks' and scores' arrays."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu import schedule
from pallas_fa.backends.gpu.grid import Place
from pallas_fa.backends.gpu.layouts import PER_ROW
from pallas_fa.backends.gpu.online_softmax import SUM_COLUMNS
from pallas_fa.backends.gpu.schedule import Visits
from pallas_fa.backends.gpu.steps import Steps
from pallas_fa.backends.mma import arrays
from pallas_fa.backends.mma.cta import Cta
from pallas_fa.backends.mma.matmuls import Mma
from pallas_fa.masks.lengths import lengths_of


class QueryBlock:
    """A query block, for one warpgroup. Subclasses set `steps`.

    Args:
      plan: of a forward kernel.
      gmem: its device memory, with `arrays` and `visit_table`.
      scratch: its shared memory, by name.
      cta: the CTA.
      at: where the CTA works.
      number: of the query block in its head.
      wgs: as of `arrays.load`.
    """

    steps: Steps

    def __init__(
        self, plan: Any, gmem: Any, scratch: dict[str, Any], cta: Cta, at: Place, number: Any, wgs: int | None
    ):
        self.plan, self.gmem, self.scratch, self.cta = plan, gmem, scratch, cta
        self.mma, self.wgs = Mma(plan.problem.dtype, plan.interpret), wgs
        self.b, self.n, self.block = at.b, at.head, number
        self.kv_head = lax.div(at.head, jnp.int32(plan.problem.group))
        self.t0 = number * plan.config.block_q + cta.wg * plan.config.rows
        self.scalars = plan.arrays.scalars(gmem.arrays, at.b, at.head)

    def visits(self) -> Visits:
        """Returns the visits of a block whose mask has no lists."""
        plan, table = self.plan, self.gmem.visit_table
        if plan.visit_table:
            return schedule.in_table(table, self.b, self.n, self.block)
        dims, c = plan.problem.dims, plan.config
        _, mask = plan.arrays.with_scalars(self.scalars)
        t0 = self.block * c.block_q
        queries = (0, dims.T) if plan.scalar_visits else (t0, jnp.minimum(t0 + c.block_q, dims.T))
        return schedule.visits_of_queries(mask, queries, dims.S, c.block_kv)

    def nothing_yet(self, rows: int) -> tuple[Any, Any, Any]:
        """Returns the carry of the mainloop before its first step: accumulator, maxima, partial row sums."""
        start = -jnp.inf if self.plan.subtract_max else 0.0
        return (
            self.mma.accumulator(rows, self.plan.tiles.v.padded_dim),
            plgpu.layout_cast(jnp.full((rows,), start, jnp.float32), PER_ROW),
            self.mma.zeros(rows, SUM_COLUMNS),
        )

    def first_key(self, i: Any) -> Any:
        """Returns the first key of step i."""
        return self.steps.key_block(i) * self.plan.config.block_kv

    def key_length(self) -> Any:
        """Past it are zeros in shared memory, and whatever the caller left there in device memory; None: all are there."""
        if not self.plan.zeroes_padding:
            return None
        _, mask = self.plan.arrays.with_scalars(self.scalars)
        return jnp.minimum(lengths_of(mask).kv_lengths, self.plan.problem.dims.S)

    def load_array(self, a: int, s0: Any, smem: Any) -> None:
        """Starts copying the part of array number `a` for queries from `t0` on and keys from `s0` on."""
        array, gmem = self.plan.arrays[a], self.gmem.arrays[a]
        gmem = gmem.at[array.index(self.b, self.n)]
        arrays.load(self.cta.copies, array, gmem, self.t0, s0, smem, self.wgs)
