"""Lists of the tiles that a CTA visits, where a block mask leaves gaps that one interval would span.

A list has boundary tiles first, then full ones, each from the last tile to the first: what lies past a sequence length is
then in the first tile of a list, as elsewhere.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.masks import Mask
from pallas_fa.masks.base import BOUNDARY, EMPTY, FULL
from pallas_fa.operands import intervals

_COUNTS = 2  # a row starts with how many tiles are boundary tiles, and how many there are


class VisitList(NamedTuple):
    """The list in row `at` of a table: `count` tiles, the first `boundary` of which are boundary tiles."""

    table: Any
    at: tuple[Any, ...]
    boundary: Any
    count: Any

    def tile(self, i: Any) -> Any:
        """Returns the number of the i-th tile. Of an empty list, that of the first is some tile's, too."""
        return self.table[(*self.at, _COUNTS + i)]


def tile_states(mask: Mask, sizes: tuple[int, int], tiles: tuple[int, int], full_tails: tuple[bool, bool]) -> Any:
    """Returns the state of each tile of queries and keys, int8 [B|1, N|1, q tiles, kv tiles].

    Args:
      mask: a bound mask.
      sizes: queries and keys.
      tiles: positions of their tiles.
      full_tails: for both, whether a ragged last tile may be full.
    """
    starts = [np.arange(0, size, tile) for size, tile in zip(sizes, tiles, strict=True)]
    ends = [np.minimum(x + tile, size) for x, tile, size in zip(starts, tiles, sizes, strict=True)]
    states = mask.tile_states(*zip(starts, ends, strict=True))
    q, kv = ((x + tile <= size) | may for x, tile, size, may in zip(starts, tiles, sizes, full_tails, strict=True))
    return intervals.minimum(states, np.where(q[:, None] & kv, FULL, BOUNDARY).astype(np.int8)[None, None])


def table(states: Any) -> Any:
    """Returns the lists of all rows of `tile_states`: int32 [B|1, N|1, rows, 2 + tiles]."""
    tiles = states.shape[-1]
    boundary, full = states == BOUNDARY, states == FULL
    rank = jnp.where(boundary, 0, jnp.where(full, 1, 2)).astype(jnp.int32)
    order = rank * tiles + np.arange(tiles - 1, -1, -1, dtype=np.int32)[None, None, None]
    listed = tiles - 1 - lax.rem(jnp.sort(order, axis=-1), jnp.int32(tiles))
    count = lambda x: x.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    return jnp.concatenate([count(boundary), count(states > EMPTY), listed], axis=-1)


def in_table(table_ref: Any, b: Any, n: Any, row: Any) -> VisitList:
    """Returns, in a kernel, the list in row `row` of `table`, for batch entry b and head n."""
    at = *(i if extent > 1 else 0 for i, extent in zip((b, n), table_ref.shape, strict=False)), row
    return VisitList(table_ref, at, table_ref[(*at, 0)], table_ref[(*at, 1)])
