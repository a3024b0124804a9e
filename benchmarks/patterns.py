"""Masks that no interval of keys describes, as elementwise functions of positions: NumPy, jax.numpy or a kernel."""

from collections.abc import Callable
from typing import Any


def neighbours(t: Any, s: Any, side: int = 128, reach: int = 6) -> Any:
    """NATTEN in 2-D: an image of `side` columns, in which a token sees those `reach` rows and columns away."""
    near = lambda a, b: abs(a - b) <= reach
    return near(t // side, s // side) & near(t % side, s % side)


def sinks_and_window(t: Any, s: Any, sinks: int = 4, left: int = 1023) -> Any:
    """The first keys, and a window to the left."""
    return (s < sinks) | (t - s <= left)


PATTERNS: dict[str, Callable[[Any, Any], Any]] = {"neighbours": neighbours, "sinks_and_window": sinks_and_window}
