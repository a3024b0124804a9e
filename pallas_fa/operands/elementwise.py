"""Whether a user's function of positions is elementwise: read off its jaxpr, before anything is computed.

Whoever evaluates the function of a mask or a score passes it one tile of the positions (b, n, t, s) at a time: its
result there must depend on the values of its arguments there alone, or it would depend on the tiles.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from pallas_fa.operands.position_axes import (
    NotElementwiseError,
    by_size,
    labels_of_results,
    labels_text,
    without_errors,
)

# Traced with both: what differs is computed from the sizes. Other axes, of closed-over arrays say, rarely have these sizes.
_SIZES = ((37, 41, 43, 47), (53, 59, 61, 67))
_NO_INDEX = (
    "An array passed as Custom(fn, array) arrives as its value at (b, n, t, s): use it without an index. Pass one that is"
    " looked up by t and by s twice: Custom(fn, ids[:, None, :, None], ids[:, None, None, :])."
)
_REMEDIES = {
    "gather": _NO_INDEX,
    "reshape": _NO_INDEX,
    "alignment": (
        "Take positions from b, n, t and s, and pass the array as an argument: Custom(fn, array), which arrives as its value"
        " at (b, n, t, s)."
    ),
    "result": "Leave the axes of the arguments in their places.",
}
_OTHER_REMEDY = (
    "Compute what needs other positions before the call, and pass the result as an array: Custom(fn, array), which"
    " arrives as its value at (b, n, t, s)."
)


def checked(fn: Callable[..., Any], arrays: Sequence[Any], of_logit: bool) -> tuple[np.dtype, tuple[Any, ...]]:
    """(the dtype of `fn(b, n, t, s, *arrays)`, or where `of_logit`, of `fn(x, b, n, t, s, *arrays)`; its constants).

    `arrays`: [B|1, N|1, T|1, S|1]. Raises ValueError where `fn` is not elementwise, TypeError where its result is not one
    array.
    """
    kind, found = "scores" if of_logit else "masks", []
    for sizes in _SIZES:
        letters = dict(zip(sizes, "BNTS", strict=True))
        args = _arguments(arrays, of_logit, sizes)
        closed, result = _traced(kind, fn, args)
        try:
            _check_place(*without_errors(labels_of_results(closed, [by_size(x.shape, letters) for x in args], letters)))
        except NotElementwiseError as e:
            what, name = e.args
            raise ValueError(
                f"{kind}.Custom: fn={fn!r} is not elementwise: {what}. It gets one tile of positions at a time, so that its"
                f" result at (b, n, t, s) may depend on its arguments there alone. {_REMEDIES.get(name, _OTHER_REMEDY)}"
            ) from None
        found.append(_numbers(closed.jaxpr))
    if found[0] != found[1]:
        raise ValueError(
            f"{kind}.Custom: fn={fn!r} computes with the sizes of its arguments, which are those of one tile of positions"
            " and differ between implementations. Close over sizes that are known outside as Python ints, e.g. with"
            " functools.partial."
        )
    return result.dtype, tuple(closed.consts)


def uses_queries(fn: Callable[..., Any], arrays: Sequence[Any], of_logit: bool) -> bool:
    """Returns whether `fn` reads t; arguments as in `checked`. True where it only hands t on to a function of its own."""
    closed, _ = _traced("scores" if of_logit else "masks", fn, _arguments(arrays, of_logit, _SIZES[0]))
    t = closed.jaxpr.invars[2 + of_logit]
    read = [x for eqn in closed.jaxpr.eqns for x in eqn.invars]
    return any(x is t for x in (*read, *closed.jaxpr.outvars))


def _arguments(arrays, of_logit, sizes):
    alone = lambda axis: tuple(size if i == axis else 1 for i, size in enumerate(sizes))
    spanned = lambda x: tuple(size if have != 1 else 1 for have, size in zip(x.shape, sizes, strict=True))
    # A score gets its float arrays in the dtype of the logit, a mask those of 16 bits as float32.
    as_float32 = lambda x: jnp.issubdtype(x.dtype, jnp.floating) and (of_logit or x.dtype.itemsize < 4)
    dtype = lambda x: jnp.float32 if as_float32(x) else jax.dtypes.canonicalize_dtype(x.dtype)
    logit = [jax.ShapeDtypeStruct(sizes, jnp.float32)] if of_logit else []
    index = [jax.ShapeDtypeStruct(alone(axis), jnp.int32) for axis in range(4)]
    return [*logit, *index, *(jax.ShapeDtypeStruct(spanned(x), dtype(x)) for x in arrays)]


def _traced(kind, fn, args):
    try:
        # Not `fn` itself, whose trace JAX would keep: what it closes over may have changed since.
        closed, result = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*args)
    except (TypeError, ValueError, AttributeError, IndexError) as e:
        reason = (str(e).splitlines() or [type(e).__name__])[0]
        shapes = ", ".join(str(x.shape) for x in args)
        raise (ValueError if isinstance(e, ValueError) else TypeError)(
            f"{kind}.Custom: fn={fn!r} failed: {reason.rstrip('.')}. Its arguments are traced arrays with the dims [b, n, t,"
            f" s] of a tile of positions, here {shapes}; it must take any sizes, with `&`, `|` and jnp.where where Python"
            " has `and`, `or` and `if`. Arrays that it closes over must be JAX's (jnp.asarray), and indexed by b, n, t, s,"
            " or be passed as Custom(fn, array)."
        ) from e
    if not isinstance(result, jax.ShapeDtypeStruct):
        raise TypeError(
            f"{kind}.Custom: fn={fn!r} returned {type(result).__name__}; it must return one array, broadcastable to the dims"
            " [b, n, t, s] of its arguments."
        )
    return closed, result


def _check_place(labels):
    """Raises unless the result, right-aligned, has the axes of positions in their order."""
    wanted = "BNTS"[max(4 - len(labels), 0) :]
    if len(labels) > 4 or any(have not in ("", want) for have, want in zip(labels, wanted, strict=True)):
        what = f"its result has the axes {labels_text(labels)} in the places of [B, N, T, S]"
        raise NotElementwiseError(what, "result")


def _numbers(jaxpr):
    """All numbers and options in a jaxpr, but shapes."""
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn.primitive.name)
        found += [repr(x.val) for x in eqn.invars if isinstance(x, core.Literal)]
        found += [(k, x) for k, x in sorted(eqn.params.items()) if isinstance(x, (bool, int, float, str))]
        for inner in core.jaxprs_in_params(eqn.params):
            found += _numbers(inner)
    return found
