"""What the masks and scores of a user's function are made of: the function and its arrays, checked."""

from typing import Any

import jax.numpy as jnp

from pallas_fa.operands import offsets
from pallas_fa.operands.pytree import is_array, is_float


def check_function(fn: Any, form: str) -> None:
    """Raises TypeError unless `fn` is a function that can be part of a program; `form` is its signature in words."""
    if not callable(fn):
        raise TypeError(f"fn={fn!r} must be a function {form}.")
    try:
        hash(fn)
    except TypeError as e:
        raise TypeError(
            f"fn={fn!r} has no hash ({e}), but a function is part of the program that is compiled for it. Make its class"
            " hashable, such as @dataclasses.dataclass(frozen=True) with numbers in its fields, and pass arrays as"
            " Custom(fn, array)."
        ) from None


def array(name: str, x: Any) -> Any:
    """Returns `x` as an array for a user's function; raises where it is none, or JAX would change its values."""
    if not is_array(x):
        try:
            x = jnp.asarray(x)
        except (TypeError, ValueError, OverflowError) as e:
            raise TypeError(
                f"{name} holds a {type(x).__name__}; it must hold arrays, broadcastable to [*B, N, T, S] ({e})."
            ) from None
    if jnp.issubdtype(x.dtype, jnp.floating) and not is_float(x.dtype):
        lack = "no sign, as gradients do" if x.dtype.itemsize == 1 else "more than 64 bits"
        raise TypeError(f"{name} holds a {x.dtype}, which has {lack}. Convert it, e.g. with `.astype(jnp.float32)`.")
    if not any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.bool_, jnp.number)):
        raise TypeError(
            f"{name} holds a {x.dtype}, but must hold bools or numbers. Number other values, np.unique(x,"
            " return_inverse=True)[1]; of a PRNG key pass what is drawn from it, such as"
            " jax.random.bernoulli(key, shape=(T, S))."
        )
    remedy = "Number the values, np.unique(x, return_inverse=True)[1], or convert them to float."
    offsets.check_fits(name, x, remedy)
    return x
