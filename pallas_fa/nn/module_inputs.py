"""Checks what a module projects, before Flax indexes its shape."""

from typing import Any

from pallas_fa.arguments.arrays import array


def module_inputs(**inputs: Any) -> tuple[Any, ...]:
    """Returns the inputs, arrays [*B, length, features], in their order; None stays None."""
    return tuple(None if x is None else _checked(name, x) for name, x in inputs.items())


def _checked(name, x):
    x = array(name, x, "an array [*B, length, features]", "Pass one of JAX or NumPy.")
    if x.ndim < 2:
        remedy = f"For one position, pass `{name}[None]`." if x.ndim else "Add the missing dims with jnp.expand_dims."
        raise ValueError(f"{name}.shape={tuple(x.shape)} must be [*B, length, features]. {remedy}")
    return x
