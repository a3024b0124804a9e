"""`Custom`: any elementwise function as a score."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_fa.operands import closure, custom, elementwise, offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.part import AtGlobalIndices, Part, at_positions
from pallas_fa.scores.base import Score


@dataclasses.dataclass(frozen=True, init=False)
class Custom(Score):
    """fn(x, b, n, t, s, *slices) -> x: any elementwise function in jnp.

    Each of `arrays` is broadcastable to [*B, N, T, S]; `fn` gets its values at (b, n, t, s), already broadcast or
    broadcastable, so it never indexes an argument. Arrays of a float dtype come to `fn` in the dtype of x, and get
    gradients; complex ones are refused. `fn` may index an array that it closes over by b, n, t and s; the kernels can't do
    that, and gradients of such an array raise. The result, of any float dtype and broadcastable to x, is converted to the
    dtype of x. `align`: as in `masks.Causal`, how t is counted: "bottom_right" gives the last query the position of the
    last key. Arrays are those of the call in either case.

    `fn` is traced once, as by `jax.jit`: a Python number that it reads from outside keeps the value of the first call. Pass
    what changes as an array.

    A call raises ValueError while it is traced if `fn` is not elementwise, and TypeError if its result is not a float.
    """

    fn: Callable[..., Any]
    arrays: tuple[Any, ...]
    align: offsets.Align

    def __init__(self, fn: Callable[..., Any], *arrays: Any, align: offsets.Align = "top_left"):
        offsets.check_align("Custom", align)
        custom.check_function(fn, "fn(x, b, n, t, s, *slices) -> x")
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", tuple(_real(custom.array("arrays", x)) for x in arrays))
        object.__setattr__(self, "align", align)

    def bind(self, dims: Dims, lengths: Any) -> "Custom":
        arrays = [dims.broadcastable(f"arrays[{i}]", x) for i, x in enumerate(self.arrays)]
        dtype, closed_over = elementwise.checked(self.fn, arrays, of_logit=True)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"scores.Custom: fn={self.fn!r} returned an array of dtype {dtype}; it must be a float. Convert it with"
                " `.astype(x.dtype)`; a rule that allows or forbids is a masks.Custom."
            )
        fn, closed_over = closure.convert(self.fn, closed_over)
        fn, start = at_positions(fn, 1, self.align, dims, lengths)
        return Custom(fn, *start, *arrays, *closed_over)

    def counted_from_start(self, dims: Dims) -> str | None:
        arrays = [dims.broadcastable(f"arrays[{i}]", x) for i, x in enumerate(self.arrays)]
        alone = self.align == "top_left" and elementwise.uses_queries(self.fn, arrays, of_logit=True)
        return "Custom" if alone else None

    def at_end(self) -> "Custom":
        return Custom(self.fn, *self.arrays, align="bottom_right")

    def moved(self, part: Part) -> "Custom":
        return Custom(AtGlobalIndices(self.fn, 1), *part.origin, *self.arrays)

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        y = jnp.asarray(self.fn(x, b, n, t, s, *self.arrays), x.dtype)
        return jnp.broadcast_to(y, x.shape)


def _real(x):
    """Returns `x`; raises TypeError for complex numbers, which would get no gradient: only floats have one."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise TypeError(
            f"arrays holds a {x.dtype}, which would get no gradient. Pass its real and its imaginary part, which do:"
            " scores.Custom(fn, x.real, x.imag)."
        )
    return x
