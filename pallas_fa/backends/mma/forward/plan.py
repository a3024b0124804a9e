"""What is static in one forward kernel by mma.sync."""

import dataclasses
import functools

from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.forward_plan import ForwardCore, OperandTiles
from pallas_fa.backends.gpu.grid import Grid, largest_divisor
from pallas_fa.backends.mma.config import ForwardConfig
from pallas_fa.backends.mma.tiles import Tiles


@dataclasses.dataclass(frozen=True)
class ForwardPlan(ForwardCore):
    """All that is static in one kernel."""

    config: ForwardConfig

    @functools.cached_property
    def arrays(self) -> KernelArrays:
        """The arrays of score and mask; blocks of 16 keys ask for more than one byte an element."""
        return super().arrays.widened() if self.config.block_kv == 16 else super().arrays

    @functools.cached_property
    def tiles(self) -> OperandTiles[Tiles]:
        """The tiles of the operands."""
        problem, c = self.problem, self.config
        queries, keys = (problem.dims.T, c.block_q), (problem.dims.S, c.block_kv)
        tiles = lambda length, block, dim: Tiles(length, dim, problem.dtype, problem.layout, self.interpret, block)
        q, k = (tiles(*x, problem.H) for x in (queries, keys))
        v, out = (tiles(*x, problem.Hv) for x in (keys, queries))
        return OperandTiles(q, k, v, out)

    @property
    def query_blocks(self) -> int:
        """Query blocks of a head, each with a CTA of its own."""
        return -(-self.problem.dims.T // self.config.block_q)

    @functools.cached_property
    def grid(self) -> Grid:
        """The CTAs of the kernel."""
        dims, is_masked = self.problem.dims, self.problem.mask is not None
        group = largest_divisor(dims.B * dims.N, self.config.l2_head_group) if is_masked else 1
        return Grid(dims.B, dims.N, self.query_blocks, group)

    @property
    def array_stages(self) -> int:
        """Slots of arrays that change along a row of logits: they are read when the next keys may already be loaded."""
        return 2
