"""Which pairs of a tile a mask allows: its intervals by two bounds of each row, the rest of it element by element.

A row is a query or a key; causal masks, windows and lengths allow an interval of the other sequence to it. A thread holds
elements of two rows, at columns that are its lane's first column plus constants. So such masks are tested by comparing
constants with the bounds of two rows, less the lane's first column (evidence: library/indices-of-a-tile).
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_fa.backends.gpu import elementwise
from pallas_fa.backends.gpu.layouts import indices, lane_columns
from pallas_fa.masks.base import Mask, all_of, parts_of
from pallas_fa.operands import intervals
from pallas_fa.operands.intervals import UNBOUNDED


@dataclasses.dataclass(frozen=True)
class Pairs:
    """The pairs of a tile.

    Attributes:
      shape: of the tile [rows, columns].
      rows: the first position of the rows.
      columns: likewise.
      question: "kv_range" where rows are queries, "q_range" where they are keys.
      row_end: where positions of the rows end; None if no tile reaches past it.
      column_end: likewise.
      interpret: whether the kernel is interpreted.
    """

    shape: tuple[int, int]
    rows: Any
    columns: Any
    question: Literal["kv_range", "q_range"]
    row_end: int | None
    column_end: int | None
    interpret: bool

    def allowed(self, mask: Mask | None, b: Any, n: Any, t: Any, s: Any) -> Any:
        """Returns which pairs are allowed, bool; None for all.

        Args:
          mask: with its arrays in the tile, or scalars; None for no mask.
          b: the batch entry.
          n: the query head.
          t: the query of each pair.
          s: its key.
        """
        exact, rest = self.split(mask)
        inside = self.inside(exact)
        if rest is None:
            return inside
        allowed = elementwise_test(rest, b, n, t, s)
        return allowed if inside is None else inside & allowed

    def split(self, mask: Mask | None) -> tuple[Mask | None, Mask | None]:
        """Returns the parts of `mask`, with its arrays in the tile, that are intervals of columns, and the others."""
        is_interval = lambda part: self.question in part.exact_ranges and not any(map(jnp.ndim, jax.tree.leaves(part)))
        parts = [] if mask is None else parts_of(mask, Mask)
        return all_of([x for x in parts if is_interval(x)]), all_of([x for x in parts if not is_interval(x)])

    def inside(self, mask: Mask | None) -> Any:
        """Returns which pairs a mask of intervals allows, bool; None for all. Positions past the ends are not allowed."""
        known: list[int | None] = []

        def bounds(row, mask):
            found = (-UNBOUNDED, UNBOUNDED) if mask is None else getattr(mask, self.question)(row, row + 1)
            lo, hi = found
            if self.column_end is not None:
                hi = intervals.minimum(hi, self.column_end)
            if self.row_end is not None:
                hi = jnp.where(row < self.row_end, hi, -UNBOUNDED)
            known[:] = [x if isinstance(x, int) else None for x in (lo, hi)]
            return [jnp.broadcast_to(x, row.shape) for x in (lo, hi) if not isinstance(x, int)]

        row = self.rows + indices(self.shape, 0, self.interpret)
        traced = iter(elementwise.inline(bounds, row, mask))
        first, column = lane_columns(self.shape, self.interpret)
        first = self.columns + first
        lo, hi = (next(traced) - first if x is None else None if abs(x) >= UNBOUNDED else x - first for x in known)
        if lo is None or hi is None:
            return None if lo is hi else column < hi if lo is None else column >= lo
        # One comparison for both bounds: left of the interval, the difference wraps around to a large number.
        return (column - lo).astype(jnp.uint32) < jnp.maximum(hi - lo, 0).astype(jnp.uint32)


def elementwise_test(mask: Mask, b: Any, n: Any, t: Any, s: Any) -> Any:
    """Returns which pairs a mask allows, bool like t; arguments as of `Pairs.allowed`."""
    return jnp.broadcast_to(elementwise.inline(lambda t, s, mask: mask.allowed(b, n, t, s), t, s, mask), t.shape)
