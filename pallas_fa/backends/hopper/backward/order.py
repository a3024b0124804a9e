"""The order in which CTAs visit heads and tiles."""

import dataclasses
import functools

from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.backward_pass import Pass
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.grid import Grid, largest_divisor
from pallas_fa.backends.gpu.score_gradients import ScoreGradients
from pallas_fa.backends.gpu.streamed_visits import StreamedVisits
from pallas_fa.backends.hopper.config import BackwardConfig
from pallas_fa.problem import Problem


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of one pass, from what its plan holds."""

    problem: Problem
    kind: Pass
    config: BackwardConfig
    arrays: KernelArrays
    score_gradients: ScoreGradients
    visits: StreamedVisits
    gpu: Gpu

    @property
    def heads(self) -> int:
        """Stationary heads of one batch entry."""
        return self.problem.K if self.kind.keys_stationary else self.problem.dims.N

    @functools.cached_property
    def grid(self) -> Grid:
        """The CTAs of the kernel."""
        batch, group = self.problem.dims.B, 1
        if self.problem.mask is not None and not self.persistent:
            at_most = self._heads_at_once if self.by_tile else self.config.l2_head_group
            group = largest_divisor(batch * self.heads, at_most)
        return Grid(batch, self.heads, self.visits.blocks, group)

    @property
    def persistent(self) -> bool:
        """Whether a CTA may process several blocks: those whose numbers in `grid` are its own plus multiples of `ctas`."""
        holds_keys = self.kind.keys_stationary and self.kind.accumulates_qk
        return self.config.persistent_ctas > 0 and holds_keys and not self.config.chunk_slots

    @property
    def ctas(self) -> int:
        """CTAs of the kernel."""
        return min(self.config.persistent_ctas, self.grid.ctas) if self.persistent else self.grid.ctas

    @property
    def _heads_at_once(self) -> int:
        """Heads whose CTAs fill the GPU once."""
        return max(1, self.gpu.multiprocessors // self.visits.blocks)

    @functools.cached_property
    def by_tile(self) -> bool:
        """Whether CTAs process the query heads of a tile before the next tile (see `work.for_steps`).

        Head groups must fill the GPU once, not twice. What depends on the head alone would be loaded again in each step,
        so there must be nothing of the kind.
        """
        problem = self.problem
        of_group = self.kind.fused and problem.group > 1 and problem.mask is not None
        heads, at_once = problem.dims.B * self.heads, self._heads_at_once
        fills = at_once > 1 and (heads <= at_once or heads % at_once == 0)
        per_head = self.score_gradients.summed or self.arrays.of_kind("scalar")
        of_group = of_group and not self.persistent
        return self.config.by_tile and of_group and fills and not per_head and self.visits.known is not None

    @property
    def stagger(self) -> int:
        """How many tiles further on each CTA starts than the one before; after the last tile it goes on at the first.

        Not with a bias of [T, S] (evidence: backward/stagger).
        """
        applies = self.kind.fused and self.visits.all_full and not self.arrays.of_kind("tile")
        return self.config.stagger if applies else 0

    @property
    def store_warps(self) -> int:
        """Warps that store tiles of dQ; `first_store` says why one where CTAs differ in the order of tiles."""
        single = self.by_tile or self.stagger or self.visits.listed or self.persistent
        return 1 if single else self.config.store_warps
