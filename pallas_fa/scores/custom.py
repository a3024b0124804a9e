"""`Custom`: any elementwise function as a score."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_fa.operands.part import AtGlobalIndices
from pallas_fa.operands.pytree import is_array
from pallas_fa.scores.base import Score


@dataclasses.dataclass(frozen=True, init=False)
class Custom(Score):
    """fn(x, b, n, t, s, *slices) -> x: any elementwise function in jnp.

    Each of `arrays` is broadcastable to [*B, N, T, S]; `fn` gets its values at (b, n, t, s), already broadcast or
    broadcastable, so it never indexes an array. It must not close over arrays. Arrays of a float dtype come to `fn` in the
    dtype of x, and get gradients.
    """

    fn: Callable[..., Any]
    arrays: tuple[Any, ...]

    def __init__(self, fn: Callable[..., Any], *arrays: Any):
        if not callable(fn):
            raise TypeError(f"fn={fn!r} must be a function fn(x, b, n, t, s, *slices) -> x.")
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", tuple(x if is_array(x) else jnp.asarray(x) for x in arrays))

    def bind(self, dims):
        return Custom(self.fn, *(dims.broadcastable(f"arrays[{i}]", x) for i, x in enumerate(self.arrays)))

    def moved(self, part):
        return Custom(AtGlobalIndices(self.fn, 1), *part.origin, *self.arrays)

    def apply(self, x, b, n, t, s):
        return self.fn(x, b, n, t, s, *self.arrays)
