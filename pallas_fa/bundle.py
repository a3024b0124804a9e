"""Several arrays as one, so that they travel together: XLA computes under one exchange between devices, not under two."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Unbundle = Callable[[Any], Any]


def bundle(tree: Any) -> tuple[Any, Unbundle]:
    """(one flat array, what takes such an array apart again); differentiable where all arrays have one dtype."""
    leaves, structure = jax.tree.flatten(tree)
    dtypes = {x.dtype for x in leaves}
    dtype = dtypes.pop() if len(dtypes) == 1 else _bits(min(x.dtype.itemsize for x in leaves))
    shapes = [(x.shape, x.dtype) for x in leaves]
    ends = np.cumsum([x.size * x.dtype.itemsize // dtype.itemsize for x in leaves])

    def unbundle(flat: Any) -> Any:
        parts = jnp.split(flat, ends[:-1])
        return jax.tree.unflatten(structure, [_restored(x, *like) for x, like in zip(parts, shapes, strict=True)])

    return jnp.concatenate([_as(x, dtype).reshape(-1) for x in leaves]), unbundle


def _bits(itemsize):
    return np.dtype(f"uint{8 * itemsize}")


def _as(x, dtype):
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def _restored(flat, shape, dtype):
    if flat.dtype != dtype and flat.dtype.itemsize < dtype.itemsize:
        flat = flat.reshape(-1, dtype.itemsize // flat.dtype.itemsize)
    return _as(flat, dtype).reshape(shape)
