"""Bundles several arrays into one, so that they travel in one exchange: XLA computes under one exchange, not under two.

Decision record: context-parallel/one-bundle-of-integers.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Unbundle = Callable[[Any], Any]


def bundle(tree: Any) -> tuple[Any, Unbundle]:
    """Returns one flat array, and a function that takes such an array apart; differentiable if all dtypes are equal.

    Arrays of several dtypes are bundled as bits, in unsigned integers as wide as the widest dtype if possible. Taking these
    apart is free, whereas narrow integers would have to be copied together to wider numbers.
    """
    leaves, structure = jax.tree.flatten(tree)
    dtypes = {x.dtype for x in leaves}
    dtype = dtypes.pop() if len(dtypes) == 1 else _integer_dtype(leaves)
    shapes = [(x.shape, x.dtype) for x in leaves]
    ends = np.cumsum([x.size * x.dtype.itemsize // dtype.itemsize for x in leaves])

    def unbundle(flat: Any) -> Any:
        parts = jnp.split(flat, ends[:-1])
        return jax.tree.unflatten(
            structure, [_bitcast(x, dtype).reshape(shape) for x, (shape, dtype) in zip(parts, shapes, strict=True)]
        )

    return jnp.concatenate([_bitcast(x, dtype) for x in leaves]), unbundle


def _integer_dtype(leaves):
    """Returns the widest unsigned integer dtype that divides each array's bytes, at most as wide as the widest dtype."""
    itemsize = math.gcd(*(x.size * x.dtype.itemsize for x in leaves), max(x.dtype.itemsize for x in leaves))
    return np.dtype(f"uint{8 * itemsize}")


def _bitcast(x, dtype):
    """Returns the bits of x as a flat array of another dtype."""
    x = x.reshape(-1)
    if x.dtype.itemsize < dtype.itemsize:
        x = x.reshape(-1, dtype.itemsize // x.dtype.itemsize)
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype).reshape(-1)
