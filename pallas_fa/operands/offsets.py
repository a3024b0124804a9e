"""Offsets between query and key positions: a static int, or an int array [*B]."""

from typing import Any

import jax.numpy as jnp

from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED
from pallas_fa.operands.pytree import is_array, is_static_int, is_static_number

_LIMIT = UNBOUNDED // 2  # more than any distance between positions; fits int32 with a position and a window added


def check(name: str, x: Any) -> Any:
    """Returns `x` as an int clipped to +-2^29, or as an int array; raises TypeError for anything else."""
    if is_static_number(x):
        if not is_static_int(x):
            raise TypeError(f"{name}={x!r} must be an int or an int array.")
        return max(-_LIMIT, min(_LIMIT, int(x)))
    return int_array(name, x)


def bind(offset: Any, dims: Dims) -> Any:
    """Returns the offset for one call: an int, or int32 [B|1, N|1, 1, 1]."""
    if not is_array(offset):
        return offset
    return jnp.clip(dims.spanning("offset", offset, "B"), -_LIMIT, _LIMIT).astype(jnp.int32)


def per_tile(offset: Any) -> Any:
    """Returns a bound offset as [B|1, N|1, 1], which broadcasts against tiles."""
    return offset[:, :, 0] if is_array(offset) else offset


def int_array(name: str, x: Any) -> Any:
    """Returns `x` as an int array; raises TypeError if it is none."""
    if not is_array(x):
        if not isinstance(x, (int, list, tuple)):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be an int array.")
        x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}.dtype={x.dtype} must be an integer type. Convert it with `.astype(jnp.int32)`.")
    return x
