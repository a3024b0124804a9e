"""Which blocks of the other sequence a kernel visits for a block of one.

`Visits` says it for one block. The mask allows some of the visited blocks wholly (full blocks) and some in part (boundary
blocks, at the start and at the end of the visits); only the latter are masked element by element.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.operands import intervals
from pallas_fa.operands.intervals import Range


class Visits(NamedTuple):
    """Visited blocks [first, last), of which [full_first, full_last) need no mask; ints or int32 scalars."""

    first: Any
    full_first: Any
    full_last: Any
    last: Any


def visits(visited: Range, full: Range, size: int, block: int, at_least: int = 1) -> Visits:
    """Returns the blocks of a sequence of `size` that cover the range `visited`, and those inside the range `full`.

    At least one block is visited, so that a CTA with nothing to attend to still writes its (empty) results; `at_least` may
    be 0 for a kernel that writes them in any case.
    """
    count = -(-size // block)
    lo, hi = (intervals.maximum(0, intervals.minimum(x, size)) for x in visited)
    first = intervals.minimum(lo // block, count - at_least)
    last = (hi + block - 1) // block
    # Bounds that are known while tracing to be equal stay so, and the loop between them is not compiled.
    if at_least or not is_equal(last, count):
        last = intervals.maximum(last, first + at_least)
    lo, hi = (intervals.maximum(0, intervals.minimum(x, size)) for x in full)
    full_first = intervals.maximum((lo + block - 1) // block, first)
    if not is_equal(full_first, first):
        full_first = intervals.minimum(full_first, last)
    # The last, ragged block is never full: nothing lies in its tail.
    full_last = intervals.minimum(hi // block, last)
    if at_least or not is_equal(full_last, last):
        full_last = intervals.maximum(full_last, full_first)
    return Visits(first, full_first, full_last, last)


def visits_of_queries(mask: Any, queries: Range, size: int, block: int, start: Any = 0) -> Visits:
    """Returns `visits` of a block of queries [lo, hi), under a mask whose arrays are scalars; all where it is None.

    `start`: the key that blocks are counted from.
    """
    if mask is None:
        return visits((0, size), (0, size), size, block)
    visited, full = mask.kv_range(*queries), mask.full_kv_range(*queries)
    if not is_equal(start, 0):
        visited, full = (tuple(x - start for x in found) for found in (visited, full))
    return visits(visited, full, size - start, block)


def part_of(found: Visits, part: Range, parts: int, blocks: int) -> Visits:
    """Returns those visits that fall to the parts [first, end) = `part` of `parts`, in a kernel: equally many to each part.

    Where there are fewer visits than parts, some parts visit a block past the end, number `blocks`, in which nothing lies.
    """
    count = jnp.asarray(found.last - found.first, jnp.int32)
    first, last = (found.first + lax.div(count * i, jnp.int32(parts)) for i in part)
    # Bounds that are known while tracing to be equal stay so.
    full_first = first if is_equal(found.full_first, found.first) else jnp.clip(found.full_first, first, last)
    full_last = last if is_equal(found.full_last, found.last) else jnp.clip(found.full_last, first, last)
    if isinstance(found.last, int) and isinstance(found.first, int) and found.last - found.first >= parts:
        return Visits(first, full_first, full_last, last)
    nothing = first == last
    ends = (first, blocks), (full_first, blocks), (full_last, blocks), (last, blocks + 1)
    return Visits(*(jnp.where(nothing, there, x) for x, there in ends))


def is_windowed(mask: Any, T: int) -> bool:
    """Returns whether the mask, without arrays, rules out keys before the last of T queries."""
    if mask is None or jax.tree.leaves(mask):
        return False
    first, _ = mask.kv_range(np.array([T - 64], np.int32), np.array([T], np.int32))
    return bool(np.any(np.asarray(first) > 0))


def is_equal(a: Any, b: Any) -> bool:
    """Returns whether a == b is known while tracing."""
    return a is b or (isinstance(a, int) and isinstance(b, int) and a == b)


def visits_of_blocks(
    ask: Callable[[Any, Any], Range],
    ask_full: Callable[[Any, Any], Range],
    block: int,
    size: int,
    other_size: int,
    other_block: int,
    whole_blocks_only: bool = False,
    at_least: int = 1,
) -> Visits:
    """Returns `visits` of every block of a sequence, broadcastable to [B, N, blocks].

    The answers of masks without arrays are known while tracing.

    Args:
      ask, ask_full: the mask's questions, such as `mask.q_range` and `mask.full_q_range`.
      block, size: of the sequence that is asked about.
      other_block, other_size: of the sequence whose blocks are visited.
      whole_blocks_only: a ragged last block finds no block full.
      at_least: see `visits`.
    """
    starts, ends = intervals.tiles(size, block)
    lo, hi = ask_full(starts, ends)
    if whole_blocks_only and size % block:
        hi = intervals.where(starts + block <= size, hi, lo)
    return visits(ask(starts, ends), (lo, hi), other_size, other_block, at_least)


def table(found: Visits, blocks: int, rows: int) -> Any:
    """Returns `visits_of_blocks` of that many blocks as a table that a kernel reads: int32 [B|1, N|1, rows, 4].

    Rows past the last block visit nothing.
    """
    columns = [jnp.asarray(x, jnp.int32) for x in found]
    shape = jnp.broadcast_shapes((1, 1, blocks), *(x.shape for x in columns))
    columns = jnp.stack([jnp.broadcast_to(x, shape) for x in columns], axis=-1)
    return jnp.pad(columns, ((0, 0), (0, 0), (0, rows - blocks), (0, 0)))


def in_table(visit_table: Any, b: Any, n: Any, row: Any) -> Visits:
    """Returns the visits in row `row` of `table`, for batch entry b and head n."""
    at = (i if extent > 1 else 0 for i, extent in zip((b, n), visit_table.shape, strict=False))
    at = *at, row
    return Visits(*(visit_table[(*at, i)] for i in range(4)))


class Line(NamedTuple):
    """A bound that is affine in the number of the block: start + slope * number."""

    start: int
    slope: int

    def at(self, number: Any) -> Any:
        """Returns the bound of block `number`; an int where it is the same for all."""
        return self.start + self.slope * number if self.slope else self.start


def as_lines(found: Visits, blocks: int) -> Visits | None:
    """Returns `visits_of_blocks` that are known while tracing as `Line`s, or None where one of them is no line.

    Loops with such bounds take far fewer registers than with bounds that are computed as `visits` does.
    """
    lines = []
    for x in found:
        x = np.broadcast_to(x, (blocks,))
        slope = int(x[1] - x[0]) if blocks > 1 else 0
        if np.any(x != x[0] + slope * np.arange(blocks)):
            return None
        lines.append(Line(int(x[0]), slope))
    return Visits(*lines)
