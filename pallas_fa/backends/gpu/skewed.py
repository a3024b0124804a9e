"""Arrays that span the diagonals, as kernels read them: in a form of O(T + S) memory that has every tile as a slice."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.operands import diagonals

ROWS = 64  # of a tile
_COLUMNS = 128  # of the widest tile of gradients
_PAST_THE_END = 128  # rows of a CTA that may follow the last whole tile


@dataclasses.dataclass(frozen=True)
class Skewed:
    """The form [..., 64, width] of an array [..., rows + columns - 1] whose entry i is for column - row = i - (rows - 1).

    The tile of 64 rows from row r on and of columns from c on starts at column `origin` + c - r of this form. TMA copies
    swizzled pieces of up to 128 bytes, and starts only where one starts: r, c and `origin` are multiples of 64.

    Args:
      rows, columns: lengths of the two sequences.
    """

    rows: int
    columns: int

    @property
    def origin(self) -> int:
        """Where the tile at row 0 and column 0 starts."""
        return _round_up(self.rows - 1, ROWS) + _PAST_THE_END

    @property
    def width(self) -> int:
        """Columns in memory: those of whole tiles."""
        return self.origin + _round_up(self.columns, _COLUMNS)

    def start(self, row: Any, column: Any) -> Any:
        """Returns where the tile at this row and column starts."""
        return self.origin + column - row

    def in_memory(self, x: Any) -> Any:
        """Returns the form of x [..., rows + columns - 1]."""
        before = self.origin - (self.rows - 1)
        after = self.width - self.origin - self.columns
        return diagonals.tile(jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(ROWS - 1 + before, after)]), ROWS)

    def gradient(self, d: Any) -> Any:
        """Returns the gradient [..., rows + columns - 1] of an array from that of its form: the sums along diagonals."""
        x = jax.ShapeDtypeStruct((*d.shape[:-2], self.rows + self.columns - 1), d.dtype)
        (dx,) = jax.linear_transpose(self.in_memory, x)(d)
        return dx


def _round_up(size, multiple):
    return -(-size // multiple) * multiple
