"""Lists of what a row of blocks or tiles visits, where one interval would span gaps.

A list has boundary blocks first, then full ones. In the forward kernels each go from the last to the first: what lies past a
sequence length is then in the first one, as without lists. In the backward they go from the first to the last: under most
masks the CTAs of a head then start at different tiles of dQ, to which they would else add one after the other.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.masks.base import BOUNDARY, EMPTY

COUNTS = 2  # a list starts with how many boundary blocks it has, and how many blocks
_FEW = 512  # up to so many blocks, comparing all with all is quicker than a sort
_MOST_STATES = 2**20  # of a block mask that keeps its lists, which take eight times the memory


def of_states(states: Any, descending: bool) -> Any:
    """Returns the lists of all rows of states, [B|1, N|1, rows, blocks], int32 [B|1, N|1, rows, 2 + blocks], in this order.

    After the blocks that are visited come the others, so that an empty list, too, starts with the number of a block.
    """
    blocks = states.shape[-1]
    number = np.arange(blocks, dtype=np.int32)[None, None, None]
    boundary, visited = states == BOUNDARY, states > EMPTY
    kind = jnp.where(boundary, 0, jnp.where(visited, 1, 2)).astype(jnp.int32)
    order = kind * blocks + (blocks - 1 - number if descending else number)
    if blocks > _FEW:
        listed = lax.rem(jnp.sort(order, axis=-1), jnp.int32(blocks))
        listed = blocks - 1 - listed if descending else listed
        count = lambda x: x.sum(axis=-1, keepdims=True, dtype=jnp.int32)
        return jnp.concatenate([count(boundary), count(visited), listed], axis=-1)
    # Two sums, which XLA computes in one GPU kernel each, where a sort takes more.
    place = (order[..., None, :] < order[..., :, None]).sum(axis=-1, dtype=jnp.int32)
    column = np.arange(COUNTS + blocks, dtype=np.int32)[None, None, None, :, None]
    of_block = lambda x: x[..., None, :]
    found = jnp.where(of_block(place) == column - COUNTS, of_block(number), 0)
    counted = lambda x: of_block(x).astype(jnp.int32)
    found = jnp.where(column == 0, counted(boundary), jnp.where(column == 1, counted(visited), found))
    return found.sum(axis=-1, dtype=jnp.int32)


def of_blocks(states: Any, sizes: tuple[int, int], block: tuple[int, int]) -> tuple[Any, Any] | None:
    """Returns the lists of a block mask's rows and of its columns, as kernels read them, so that no call makes them.

    None where a last block is ragged, whose state is another in some kernels, and where they would take much memory.

    Args:
      states: int8 [B|1, N|1, rows, columns].
      sizes: (T, S).
      block: positions of a block.
    """
    if any(size % positions for size, positions in zip(sizes, block, strict=True)) or states.size > _MOST_STATES:
        return None
    return _both(states)


@jax.jit
def _both(states):
    return of_states(states, descending=True), of_states(jnp.swapaxes(states, 2, 3), descending=False)
