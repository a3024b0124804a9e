"""The keys of a decode cache that a single query sees. Flax's modules say it by an array over the whole cache."""

from typing import Any

import jax.numpy as jnp

from pallas_fa import masks
from pallas_fa.operands.dims import Dims


def bounded(mask: Any, dims: Dims) -> masks.Mask:
    """Returns `mask` with its bounds, outside of which kernels read nothing: the first and the last key it allows.

    Args:
      mask: bool, broadcastable to [*B, N, T, S].
      dims: the sizes of the call.
    """
    seen = jnp.broadcast_to(dims.broadcastable("mask", mask).any(axis=(1, 2)), (dims.B, dims.S))
    key = jnp.arange(dims.S, dtype=jnp.int32)
    first = jnp.where(seen, key, dims.S).min(axis=1).reshape(dims.batch)
    last = jnp.where(seen, key, -1).max(axis=1).reshape(dims.batch)
    from_first = masks.Window(last - first, None, offset=last)  # of query 0
    return masks.Dense(mask) & masks.Lengths(kv_lengths=last + 1) & from_first
