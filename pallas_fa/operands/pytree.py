"""`Node`: base class of masks and scores, which are frozen dataclasses and pytrees.

A field that holds an array, a node or a tuple of them is a child. Every other field (numbers, strings, functions, None)
is static: part of the tree's structure. So `Causal(offset=3)` folds into the program while tracing, and the array of
`Causal(offset=array)` is an argument of the program.
"""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def is_array(x: Any) -> bool:
    """Returns whether `x` is an array or stands for one (a tracer, a ShapeDtypeStruct, a variable of Flax nnx).

    Those of other libraries do not, nor do references (`jax.new_ref`), nor NumPy's kinds of arrays that JAX refuses or that
    have other methods.
    """
    if isinstance(x, (jax.Array, jax.ShapeDtypeStruct, np.generic)):
        return True
    if isinstance(x, np.ndarray):
        return not isinstance(x, (np.ma.MaskedArray, np.matrix))
    return hasattr(x, "__jax_array__") and hasattr(x, "reshape") and isinstance(getattr(x, "dtype", None), np.dtype)


def is_one_of(x: Any, names: tuple[Any, ...]) -> bool:
    """Returns whether `x` is one of `names`; an array, which compares element by element, is none."""
    return not is_array(x) and x in names


def is_static_number(x: Any) -> bool:
    """Returns whether `x` is a Python or NumPy scalar, which is known while tracing."""
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def is_static_int(x: Any) -> bool:
    """Returns whether `x` is a Python or NumPy scalar of integer value."""
    return is_static_number(x) and (isinstance(x, (int, np.integer)) or math.isfinite(x) and x == int(x))


def as_python(x: Any) -> Any:
    """Returns a static number as one of Python: beside a scalar of NumPy, NumPy would round bounds to its dtype."""
    return x.item() if isinstance(x, np.generic) else x


def is_finite(x: Any, dtype: Any = np.float32) -> bool:
    """Returns whether a static number is finite in the dtype of logits: float64 for inputs of it, else float32."""
    return bool(abs(as_python(x)) <= float(np.finfo(np.float64 if dtype == np.float64 else np.float32).max))


def is_float(dtype: Any) -> bool:
    """Returns whether `dtype` is one of JAX's floats, with a sign: float8_e8m0fnu holds powers of two, scales of others."""
    is_floating = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 8  # more in np.longdouble
    return is_floating and dtype != jnp.float8_e8m0fnu


def has_8_bits(dtype: Any) -> bool:
    """Returns whether `dtype`, one of JAX's floats, has 8 bits; NumPy has no smaller size for floats of 4 and 6."""
    return jnp.finfo(dtype).bits == 8


def names_float(dtype: Any) -> bool:
    """Returns whether `dtype` names one for which `is_float` holds; anything but a dtype does not."""
    try:
        return dtype is not None and is_float(jnp.dtype(dtype))
    except TypeError:
        return False


def as_count(name: str, x: Any, remedy: str, least: int = 1) -> int:
    """Returns `x` as an int; raises ValueError unless it is an integer of Python or NumPy, and at least `least`."""
    try:
        count = least - 1 if isinstance(x, bool) else operator.index(x)
    except TypeError:
        count = least - 1
    if isinstance(x, Tracer):
        raise ValueError(
            f"{name}={x!r} must be an int, known while tracing. {remedy} Where it is an argument of a jitted function, name"
            " it in static_argnames."
        )
    if count < least:
        raise ValueError(f"{name}={x!r} must be an int of at least {least}. {remedy}")
    return count


def as_flag(name: str, x: Any) -> bool:
    """Returns `x` as a bool, None as False; raises TypeError for all else, of which some, like "no", count as True."""
    if not isinstance(x, (bool, np.bool_, type(None))):
        raise TypeError(
            f"{name}={x!r} must be True or False, known while tracing. Pass one of them; where it is an argument of a"
            " jitted function, name it in static_argnames."
        )
    return bool(x)


def arrays_of(tree: Any, which: Callable[[Any], bool]) -> tuple[list[Any], Callable[..., Any]]:
    """Returns the arrays (`which`) in a tree of arguments, and a function that rebuilds the tree around others."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda x: x is None)

    def rebuild(arrays):
        arrays = iter(arrays)
        return jax.tree.unflatten(structure, [next(arrays) if which(x) else x for x in leaves])

    return [x for x in leaves if which(x)], rebuild


class Node:
    """Base of frozen dataclasses that are pytrees; registers every subclass."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_pytree_with_keys(cls, cls._flatten_with_keys, cls._unflatten, cls._flatten)

    def _flatten(self):
        names = [f.name for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        # A node that JAX rebuilt may hold placeholders, which look static: its fields stay what they were.
        children = getattr(self, "_children", None)
        if children is None:
            children = tuple(name for name in names if _is_child(getattr(self, name)))
        static = tuple((name, getattr(self, name)) for name in names if name not in children)
        return tuple(getattr(self, name) for name in children), (children, static)

    def _flatten_with_keys(self):
        values, aux = self._flatten()
        keys = (jax.tree_util.GetAttrKey(name) for name in aux[0])
        return tuple(zip(keys, values, strict=True)), aux

    @classmethod
    def _unflatten(cls, aux, values) -> Self:
        names, static = aux
        node = object.__new__(cls)  # not __init__: JAX unflattens with placeholders that no check should see
        for name, value in (*static, *zip(names, values, strict=True)):
            object.__setattr__(node, name, value)
        object.__setattr__(node, "_children", names)
        return node


def _is_child(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_child, value))
    return isinstance(value, Node) or is_array(value)
