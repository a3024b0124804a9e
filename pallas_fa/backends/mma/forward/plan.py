"""What is static in one forward kernel by mma.sync."""

import dataclasses
import functools
from typing import NamedTuple

from pallas_fa.backends.gpu.forward_plan import ForwardCore
from pallas_fa.backends.gpu.grid import Grid, largest_divisor
from pallas_fa.backends.mma.config import ForwardConfig
from pallas_fa.backends.mma.tiles import Tiles


class OperandTiles(NamedTuple):
    """How the tiles of each operand lie in shared memory."""

    q: Tiles
    k: Tiles
    v: Tiles
    out: Tiles


@dataclasses.dataclass(frozen=True)
class ForwardPlan(ForwardCore):
    """All that is static in one kernel."""

    config: ForwardConfig

    @functools.cached_property
    def tiles(self) -> OperandTiles:
        """The tiles of the operands."""
        problem, (T, S) = self.problem, (self.problem.dims.T, self.problem.dims.S)
        shapes = (T, problem.H), (S, problem.H), (S, problem.Hv), (T, problem.Hv)
        return OperandTiles(*(Tiles(*shape, problem.dtype, problem.layout, self.interpret) for shape in shapes))

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
