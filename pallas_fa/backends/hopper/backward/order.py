"""The order in which CTAs visit heads and tiles."""

import dataclasses
import functools

import jax.numpy as jnp

from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.gradient_pass import GradientPass
from pallas_fa.backends.gpu.grid import Grid, largest_divisor
from pallas_fa.backends.gpu.score_gradients import ScoreGradients
from pallas_fa.backends.gpu.streamed_visits import StreamedVisits
from pallas_fa.backends.hopper.config import BackwardConfig
from pallas_fa.problem import Problem

_L2_HOLDS = 32 * 2**20  # bytes of sums that the L2 cache holds beside what kernels load


@dataclasses.dataclass(frozen=True)
class Order:
    """The order of one pass, from what its plan holds. `heads`: stationary heads of one batch entry."""

    problem: Problem
    heads: int
    kind: GradientPass
    config: BackwardConfig
    arrays: KernelArrays
    score_gradients: ScoreGradients
    visits: StreamedVisits
    gpu: Gpu

    @functools.cached_property
    def grid(self) -> Grid:
        """The CTAs of the kernel."""
        batch, group = self.problem.dims.B, 1
        if self.ordered_sums:
            return Grid(batch, self.heads, self.visits.blocks, batch, by_head=True)
        if self.problem.mask is not None and not self._in_turn:
            group = largest_divisor(batch * self.heads, self.config.l2_head_group)
        return Grid(batch, self.heads, self.visits.blocks, group, lead=self._lead)

    @property
    def _lead(self) -> int:
        """CTAs of each head that start before all others under a block mask: together they fill the GPU once.

        The first keys may be seen by all queries, as sinks are, where others are seen by few (evidence:
        forward/visit-lists).
        """
        if not self.visits.listed or self._in_turn:
            return 0
        return min(self.visits.blocks, max(1, self.gpu.multiprocessors // (self.problem.dims.B * self.heads)))

    @functools.cached_property
    def ordered_sums(self) -> tuple[int, ...]:
        """The numbers of the arrays whose gradients are sums over batch entries that L2 does not hold.

        The CTAs that add to the same tile run at the same time, so that it is still in L2, and the first of them stores
        it, so that nothing is zeroed before (evidence: backward/bias-gradient). No CTAs wait for each other in a circle:
        all visit the tiles in one order, and one warp of each claims their tiles.
        """
        shared = [i for i in self.score_gradients.added if not self.arrays[i].batched and not self.is_stored(i)]
        dims = self.problem.dims
        heads = sum(dims.N if self.arrays[i].per_head else 1 for i in shared)
        in_one_order = self.kind.fused and self.problem.mask is None and not any(self.arrays[i].skewed for i in shared)
        large = 4 * heads * dims.T * dims.S > _L2_HOLDS
        return tuple(shared) if dims.B > 1 and in_one_order and large and not self.persistent else ()

    def is_stored(self, i: int) -> bool:
        """Whether the tiles of the gradient of array i are stored as they are, turned and rounded once.

        No two CTAs have anything for the same tile then. TMA stores rows in eights. With float16's factors of dS, sums stay
        float32.
        """
        array, dims = self.arrays[i], self.problem.dims
        is_shared = (dims.B > 1 and not array.batched) or (dims.N > 1 and not array.per_head)
        scales_ds = self.problem.dtype == jnp.float16
        in_eights = dims.T % 8 == 0
        return i in self.score_gradients.added and array.turned and in_eights and not is_shared and not scales_ds

    @property
    def persistent(self) -> bool:
        """Whether a CTA may process several blocks, one after the other."""
        holds_keys = self.kind.keys_stationary and self.kind.accumulates_qk
        return self.config.persistent_ctas > 0 and holds_keys and not self.config.chunk_slots

    @property
    def by_tickets(self) -> bool:
        """Whether each is the first that no CTA has begun (see `tickets`); else blocks are dealt out in turn."""
        return self.persistent and self.config.by_tickets

    @property
    def _in_turn(self) -> bool:
        return self.persistent and not self.by_tickets

    @property
    def ctas(self) -> int:
        """CTAs of the kernel."""
        return min(self.config.persistent_ctas, self.grid.ctas) if self.persistent else self.grid.ctas

    @functools.cached_property
    def by_tile(self) -> bool:
        """Whether CTAs process the query heads of a tile before the next tile (see `work.for_steps`).

        What depends on the head alone would be loaded again in each step, so there must be nothing of the kind.
        """
        problem = self.problem
        of_group = self.kind.fused and self.heads < problem.dims.N and problem.mask is not None
        per_head = self.score_gradients.summed or self.arrays.of_kind("scalar")
        of_group = of_group and not self.persistent
        return self.config.by_tile and of_group and not per_head and self.visits.known is not None

    @property
    def stagger(self) -> int:
        """How many tiles further on each CTA starts than the one before; after the last tile it goes on at the first.

        Not with a bias of [T, S] (evidence: backward/stagger).
        """
        applies = self.kind.fused and self.visits.all_full and not self.arrays.of_kind("tile")
        return self.config.stagger if applies else 0

    @property
    def store_warps(self) -> int:
        """Warps that store tiles of dQ; `first_store` says why one where CTAs differ in the order of tiles.

        Under a block mask they do too, and two warps claim tiles late.
        """
        single = self.by_tile or self.stagger or self.persistent or self.ordered_sums
        return 1 if single else self.config.store_warps
