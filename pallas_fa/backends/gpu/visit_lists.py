"""Lists of the tiles that a CTA visits, where a block mask leaves gaps that one interval would span (see `block_lists`).

A block mask that `block_mask` made has lists of its blocks. Where tiles divide these, kernels read them as they are; else
lists of tiles are made in each call.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.backends.gpu.grid import quotient_and_remainder
from pallas_fa.masks import Mask, block_lists
from pallas_fa.masks.base import BOUNDARY, FULL
from pallas_fa.masks.block_lists import COUNTS
from pallas_fa.operands import intervals


class Form(NamedTuple):
    """What a table of lists is of: tiles, or blocks of so many tiles.

    `rows`: how many rows of tiles share a list. `tiles`: how many tiles an entry stands for. `descending`: their order.
    `ready`: whether it is the mask's own.
    """

    rows: int
    tiles: int
    descending: bool
    ready: bool

    @classmethod
    def of(cls, mask: Any, sizes: tuple[int, int], tiles: tuple[int, int], by_keys: bool = False) -> "Form":
        """Returns the form of the lists of rows of tiles, of queries or (`by_keys`) of keys, as a bound mask has them.

        Args:
          mask: the mask, whose arrays may be missing.
          sizes: queries and keys.
          tiles: positions of their tiles.
          by_keys: whether rows are of keys; they ascend, those of queries descend.
        """
        found = mask.tiles_of_lists(sizes, tiles)
        rows, entry = (1, 1) if found is None else found[::-1] if by_keys else found
        return cls(rows, entry, not by_keys, found is not None)


class VisitList(NamedTuple):
    """The list in row `at` of a table: `count` tiles, the first `boundary` of which are boundary tiles."""

    table: Any
    at: tuple[Any, ...]
    boundary: Any
    count: Any
    form: Form

    def tile(self, i: Any) -> Any:
        """Returns the number of the i-th tile. Of an empty list, that of the first is some tile's, too."""
        if self.form.tiles == 1:
            return self.table[(*self.at, COUNTS + i)]
        i, tiles = jnp.asarray(i, jnp.int32), self.form.tiles
        if tiles & (tiles - 1) == 0:
            # A signed division takes registers that the backward kernel does not have.
            entry, tile = lax.shift_right_logical(i, jnp.int32(tiles.bit_length() - 1)), i & (tiles - 1)
        else:
            entry, tile = quotient_and_remainder(i, tiles)
        tile = self.form.tiles - 1 - tile if self.form.descending else tile
        return self.table[(*self.at, COUNTS + entry)] * self.form.tiles + tile


def tile_states(mask: Mask, sizes: tuple[int, int], tiles: tuple[int, int], full_tails: tuple[bool, bool]) -> Any:
    """Returns the state of each tile of queries and keys, int8 [B|1, N|1, q tiles, kv tiles].

    Args:
      mask: a bound mask.
      sizes: queries and keys.
      tiles: positions of their tiles.
      full_tails: for both, whether a ragged last tile may be full.
    """
    of_sizes = [intervals.tiles(size, tile) for size, tile in zip(sizes, tiles, strict=True)]
    states = mask.tile_states(*of_sizes)
    q, kv = ((end - start == tile) | may for (start, end), tile, may in zip(of_sizes, tiles, full_tails, strict=True))
    return intervals.minimum(states, np.where(q[:, None] & kv, FULL, BOUNDARY).astype(np.int8)[None, None])


def table(
    mask: Any, sizes: tuple[int, int], tiles: tuple[int, int], full_tails: tuple[bool, bool], by_keys: bool = False
) -> Any:
    """Returns the lists of all rows of tiles, or of the blocks that they divide: int32 [B|1, N|1, rows, 2 + entries].

    The arguments are those of `tile_states` and `Form.of`.
    """
    form = Form.of(mask, sizes, tiles, by_keys)
    if form.ready:
        return mask.lists[by_keys][:, :, 0, 0]
    states = tile_states(mask, sizes, tiles, full_tails)
    return block_lists.of_states(jnp.swapaxes(states, 2, 3) if by_keys else states, form.descending)


def in_table(table_ref: Any, b: Any, n: Any, row: Any, form: Form) -> VisitList:
    """Returns, in a kernel, the list of row `row` of tiles, for batch entry b and head n."""
    row = row if form.rows == 1 else quotient_and_remainder(row, form.rows)[0]
    at = *(i if extent > 1 else 0 for i, extent in zip((b, n), table_ref.shape, strict=False)), row
    boundary, count = (table_ref[(*at, i)] * form.tiles for i in range(COUNTS))
    return VisitList(table_ref, at, boundary, count, form)
