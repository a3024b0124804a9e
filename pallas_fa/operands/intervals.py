"""Arithmetic on intervals [lo, hi) of positions, which are Python ints, NumPy arrays or JAX arrays.

Bounds that are known while tracing stay in Python or NumPy, so that loop bounds fold into the program.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

Range = tuple[Any, Any]
UNBOUNDED = 2**30  # past every position, and small enough to add to a position in int32


def tiles(size: int, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where tiles of `size` positions start and end; the last may be short.

    Of int32, as all positions: with 64-bit types, JAX's strict promotion refuses NumPy's own integers beside them.
    """
    starts = np.arange(0, size, tile, dtype=np.int32)
    return starts, np.minimum(starts + tile, size)


def maximum(*values: Any) -> Any:
    """Returns the elementwise maximum: an int if all are ints, of NumPy if all are known while tracing, else of jnp."""
    return _fold(max, "maximum", values)


def minimum(*values: Any) -> Any:
    """Returns the elementwise minimum; types as in `maximum`."""
    return _fold(min, "minimum", values)


def add(a: Any, b: Any) -> Any:
    """Returns a + b for any two ranks."""
    a, b = with_equal_ranks(a, b)
    return a + b


def subtract(a: Any, b: Any) -> Any:
    """Returns a - b for any two ranks."""
    a, b = with_equal_ranks(a, b)
    return a - b


def where(condition: Any, x: Any, y: Any) -> Any:
    """Returns x where `condition` holds, else y; in Python or NumPy if all three are known while tracing."""
    if isinstance(condition, (bool, np.bool_)):
        return x if condition else y
    return array_module(condition, x, y).where(*with_equal_ranks(condition, x, y))


def _fold(python, name, values):
    result = values[0]
    for value in values[1:]:
        both_int = isinstance(result, int) and isinstance(value, int)
        module = array_module(result, value)
        result = python(result, value) if both_int else getattr(module, name)(*with_equal_ranks(result, value))
    return result


def with_equal_ranks(*xs: Any) -> tuple[Any, ...]:
    """Adds leading dims of size 1, so that all but scalars have the same rank.

    With `jax_numpy_rank_promotion="raise"` JAX refuses operands of different ranks.
    """
    rank = max(np.ndim(x) for x in xs)
    return tuple(x.reshape((1,) * (rank - x.ndim) + x.shape) if 0 < np.ndim(x) < rank else x for x in xs)


def array_module(*xs: Any) -> Any:
    """Returns NumPy if all of `xs` are known while tracing, else jax.numpy."""
    return np if all(isinstance(x, (bool, int, np.ndarray, np.generic)) for x in xs) else jnp
