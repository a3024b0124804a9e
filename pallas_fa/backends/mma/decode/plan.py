"""What is static in one kernel for few queries."""

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.forward_plan import ForwardCore
from pallas_fa.backends.gpu.grid import Grid
from pallas_fa.backends.mma.config import DecodeConfig
from pallas_fa.backends.mma.decode.key_parts import ROWS
from pallas_fa.backends.mma.tiles import Tiles
from pallas_fa.operands.layout import Layout


class OperandTiles(NamedTuple):
    """How the tiles of each operand lie in shared memory."""

    q: Tiles
    k: Tiles
    v: Tiles


@dataclasses.dataclass(frozen=True)
class DecodePlan(ForwardCore):
    """All that is static in one kernel."""

    config: DecodeConfig
    rows_first: bool = False  # queries are in the layout "BNTH", whatever the problem's is

    @functools.cached_property
    def arrays(self) -> KernelArrays:
        """The arrays of score and mask; parts of 16 keys ask for more than one byte an element."""
        return super().arrays.widened()

    @property
    def query_layout(self) -> Layout:
        """The layout of queries and output."""
        return "BNTH" if self.rows_first else self.problem.layout

    @functools.cached_property
    def tiles(self) -> OperandTiles:
        """The tiles of the operands."""
        problem, c = self.problem, self.config
        q = Tiles(problem.dims.T, problem.H, problem.dtype, self.query_layout, self.interpret, c.rows)
        of = lambda dim: Tiles(problem.dims.S, dim, problem.kv_dtype, problem.layout, self.interpret, c.block_kv)
        return OperandTiles(q, of(problem.H), of(problem.Hv))

    @property
    def reorders_columns(self) -> bool:
        """Whether keys and values are converted in registers, where their columns are in the orders of `mma.narrow`."""
        return self.problem.has_narrow_keys and not self.interpret

    @property
    def query_blocks(self) -> int:
        """Query blocks of a head."""
        return -(-self.problem.dims.T // self.config.rows)

    @functools.cached_property
    def grid(self) -> Grid:
        """The CTAs of the kernel."""
        dims = self.problem.dims
        return Grid(dims.B, dims.N, self.query_blocks * self.config.kv_splits, 1)

    @property
    def has_padding_keys(self) -> bool:
        """Whether a step may see keys past the end of the sequence."""
        return super().has_padding_keys or self.config.kv_splits > 1

    @property
    def keys_of_part(self) -> int:
        """Keys of a key block that one row of a tile has: see `KeyParts`."""
        return self.config.block_kv * self.config.rows // ROWS

    @property
    def box(self) -> int:
        """Keys that are copied at once: those of a part, or as many as divide both these and a page."""
        pages = self.problem.pages
        return self.keys_of_part if pages is None else math.gcd(self.keys_of_part, pages.size)

    @property
    def out_columns(self) -> int:
        """Columns of the output that are merged and stored at once."""
        return math.gcd(self.tiles.v.padded_dim, 128)

    @property
    def stored_rows(self) -> int:
        """Rows of the output of a query block: those that there are, where that is one block and 128 threads share them."""
        T, rows = self.problem.dims.T, self.config.rows
        return T if T < rows and T * self.out_columns % 128 == 0 else rows

    @property
    def out_dtype(self) -> np.dtype:
        """Partial results are float32."""
        return np.dtype(np.float32) if self.config.kv_splits > 1 else self.problem.dtype
