"""Offsets from the positions of queries to those of keys: an int, known while tracing, or an int array [*B]."""

from typing import Any

import jax.numpy as jnp

from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED
from pallas_fa.operands.pytree import is_array, is_static_int, is_static_number

_LIMIT = UNBOUNDED // 2  # further than any two positions are apart, and safe to add to a position and a window in int32


def checked(name: str, x: Any) -> Any:
    """`x`, an int within +-2^29 or an int array."""
    if is_static_number(x):
        if not is_static_int(x):
            raise TypeError(f"{name}={x!r} must be an int or an int array.")
        return max(-_LIMIT, min(_LIMIT, int(x)))
    return int_array(name, x)


def bound(offset: Any, dims: Dims) -> Any:
    """An offset for one call: an int, or int32 [B|1, N|1, 1, 1]."""
    if not is_array(offset):
        return offset
    return jnp.clip(dims.spanning("offset", offset, "B"), -_LIMIT, _LIMIT).astype(jnp.int32)


def per_tile(offset: Any) -> Any:
    """A bound offset as [B, N, 1], against tiles."""
    return offset[:, :, 0] if is_array(offset) else offset


def int_array(name: str, x: Any) -> Any:
    """`x` as an int array."""
    if not is_array(x):
        if not isinstance(x, (int, list, tuple)):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be an int array.")
        x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}.dtype={x.dtype} must be an integer type. Convert it with `.astype(jnp.int32)`.")
    return x
