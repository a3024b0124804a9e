"""Arrays that span the diagonals of [T, S]: one value for each offset s - t.

Such an array is bound as [B|1, N|1, T + S - 1], the only rank 3 among the arrays of masks and scores. Entry i is for
s - t = i - (T - 1). The part that belongs to a tile of queries and keys is a slice. Its value in the tile is that slice
along the tile's diagonals, so that a mask or score function sees it like any other array.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def spans(x: Any) -> bool:
    """Returns whether the bound array `x` spans the diagonals."""
    return len(x.shape) == 3


def first(T: int, t: Any, rows: int, s: Any) -> Any:
    """Returns where the slice of a tile starts, whose length is rows + columns - 1.

    Args:
      T: the length of the whole query sequence.
      t: the first query of the tile.
      rows: its queries.
      s: its first key.
    """
    return T - rows - t + s


def tile(x: Any, rows: int) -> Any:
    """Returns the tile [..., rows, columns] whose diagonals are x [..., rows + columns - 1].

    Without a gather, whose transpose would add up in no fixed order: rows of length L + 1, read as rows of length L, move
    on by one place each.
    """
    lead, length = x.shape[:-1], x.shape[-1]
    longer = jnp.pad(x, [(0, 0)] * len(lead) + [(0, 1)])
    repeated = jnp.broadcast_to(longer[..., None, :], (*lead, rows, length + 1))
    flat = repeated.reshape(*lead, rows * (length + 1))[..., : rows * length]
    return flat.reshape(*lead, rows, length)[..., rows - 1 :]


def gathered(x: Any, t: Any, s: Any) -> Any:
    """Returns the values at queries t [1, 1, T, 1] and keys s [1, 1, 1, S], all keys: what `tile` is, by definition."""
    zero = x.shape[2] - s.shape[3]
    return jnp.asarray(x)[:, :, (s - t + zero)[0, 0]]


def replace(tree: Any, fn: Callable[[Any], Any]) -> Any:
    """Returns `tree` with fn(x) in the place of each array x that spans the diagonals."""
    return jax.tree.map(lambda x: fn(x) if spans(x) else x, tree)
