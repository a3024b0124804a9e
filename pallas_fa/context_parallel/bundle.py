"""Several arrays as one, so that they travel together: XLA computes under one exchange between devices, not under two."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Unbundle = Callable[[Any], Any]


def bundle(tree: Any) -> tuple[Any, Unbundle]:
    """(one flat array, what takes such an array apart again); differentiable where all arrays have one dtype.

    Of several dtypes it is made of bits, as wide as the widest array's where that is possible: to take these out costs
    nothing, while narrower bits of wider numbers must be copied together.
    """
    leaves, structure = jax.tree.flatten(tree)
    dtypes = {x.dtype for x in leaves}
    dtype = dtypes.pop() if len(dtypes) == 1 else _bits(leaves)
    shapes = [(x.shape, x.dtype) for x in leaves]
    ends = np.cumsum([x.size * x.dtype.itemsize // dtype.itemsize for x in leaves])

    def unbundle(flat: Any) -> Any:
        parts = jnp.split(flat, ends[:-1])
        return jax.tree.unflatten(
            structure, [_as(x, dtype).reshape(shape) for x, (shape, dtype) in zip(parts, shapes, strict=True)]
        )

    return jnp.concatenate([_as(x, dtype) for x in leaves]), unbundle


def _bits(leaves):
    """Unsigned integers of which all arrays have a whole number."""
    itemsize = math.gcd(*(x.size * x.dtype.itemsize for x in leaves), max(x.dtype.itemsize for x in leaves))
    return np.dtype(f"uint{8 * itemsize}")


def _as(x, dtype):
    """The bits of x, flat, as numbers of another dtype."""
    x = x.reshape(-1)
    if x.dtype.itemsize < dtype.itemsize:
        x = x.reshape(-1, dtype.itemsize // x.dtype.itemsize)
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype).reshape(-1)
