"""What is static in one pass of the backward kernels by mma.sync: its tiles, its arrays, its CTAs."""

import dataclasses
import functools

from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.backward_plan import BackwardCore
from pallas_fa.backends.gpu.gradient_pass import ByRole, GradientPass
from pallas_fa.backends.gpu.grid import Grid, largest_divisor
from pallas_fa.backends.gpu.streamed_visits import StreamedVisits
from pallas_fa.backends.mma.config import BackwardConfig
from pallas_fa.backends.mma.tiles import Tiles
from pallas_fa.problem import Problem


def passes(problem: Problem) -> tuple[GradientPass, ...]:
    """Returns the passes over the logits that give all gradients.

    None adds dQ up in device memory, which is slower than to compute the logits again. At head dims past 128 the sums of
    one gradient fill the registers.
    """
    if max(problem.H, problem.Hv) > 128:
        return GradientPass(("dv",)), GradientPass(("dk",)), GradientPass(("dq",))
    return GradientPass(("dk", "dv")), GradientPass(("dq",))


@dataclasses.dataclass(frozen=True)
class BackwardPlan(BackwardCore):
    """All that is static in one pass."""

    config: BackwardConfig

    @functools.cached_property
    def arrays(self) -> KernelArrays:
        """The arrays of score and mask; tiles of 16 streamed positions ask for more than one byte an element."""
        return super().arrays.widened() if self.config.width == 16 else super().arrays

    @functools.cached_property
    def tiles(self) -> ByRole:
        """How the tiles of the operands lie in shared memory."""
        problem, c, keys_stationary = self.problem, self.config, self.kind.keys_stationary
        queries = problem.dims.T, c.width if keys_stationary else c.block
        keys = problem.dims.S, c.block if keys_stationary else c.width
        tiles = lambda length, block, dim: Tiles(length, dim, problem.dtype, problem.layout, self.interpret, block)
        q, k = (tiles(*x, problem.H) for x in (queries, keys))
        v, d_out = (tiles(*x, problem.Hv) for x in (keys, queries))
        return self.kind.by_role(q, k, v, d_out)

    @functools.cached_property
    def visits(self) -> StreamedVisits:
        """Which tiles each CTA visits."""
        c = self.config
        lengths = self.stationary, self.streamed
        return StreamedVisits(self.problem.mask, self.kind, self.scored, *lengths, c.block, c.width, warpgroups=1)

    @property
    def heads(self) -> int:
        """Stationary heads of one batch entry."""
        return self.problem.K if self.kind.keys_stationary else self.problem.dims.N

    @functools.cached_property
    def grid(self) -> Grid:
        """The CTAs of the kernel."""
        B, is_masked = self.problem.dims.B, self.problem.mask is not None
        group = largest_divisor(B * self.heads, self.config.l2_head_group) if is_masked else 1
        return Grid(B, self.heads, self.visits.blocks, group)
