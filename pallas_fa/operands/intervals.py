"""Intervals [lo, hi) of positions: Python ints where they are known while tracing, else NumPy or JAX arrays."""

from typing import Any

import jax.numpy as jnp
import numpy as np

Range = tuple[Any, Any]
UNBOUNDED = 2**30  # "no bound": past every position, and safe to add to a position in int32


def maximum(*values: Any) -> Any:
    """The largest; a Python int where all are, NumPy where all are known while tracing, else jnp."""
    return _fold(max, "maximum", values)


def minimum(*values: Any) -> Any:
    """The smallest, as `maximum`."""
    return _fold(min, "minimum", values)


def add(a: Any, b: Any) -> Any:
    """a + b, of any ranks."""
    a, b = of_one_rank(a, b)
    return a + b


def subtract(a: Any, b: Any) -> Any:
    """a - b, of any ranks."""
    a, b = of_one_rank(a, b)
    return a - b


def where(condition: Any, x: Any, y: Any) -> Any:
    """`jnp.where`, kept in Python or NumPy where everything is known while tracing."""
    if isinstance(condition, (bool, np.bool_)):
        return x if condition else y
    return array_module(condition, x, y).where(*of_one_rank(condition, x, y))


def _fold(python, name, values):
    result = values[0]
    for value in values[1:]:
        both_int = isinstance(result, int) and isinstance(value, int)
        module = array_module(result, value)
        result = python(result, value) if both_int else getattr(module, name)(*of_one_rank(result, value))
    return result


def of_one_rank(*xs: Any) -> tuple[Any, ...]:
    """`xs` with leading dims of size 1, so that all but scalars have one rank: JAX can be told to refuse others."""
    rank = max(np.ndim(x) for x in xs)
    return tuple(x.reshape((1,) * (rank - x.ndim) + x.shape) if 0 < np.ndim(x) < rank else x for x in xs)


def array_module(*xs: Any) -> Any:
    """NumPy where all of `xs` are known while tracing, else jnp."""
    return np if all(isinstance(x, (bool, int, np.ndarray, np.generic)) for x in xs) else jnp
