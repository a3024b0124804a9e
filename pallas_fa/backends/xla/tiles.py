"""What a tile of logits meets: its parts of score, mask and dropout, and where its gradients go.

Tile (i, j) holds the logits of query chunk i and key chunk j.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.backends.xla.matmuls import in_groups, joined
from pallas_fa.operands import diagonals
from pallas_fa.softmax import tile
from pallas_fa.softmax.dropout import Dropout


def cut_tile(tree: Any, queries: Chunks, i: Any, keys: Chunks, j: Any) -> Any:
    """Cuts the arrays of a bound score or mask to tile (i, j).

    Args:
      tree: a bound score or mask, or None.
      queries: the query axis in chunks.
      i: index of a query chunk.
      keys: the key axis in chunks.
      j: index of a key chunk.
    """
    cut_array = lambda x: x if diagonals.spans(x) else keys.cut(queries.cut(x, i), j)
    return cut_diagonals(jax.tree.map(cut_array, tree), queries, i, keys, j)


def cut_diagonals(tree: Any, queries: Chunks, i: Any, keys: Chunks, j: Any) -> Any:
    """Cuts only those arrays of a bound score or mask that span the diagonals; arguments as for `cut_tile`."""
    start, length = _first_diagonal(queries, i, keys, j), queries.chunk + keys.chunk - 1

    def cut(x):
        x = x.astype(np.promote_types(x.dtype, np.float32))  # so that the gradient of no tile is rounded
        return lax.dynamic_slice_in_dim(x, start, length, 2, allow_negative_indices=False)

    return diagonals.replace(tree, cut)


def _first_diagonal(queries, i, keys, j):
    return diagonals.first(queries.size, queries.start(i), queries.chunk, keys.start(j))


def masked_scores(x: Any, score_ij: Any, mask: Any, queries: Chunks, i: Any, keys: Chunks, j: Any) -> Any:
    """Applies score and mask to tile (i, j).

    Args:
      x: scaled logits [B, N, t, s].
      score_ij: the score of this tile, from `cut_tile`, or None.
      mask: the bound mask of the whole problem, or None.
      queries: the query axis in chunks.
      i: index of a query chunk.
      keys: the key axis in chunks.
      j: index of a key chunk.
    """
    if score_ij is None and mask is None:
        return x
    positions = _positions(x.shape, queries, i, keys, j)
    score_ij = diagonals.replace(score_ij, lambda a: diagonals.tile(a.astype(x.dtype), queries.chunk))
    mask_ij = cut_tile(mask, queries, i, keys, j)
    return tile.masked_scores(x, score_ij, mask_ij, *positions)[0]


def masked_groups(x: Any, score_ij: Any, mask: Any, queries: Chunks, i: Any, keys: Chunks, j: Any) -> Any:
    """Does what `masked_scores` does, to logits [B, K, N // K, t, s].

    A mask alone is applied in this shape, that of a matmul: XLA then fuses it with the softmax.
    """
    B, K, group, *tile_shape = x.shape
    if score_ij is not None or mask is None:
        return in_groups(masked_scores(joined(x), score_ij, mask, queries, i, keys, j), K)
    ok = cut_tile(mask, queries, i, keys, j).allowed(*_positions((B, K * group, *tile_shape), queries, i, keys, j))
    # A mask may answer for all with one bool.
    ok = jnp.broadcast_to(ok, np.broadcast_shapes(np.shape(ok), (1, 1, 1, 1)))
    return jnp.where(in_groups(ok, K), x, -jnp.inf)


def _positions(shape, queries, i, keys, j):
    """Batch entries, query heads, query and key positions, broadcastable to `shape`, that of logits [B, N, t, s]."""
    B, N = shape[:2]
    b, n = lax.broadcasted_iota(jnp.int32, (B, 1, 1, 1), 0), lax.broadcasted_iota(jnp.int32, (1, N, 1, 1), 1)
    return b, n, queries.index(i), keys.index(j)


def dropping(dropout: Dropout | None, queries: Chunks, i: Any, keys: Chunks, j: Any) -> Callable[[Any], Any]:
    """Returns the function that drops elements of an array [B, N, t, s] of tile (i, j); the identity without dropout."""
    if dropout is None:
        return lambda x: x
    if not all(isinstance(x, int) for x in (queries.chunk, keys.chunk)):
        return lambda x: dropout.apply(x, queries.index(i), keys.index(j))
    start = lambda chunks, i: 0 if chunks.is_whole else chunks.start(i)
    keeps = dropout.keeps_tile(start(queries, i), queries.chunk, start(keys, j), keys.chunk)
    keeps = lax.optimization_barrier(keeps)  # once, for all heads that share it and for both products of the backward
    return lambda x: dropout.scaled(x, keeps)


def add_tile(d: Any, d_ij: Any, queries: Chunks, i: Any, keys: Chunks, j: Any) -> Any:
    """Adds the gradient of tile (i, j) to that of a whole array: the transpose of `cut_tile`.

    Args:
      d: the gradient of a bound array.
      d_ij: the gradient of what `cut_tile` returns of it.
      queries: the query axis in chunks.
      i: index of a query chunk.
      keys: the key axis in chunks.
      j: index of a key chunk.
    """
    starts = [jnp.int32(0)] * d.ndim
    if diagonals.spans(d):
        starts[2] = _first_diagonal(queries, i, keys, j)
    else:
        for chunks, n in ((queries, i), (keys, j)):
            if d.shape[chunks.axis] > 1:
                starts[chunks.axis] = chunks.start(n)
    old = lax.dynamic_slice(d, starts, d_ij.shape, allow_negative_indices=False)
    return lax.dynamic_update_slice(d, old + d_ij.astype(d.dtype), starts, allow_negative_indices=False)
