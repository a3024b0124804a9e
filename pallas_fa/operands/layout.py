"""Layouts: the order of the dims of query, key, value and output. "BTNH" is the order in which this library thinks."""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax.numpy as jnp

Layout = Literal["BTNH", "BNTH"]
LAYOUTS = get_args(Layout)


def ordered(layout: Layout, of_dims: Sequence[Any]) -> tuple[Any, ...]:
    """Returns one thing for each dim, given in the order of "BTNH", in that of `layout`; also back, as its own inverse."""
    b, t, n, h = of_dims
    return (b, t, n, h) if layout == "BTNH" else (b, n, t, h)


def transpose(layout: Layout, x: Any) -> Any:
    """Returns an array [*B, ...] of `layout` in "BTNH", or one of "BTNH" in `layout`; None stays None."""
    return x if layout == "BTNH" or x is None else jnp.swapaxes(x, -3, -2)
