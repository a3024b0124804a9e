"""Which chunks of one axis each chunk of the other needs, by the ranges of the mask: what the loops over tiles visit."""

from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.masks import Causal, Lengths, Mask, Window
from pallas_fa.masks.base import all_of, parts_of
from pallas_fa.operands import intervals


def loop_over_visited(
    mask: Mask | None, question: Literal["kv_range", "q_range"], outer: Chunks, inner: Chunks
) -> Callable[[Any, Callable[[Any, Any], Any], Any], Any]:
    """Returns loop(i, body, carry), which loops body(j, carry) over the inner chunks j that outer chunk i needs.

    The arguments are those of `visited_interval`. The loop covers that interval; a block mask leaves out the chunks in it
    that no block needs.
    """
    if mask is None or not mask.has_blocks:
        visited = visited_interval(mask, question, outer, inner)
        return lambda i, body, carry: lax.fori_loop(*visited(i), body, carry)
    sides = (outer, inner) if question == "kv_range" else (inner, outer)
    needed = mask.tile_states(*map(_tiles, sides)).max(axis=(0, 1)) > 0
    needed = jnp.broadcast_to(needed, tuple(side.count for side in sides))
    needed = needed if question == "kv_range" else needed.T
    counts, lists = needed.sum(axis=1, dtype=jnp.int32), jnp.argsort(~needed, axis=1)
    return lambda i, body, carry: lax.fori_loop(
        np.int32(0), counts[i], lambda n, carry: body(lists[i, n], carry), carry
    )


def visited_interval(
    mask: Mask | None, question: Literal["kv_range", "q_range"], outer: Chunks, inner: Chunks
) -> Callable[[Any], tuple[Any, Any]]:
    """Finds the inner chunks that each outer chunk needs.

    Args:
      mask: a bound mask, or None.
      question: "kv_range" if the inner chunks are keys, "q_range" if they are queries.
      outer: the axis of the outer loop.
      inner: the axis of the inner loop.

    Returns:
      A function of an outer chunk: the first inner chunk, and one past the last, that any batch entry or head needs.
    """
    if not isinstance(outer.count, int):  # masks that compute with positions alone can be asked about unknown tiles
        mask = all_of([part for kind in (Causal, Window, Lengths) for part in parts_of(mask, kind)])
    if mask is None:
        return lambda i: (np.int32(0), inner.last)
    lo, hi = hull(mask, question, outer, inner.size)
    # Nothing is negative here; `//` on JAX arrays would be ten operations. Decision record: xla/fewer-primitives.
    divide = np.floor_divide if isinstance(lo, np.ndarray) else lax.div
    chunk = np.int32(inner.chunk)
    first, end = divide(lo, chunk), divide(hi + (chunk - 1), chunk)
    at = lambda x, i: lax.dynamic_index_in_dim(x, i, keepdims=False, allow_negative_indices=False)
    return lambda i: (at(first, i), at(end, i))


def hull(mask: Mask, question: Literal["kv_range", "q_range"], outer: Chunks, size: Any) -> tuple[Any, Any]:
    """Returns the interval of positions of the other axis that each outer chunk needs, for any batch entry or head.

    Args:
      mask: a bound mask.
      question: "kv_range" if the other axis has the keys, "q_range" if it has the queries.
      outer: the axis in chunks.
      size: that of the other axis.

    Returns:
      (starts, ends), each int32 [chunks], of NumPy where they are known while tracing. An empty interval is (size, 0).
    """
    lo, hi = getattr(mask, question)(*_tiles(outer))
    xnp = intervals.array_module(lo, hi)
    lo, hi = xnp.maximum(xnp.asarray(lo, np.int32), 0), xnp.minimum(xnp.asarray(hi, np.int32), size)
    lo, hi = intervals.with_equal_ranks(lo, hi)
    needed = lo < hi
    lo, hi = xnp.where(needed, lo, size), xnp.where(needed, hi, 0)
    lo, hi = (xnp.broadcast_to(x, (*x.shape[:-1], outer.count)).reshape(-1, outer.count) for x in (lo, hi))
    return lo.min(axis=0), hi.max(axis=0)


def _tiles(chunks):
    if isinstance(chunks.count, int):
        starts = np.minimum(np.arange(chunks.count, dtype=np.int32) * chunks.chunk, chunks.size - chunks.chunk)
    else:
        starts = jnp.arange(chunks.count, dtype=jnp.int32) * chunks.chunk
    return starts, starts + chunks.chunk
