"""What is static in one pass of the backward kernels by mma.sync: its tiles, its arrays, its CTAs."""

import dataclasses
import functools
from typing import Any

from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.backward_plan import BackwardCore, has_per_query_gradients
from pallas_fa.backends.gpu.gradient_pass import ByRole, GradientPass
from pallas_fa.backends.gpu.grid import Grid, largest_divisor
from pallas_fa.backends.gpu.streamed_visits import StreamedVisits
from pallas_fa.backends.mma.backward.dq import DqSums
from pallas_fa.backends.mma.config import BackwardConfig, FusedBackwardConfig
from pallas_fa.backends.mma.tiles import Tiles, columns
from pallas_fa.problem import Problem

FUSED = GradientPass(("dk", "dv", "dq"))


def passes(problem: Problem) -> tuple[GradientPass, ...]:
    """Returns the passes over the logits that give all gradients, those of q, k and v in a fixed order.

    At head dims past 128 the sums of one gradient fill the registers.
    """
    if max(problem.H, problem.Hv) > 128:
        return GradientPass(("dv",)), GradientPass(("dk",)), GradientPass(("dq",))
    return GradientPass(("dk", "dv")), GradientPass(("dq",))


@dataclasses.dataclass(frozen=True)
class BackwardPlan(BackwardCore):
    """All that is static in one pass."""

    config: BackwardConfig | FusedBackwardConfig

    @property
    def tile(self) -> int:
        """Positions of a streamed tile of a CTA."""
        return self.config.tile

    @property
    def values_in_registers(self) -> bool:
        """Whether warpgroups hold V in registers, and no step reads it from shared memory."""
        return isinstance(self.config, FusedBackwardConfig) and self.config.values_in_registers

    @property
    def why_not_fused(self) -> str | None:
        """None if this pass is not to give all gradients, or can; else the reason."""
        if not self.kind.fused:
            return None
        problem, wgs = self.problem, self.config.wgs
        named = f"{self.config} gives all gradients in one pass, which"
        if problem.deterministic_gradients:
            return f"{named} adds dQ up in no fixed order, so it can't do that with deterministic_gradients=True"
        if has_per_query_gradients(problem):
            return f"{named} gives no gradients of a score's arrays with one value per query"
        if any(columns(dim) % (64 * wgs) for dim in (problem.H, problem.Hv)):
            return f"{named} needs head dims of a multiple of {64 * wgs} columns, with {wgs=}, once rounded up to 64"
        return None

    @functools.cached_property
    def dq(self) -> DqSums:
        """How the fused pass adds dQ up."""
        problem, visits, tiles = self.problem, self.visits, self.tiles.streamed_qk
        sizes = tiles.dim, tiles.padded_dim, visits.tiles * visits.tile, visits.blocks
        return DqSums(problem.dims, problem.layout, *sizes, self.interpret)

    @functools.cached_property
    def arrays(self) -> KernelArrays:
        """The arrays of score and mask; tiles of 16 streamed positions ask for more than one byte an element."""
        return super().arrays.widened() if self.config.width == 16 else super().arrays

    @functools.cached_property
    def tiles(self) -> ByRole:
        """How the tiles of the operands lie in shared memory."""
        problem, c, keys_stationary = self.problem, self.config, self.kind.keys_stationary
        queries = problem.dims.T, c.tile if keys_stationary else c.block
        keys = problem.dims.S, c.block if keys_stationary else c.tile
        tiles = lambda length, block, dim: Tiles(length, dim, problem.dtype, problem.layout, self.interpret, block)
        q, k = (tiles(*x, problem.H) for x in (queries, keys))
        v, d_out = (tiles(*x, problem.Hv) for x in (keys, queries))
        return self.kind.by_role(q, k, v, d_out)

    @functools.cached_property
    def visits(self) -> StreamedVisits:
        """Which tiles each CTA visits."""
        c = self.config
        lengths = self.stationary, self.streamed
        return StreamedVisits(self.problem.mask, self.kind, self.scored, *lengths, c.block, c.tile, warpgroups=1)

    def summed_shape(self) -> tuple[int, ...]:
        """Returns the shape of the float32 gradient of an array, one value per stationary position, in parts."""
        return (self.config.wgs if self.kind.fused else 1), *super().summed_shape()

    def array_gradient(self, i: int, d: Any, x: Any) -> Any:
        """Returns the gradient of array i, which is `x`, from what the kernel gave: summed over parts and broadcast dims."""
        return super().array_gradient(i, d.sum(axis=0) if i in self.score_gradients.summed else d, x)

    @functools.cached_property
    def grid(self) -> Grid:
        """The CTAs of the kernel."""
        B, is_masked = self.problem.dims.B, self.problem.mask is not None
        group = largest_divisor(B * self.heads, self.config.l2_head_group) if is_masked else 1
        return Grid(B, self.heads, self.visits.blocks, group)
