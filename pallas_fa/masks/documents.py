"""`from_cu_seqlens`: the mask of documents that are packed one after the other, as flash-attn's varlen functions say it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import PartitionSpec

from pallas_fa.masks.band import check_side
from pallas_fa.masks.key_intervals import KeyIntervals
from pallas_fa.operands import offsets
from pallas_fa.operands.automatic_axes import explicit_sharding, on_automatic_axes
from pallas_fa.operands.pytree import as_flag, is_array, is_static_int


def from_cu_seqlens(
    cu_q: Any,
    cu_k: Any = None,
    *,
    T: int,
    is_causal: bool = False,
    window: tuple[Any, Any] | None = None,
) -> KeyIntervals:
    """Returns the mask under which the queries of each document attend to the keys of the same document.

    The convention of `flash_attn_varlen_func`: document i has the queries cu_q[i] <= t < cu_q[i + 1] and the keys
    cu_k[i] <= s < cu_k[i + 1], and `is_causal` and `window` are aligned bottom-right inside each document, so that its last
    query sees its last key. Documents may be empty. Tokens at or past the last document attend to nothing, and nothing
    attends to them; where they hold NaN, pass `query_seq_lengths=cu_q[-1]` and `key_value_seq_lengths=cu_k[-1]` too.

    Args:
      cu_q: int [*B, documents + 1], cumulative lengths of the queries, traced or not. They start at 0 and never fall. To
        keep one shape for any number of documents, repeat the last value.
      cu_k: those of the keys; None where they are those of the queries.
      T: the number of queries, padding included: query.shape[-3].
      is_causal: each query attends to the keys up to its own position in the document.
      window: (left, right), as `local_window_size`; None for no window. Arrays are [] or [*B].

    Returns:
      A mask of T queries. It holds two int32 arrays [*B, T]: make it once for all layers.

    Raises:
      TypeError, ValueError: an argument is wrong. The values of NumPy arrays and lists are checked, those of JAX arrays not.
    """
    is_known = not export.is_symbolic_dim(T)
    if is_known and (not is_static_int(T) or T < 0):
        raise ValueError(f"T={T!r} must be the number of queries, an int >= 0: query.shape[-3].")
    is_causal = as_flag("is_causal", is_causal)
    cu_q = _checked("cu_q", cu_q, T if is_known else None)
    cu_k = cu_q if cu_k is None else _checked("cu_k", cu_k, None)
    if cu_q.shape != cu_k.shape:
        raise ValueError(
            f"cu_q.shape={cu_q.shape} and cu_k.shape={cu_k.shape} differ: each document has queries and keys. Where it has"
            " none of one, repeat the value before."
        )
    sides = _sides(window, cu_q.shape[:-1])
    of_all = functools.partial(_of_batch, T, is_causal)
    sharding = explicit_sharding(cu_q, cu_k)
    if sharding is None:
        return KeyIntervals(*of_all(cu_q, cu_k, *sides))
    spec = PartitionSpec(*sharding.spec[:-1], None)
    return KeyIntervals(*on_automatic_axes(sharding.mesh, (spec, spec), of_all, cu_q, cu_k, *sides))


def _checked(name, cu, limit):
    """`cu` as int32 [*B, documents + 1]; `limit` is the largest value it may hold, or None."""
    if not is_array(cu):
        offsets.int_array(name, cu)
        cu = np.asarray(cu)  # whose values are known below
    cu = offsets.int_array(name, cu)
    remedy = "Prepend 0 to the cumulative sum of the lengths: [0, 5, 9] for two documents of lengths 5 and 4."
    if cu.ndim == 0 or cu.shape[-1] < 2:
        raise ValueError(f"{name}.shape={cu.shape} must be [*B, documents + 1], of at least one document. {remedy}")
    if isinstance(cu, np.ndarray):
        if (cu[..., 0] != 0).any() or (cu[..., 1:] < cu[..., :-1]).any():
            raise ValueError(f"{name}={cu} must start at 0 and never fall. {remedy}")
        if limit is not None and (cu[..., -1] > limit).any():
            raise ValueError(f"{name}={cu} ends past T={limit}, the number of queries. Pass T=query.shape[-3].")
    return offsets.as_int32(cu)


def _sides(window, batch):
    """The sides of the window, int32 [] or [*B] each; a side without a bound is a large number."""
    if window is not None and (not isinstance(window, (tuple, list)) or len(window) != 2):
        raise TypeError(f"window={window!r} must be a pair (left, right) of ints, int arrays or None (no bound).")
    sides = []
    for i, side in enumerate(window or (None, None)):
        side = check_side(f"window[{i}]", side, away="pass an array, jnp.array({})")
        side = offsets.LIMIT if side is None else side
        side = offsets.as_int32(side if is_array(side) else np.asarray(side))
        if side.ndim and side.shape != batch:
            remedy = offsets.broadcast_remedy(side.shape, batch, "Pass one int for all, or one for each batch entry.")
            raise ValueError(f"window[{i}].shape={side.shape} must be [] or [*B] = {batch}. {remedy}")
        sides.append(jnp.clip(side, -offsets.LIMIT, offsets.LIMIT))
    return sides


def _of_batch(T, is_causal, cu_q, cu_k, left, right):
    """(starts, ends) of the queries [*B, T]."""
    batch = cu_q.shape[:-1]
    right = jnp.minimum(right, 0) if is_causal else right
    of_one = lambda cu_q, cu_k, left, right: _intervals(cu_q, cu_k, left, right, T)
    for _ in batch:
        of_one = jax.vmap(of_one)
    return of_one(cu_q, cu_k, jnp.broadcast_to(left, batch), jnp.broadcast_to(right, batch))


@functools.partial(jax.jit, static_argnums=4, inline=True)
def _intervals(cu_q, cu_k, left, right, T):
    """(starts, ends) of the queries [T] of one batch entry."""
    t = jnp.arange(T, dtype=jnp.int32)
    # Unrolled, the search is a GPU kernel or two, and no loop of them.
    document = jnp.searchsorted(cu_q, t, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    known = (document >= 0) & (document < cu_q.size - 1)
    document = jnp.clip(document, 0, cu_q.size - 2)
    q_end, start, end = (
        x.at[i].get(mode="promise_in_bounds") for x, i in ((cu_q, document + 1), (cu_k, document), (cu_k, document + 1))
    )
    centre = t - q_end + end  # the key at the place of the query, counted from the ends
    start, end = jnp.maximum(start, centre - left), jnp.minimum(end, centre + right + 1)
    return jnp.where(known, start, 0), jnp.where(known, end, 0)
