"""Which tiles a kernel visits, in which order.

For a block of queries the keys are visited from right to left in three runs: tiles that the mask cuts, tiles that it
allows wholly, tiles that it cuts. `Visits` says where each run ends.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.operands import ranges


class Visits(NamedTuple):
    """Tiles [first, last) of the other axis, of which [full_first, full_last) need no mask; ints or int32 scalars."""

    first: Any
    full_first: Any
    full_last: Any
    last: Any


def visits(visited: ranges.Range, full: ranges.Range, size: int, tile: int, at_least: int = 1) -> Visits:
    """Tiles of an axis of `size` that cover the range `visited`, and those that lie inside the range `full`.

    At least one tile is visited, so that a block with nothing to attend to still writes its (empty) results; `at_least`
    may be 0 for a kernel that does so in any case.
    """
    count = -(-size // tile)
    lo, hi = (ranges.maximum(0, ranges.minimum(x, size)) for x in visited)
    first = ranges.minimum(lo // tile, count - at_least)
    last = (hi + tile - 1) // tile
    if at_least or not is_equal(last, count):  # where the last tile is visited in any case, that stays known
        last = ranges.maximum(last, first + at_least)
    lo, hi = (ranges.maximum(0, ranges.minimum(x, size)) for x in full)
    # The last, ragged tile is never full: its tail holds no keys.
    full_first = ranges.maximum((lo + tile - 1) // tile, first)
    if not is_equal(full_first, first):  # where they are equal, known while tracing, so they stay
        full_first = ranges.minimum(full_first, last)
    full_last = ranges.minimum(hi // tile, last)
    if at_least or not is_equal(full_last, last):
        full_last = ranges.maximum(full_last, full_first)
    return Visits(first, full_first, full_last, last)


def is_equal(a: Any, b: Any) -> bool:
    """Whether a == b is known while tracing."""
    return isinstance(a, int) and isinstance(b, int) and a == b


def visits_of_blocks(
    ask: Any,
    ask_full: Any,
    block: int,
    size: int,
    other_size: int,
    tile: int,
    whole_blocks_only: bool = False,
    at_least: int = 1,
) -> Visits:
    """`visits` of every block of a sequence: broadcastable to [B, N, blocks].

    `ask`, `ask_full`: the mask's questions, such as `mask.q_range` and `mask.full_q_range`. `whole_blocks_only`: no tile
    counts as full for a ragged last block. The answers of masks without arrays are known while tracing.
    """
    starts = np.arange(0, size, block)
    ends = np.minimum(starts + block, size)
    lo, hi = ask_full(starts, ends)
    if whole_blocks_only and size % block:
        hi = ranges.where(starts + block <= size, hi, lo)
    return visits(ask(starts, ends), (lo, hi), other_size, tile, at_least)


def table(found: Visits, blocks: int, rows: int) -> Any:
    """`visits_of_blocks` of that many blocks as a table that a kernel reads: int32 [B|1, N|1, rows, 4].

    Rows past the last block visit no tile.
    """
    columns = [jnp.asarray(x, jnp.int32) for x in found]
    shape = jnp.broadcast_shapes((1, 1, blocks), *(x.shape for x in columns))
    columns = jnp.stack([jnp.broadcast_to(x, shape) for x in columns], axis=-1)
    return jnp.pad(columns, ((0, 0), (0, 0), (0, rows - blocks), (0, 0)))


def in_table(visit_table: Any, b: Any, n: Any, row: Any) -> Visits:
    """The visits in row `row` of `table`, for batch entry b and head n."""
    at = (i if extent > 1 else 0 for i, extent in zip((b, n), visit_table.shape, strict=False))
    at = *at, row
    return Visits(*(visit_table[(*at, i)] for i in range(4)))


def as_lines(found: Visits, blocks: int) -> Visits | None:
    """`visits_of_blocks` that are known while tracing as numbers and pairs (at block 0, per block), or None.

    Loops with such bounds take far fewer registers than with bounds that are computed as `visits` does.
    """
    lines = []
    for x in found:
        x = np.broadcast_to(x, (blocks,))
        per_block = int(x[1] - x[0]) if blocks > 1 else 0
        if np.any(x != x[0] + per_block * np.arange(blocks)):
            return None
        lines.append((int(x[0]), per_block) if per_block else int(x[0]))
    return Visits(*lines)


def section(count: int, wanted: int) -> int:
    """The largest divisor of `count` that is at most `wanted`."""
    return max(d for d in range(1, min(count, wanted) + 1) if count % d == 0)


def place(section: int, shares: int, heads: int) -> tuple[Any, Any, Any, Any]:
    """(batch entry, head, which of `shares` of the head, which section) of these threads.

    `section`: heads that run side by side.
    """
    rest, head_in_section = quotient_and_rest(lax.axis_index("block"), section)
    number, share = quotient_and_rest(rest, shares)
    return *quotient_and_rest(number * section + head_in_section, heads), share, number


def quotient_and_rest(x: Any, divisor: int) -> tuple[Any, Any]:
    """Of an int32 x >= 0, inside a kernel."""
    return lax.div(x, jnp.int32(divisor)), lax.rem(x, jnp.int32(divisor))
