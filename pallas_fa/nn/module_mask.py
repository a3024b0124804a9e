"""Joins the window, the segment ids and the `mask` argument of a module's call to one mask, with and without a cache."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa import masks
from pallas_fa.arguments.masks import mask_array, segment_mask, window_mask
from pallas_fa.masks.base import all_of
from pallas_fa.masks.lengths import bind
from pallas_fa.nn.attention_fn import refuse_single_query
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import as_flag


def module_mask(
    mask: Any,
    dims: Dims,
    *,
    is_causal: bool = False,
    local_window_size: Any = None,
    query_segment_ids: Any = None,
    key_value_segment_ids: Any = None,
    cache_index: Any = None,
) -> Any:
    """Returns the `mask` for `attention_fn`: a `Mask`, an array broadcastable to [*B, N, T, S], or None.

    With a decode cache, t in a `Mask`, in the window and in `is_causal` is the position in the cache. The result is then an
    array, since Flax combines it with its own mask of the cache.

    Args:
      mask: an array of any dtype (nonzero: may attend), broadcastable to [*B, N, T, S]; a `Mask`; or None.
      dims: the sizes of the call; S is that of the cache.
      is_causal: as in `dot_product_attention`, as are the next three.
      local_window_size: (left, right), an int for both, or None.
      query_segment_ids: int [*B, T], or None.
      key_value_segment_ids: int [*B, S], or None.
      cache_index: the position of the single query in a decode cache, int32 []; None without a cache.
    """
    if cache_index is None:
        refuse_single_query(dims.T, dims.S, is_causal, local_window_size)
    rules = [
        masks.Causal() if as_flag("is_causal", is_causal) else None,
        window_mask(dims, local_window_size),
        segment_mask(dims, query_segment_ids, key_value_segment_ids),
        mask if isinstance(mask, masks.Mask) else None,
    ]
    rule = all_of([x for x in rules if x is not None])
    if rule is None:
        return mask
    is_array = mask is not None and not isinstance(mask, masks.Mask)
    array = jnp.asarray(mask_array(mask, "bool or number")).astype(jnp.bool_) if is_array else None
    if cache_index is None:
        return rule if array is None else rule & masks.Dense(array)
    row = _cache_row(rule, dims, cache_index)
    return row if array is None else row & array


def _cache_row(mask, dims, t):
    """Returns row t of `mask` over the S positions of a cache: bool [*B | 1s, N | 1, 1, S]."""
    bound = bind(mask, dataclasses.replace(dims, T=dims.S))
    row = jax.tree.map(lambda x: x if x.shape[2] == 1 else lax.dynamic_slice_in_dim(x, t, 1, axis=2), bound)
    b, n, s = (
        lax.broadcasted_iota(jnp.int32, tuple(size if i == axis else 1 for i in range(4)), axis)
        for axis, size in ((0, dims.B), (1, dims.N), (3, dims.S))
    )
    allowed = row.allowed(b, n, t, s)
    batch, heads, *_ = jnp.broadcast_shapes(jnp.shape(allowed), (1, 1, 1, dims.S))
    allowed = jnp.broadcast_to(allowed, (batch, heads, 1, dims.S))
    leading = (1,) * len(dims.batch) if batch == 1 else dims.batch
    return allowed.reshape(*leading, heads, 1, dims.S)
