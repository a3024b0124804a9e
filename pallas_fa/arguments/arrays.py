"""Arguments that must be arrays; the errors say what was passed instead, and where that belongs."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa import masks, scores
from pallas_fa.operands.pages import Paged
from pallas_fa.operands.pytree import is_array, is_float


def float_array(name: str, x: Any, dims: str = "[*B, length, heads, head dim]") -> Any:
    """Returns `x` as an array of a float type; `dims` is what its dims are called."""
    x = array(name, x, f"a float array {dims}", "Pass an array of JAX or NumPy.")
    if not is_float(x.dtype):
        rule = (
            "a float type with a sign, of at most 64 bits" if jnp.issubdtype(x.dtype, jnp.floating) else "a float type"
        )
        raise TypeError(f"{name}.dtype={x.dtype} must be {rule}. Convert it, e.g. with `.astype(jnp.bfloat16)`.")
    return x if isinstance(x, (jax.Array, Paged)) else jnp.asarray(x)


def array(name: str, x: Any, what: str, remedy: str = "Leave it out for none.") -> Any:
    """Returns `x` as an array; an error names what `x` is instead. `what` says which array it must be."""
    if isinstance(x, jax.ShapeDtypeStruct):
        raise TypeError(f"{name}={x!r} has no values; it must be {what}. {_FOR_EXPLAIN}")
    if isinstance(x, Paged) or is_array(x):
        return x
    for kind, keyword in ((masks.Mask, "mask"), (scores.Score, "score")):
        if isinstance(x, kind) and keyword != name:
            raise TypeError(f"{name} is a {type(x).__name__}; it must be {what}. Pass it as `{keyword}=`.")
        if isinstance(x, type) and issubclass(x, kind):
            raise TypeError(f"{name} is the class {x.__name__}. Make one and pass it: `{keyword}={x.__name__}(...)`.")
    if callable(x):
        remedy = _OF_FUNCTIONS.get(name, remedy)
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as e:
        raise TypeError(f"{name}={x!r} is a {type(x).__name__}; it must be {what}. {remedy}") from e


def refuse_shapes(**arguments: Any) -> None:
    """Raises TypeError where one of the arguments, by name, is or holds a shape in the place of an array."""
    for name, x in arguments.items():
        for leaf in jax.tree.leaves(x):
            if isinstance(leaf, jax.ShapeDtypeStruct):
                shown = f"={leaf!r}" if leaf is x else f" holds {leaf!r}, which"
                raise TypeError(f"{name}{shown} has no values. {_FOR_EXPLAIN}")


_FOR_EXPLAIN = "Pass shapes alone to pallas_fa.explain, or to the call by jax.eval_shape."
_OF_FUNCTIONS = {
    "mask": "Wrap a function fn(b, n, t, s) as pallas_fa.masks.Custom(fn).",
    "bias": "Wrap a function fn(x, b, n, t, s) as pallas_fa.scores.Custom(fn), and pass it as `score=`.",
}
