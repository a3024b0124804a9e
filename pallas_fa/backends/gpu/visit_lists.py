"""Lists of the tiles that a CTA visits, where a block mask leaves gaps that one interval would span.

A list has boundary tiles first, then full ones. In the forward kernel each go from the last tile to the first: what lies
past a sequence length is then in the first tile, as without lists. In the backward they go from the first tile to the last:
under most masks the CTAs of a head then start at different tiles of dQ, to which they would else add one after the other.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.masks import Mask
from pallas_fa.masks.base import BOUNDARY, EMPTY, FULL
from pallas_fa.operands import intervals

_FEW = 512  # up to so many tiles, comparing all with all is quicker than a sort
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


def table(states: Any, descending: bool) -> Any:
    """Returns the lists of all rows of `tile_states`, int32 [B|1, N|1, rows, 2 + tiles], in this order."""
    tiles = states.shape[-1]
    number = np.arange(tiles, dtype=np.int32)[None, None, None]
    boundary, visited = states == BOUNDARY, states > EMPTY
    kind = jnp.where(boundary, 0, jnp.where(visited, 1, 2)).astype(jnp.int32)
    order = kind * tiles + (tiles - 1 - number if descending else number)
    if tiles > _FEW:
        listed = lax.rem(jnp.sort(order, axis=-1), jnp.int32(tiles))
        listed = tiles - 1 - listed if descending else listed
        count = lambda x: x.sum(axis=-1, keepdims=True, dtype=jnp.int32)
        return jnp.concatenate([count(boundary), count(visited), listed], axis=-1)
    # Two sums, which XLA computes in one GPU kernel each, where a sort takes more.
    place = (order[..., None, :] < order[..., :, None]).sum(axis=-1, dtype=jnp.int32)
    column = np.arange(_COUNTS + tiles)[None, None, None, :, None]
    of_tile = lambda x: x[..., None, :]
    found = jnp.where(of_tile(place) == column - _COUNTS, of_tile(number), 0)
    found = jnp.where(column == 0, of_tile(boundary), jnp.where(column == 1, of_tile(visited), found))
    return found.sum(axis=-1, dtype=jnp.int32)


def in_table(table_ref: Any, b: Any, n: Any, row: Any) -> VisitList:
    """Returns, in a kernel, the list in row `row` of `table`, for batch entry b and head n."""
    at = *(i if extent > 1 else 0 for i, extent in zip((b, n), table_ref.shape, strict=False)), row
    return VisitList(table_ref, at, table_ref[(*at, 0)], table_ref[(*at, 1)])
