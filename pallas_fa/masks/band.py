"""`Causal` and `Window`: masks that compare positions."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from pallas_fa.masks.base import Mask
from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED, Range, add, subtract
from pallas_fa.operands.part import Part
from pallas_fa.operands.pytree import is_static_int


def _join_bands(parts: list[Mask]) -> list[Mask]:
    """Joins all bound causal masks and windows of static offsets to one window: one test instead of many."""
    bands = [part for part in parts if isinstance(part, (Causal, Window)) and is_static_int(part.offset)]
    lefts = [part.offset - part.left for part in bands if isinstance(part, Window) and part.left is not None]
    rights = [part.offset + part.right for part in bands if isinstance(part, Window) and part.right is not None]
    rights += [part.offset for part in bands if isinstance(part, Causal)]
    if len(bands) < 2 or not lefts or not rights:
        return parts
    left, right = max(lefts), min(rights)
    if not 0 <= right - left < UNBOUNDED // 2 or abs(right) > UNBOUNDED // 2:  # empty, or beyond a window's limits
        return parts
    window = Window(left=right - left, right=0, offset=right)
    return [window, *(part for part in parts if not any(part is band for band in bands))]


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """Allows s <= t + offset.

    Attributes:
      align: "top_left" counts from the starts of the sequences, as `jax.nn` does. "bottom_right" lets the last query see the
        last key: it adds S - T, or the difference of the sequence lengths, if these are passed as keywords or as a
        `Lengths` composed by `&`.
      offset: an int, or an int array [*B], for chunked prefill and decoding into a cache.
    """

    join = staticmethod(_join_bands)
    align: Literal["top_left", "bottom_right"] = "top_left"
    offset: Any = 0

    def __post_init__(self):
        if self.align not in ("top_left", "bottom_right"):
            raise ValueError(f"align={self.align!r} is not a way to align Causal. Use 'top_left' or 'bottom_right'.")
        object.__setattr__(self, "offset", offsets.check("offset", self.offset))

    def bind(self, dims: Dims, lengths: Any) -> "Causal":
        offset = offsets.bind(self.offset, dims)
        if self.align == "bottom_right":
            q_lengths = dims.T if lengths.q_lengths is None else lengths.q_lengths
            kv_lengths = dims.S if lengths.kv_lengths is None else lengths.kv_lengths
            offset = offset + kv_lengths - q_lengths
        return Causal(offset=offset)

    def moved(self, part: Part) -> "Causal":
        return Causal(offset=self.offset + part.shift)

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        return s <= t + self.offset

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return -UNBOUNDED, add(t_hi, offsets.per_tile(self.offset))

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return subtract(s_lo, offsets.per_tile(self.offset)), UNBOUNDED

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return -UNBOUNDED, add(t_lo, offsets.per_tile(self.offset)) + 1

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return subtract(s_hi - 1, offsets.per_tile(self.offset)), UNBOUNDED


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """Allows t + offset - left <= s <= t + offset + right.

    Attributes:
      left: an int >= 0, or None for no bound on that side.
      right: an int >= 0, or None for no bound on that side.
      offset: an int, or an int array [*B], for chunked prefill and decoding into a cache.
    """

    join = staticmethod(_join_bands)
    left: int | None = None
    right: int | None = None
    offset: Any = 0

    def __post_init__(self):
        for name in ("left", "right"):
            value = getattr(self, name)
            if value is None:
                continue
            if not is_static_int(value):
                raise TypeError(f"{name}={value!r} must be an int (keys on that side of the query) or None (no bound).")
            if value < 0:
                raise ValueError(f"{name}={value} must be >= 0: a window includes the query's own position. Use 0.")
            object.__setattr__(self, name, int(value) if value < UNBOUNDED // 2 else None)
        object.__setattr__(self, "offset", offsets.check("offset", self.offset))

    def bind(self, dims: Dims, lengths: Any) -> "Window":
        return Window(self.left, self.right, offsets.bind(self.offset, dims))

    def moved(self, part: Part) -> "Window":
        return Window(self.left, self.right, self.offset + part.shift)

    @property
    def _bounds(self):
        """How far the window reaches left and right of t, each broadcastable against tiles."""
        left, right = (UNBOUNDED if self.left is None else self.left), (UNBOUNDED if self.right is None else self.right)
        offset = offsets.per_tile(self.offset)
        return left - offset, right + offset

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        centre = t + self.offset
        if self.left is None:
            return s <= centre + (UNBOUNDED if self.right is None else self.right)
        if self.right is None:
            return s >= centre - self.left
        # One comparison for both bounds: left of the window, the difference wraps around to a large number.
        return (s - centre + self.left).astype(jnp.uint32) <= self.left + self.right

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        left, right = self._bounds
        return subtract(t_lo, left), add(t_hi, right)

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        left, right = self._bounds
        return subtract(s_lo, right), add(s_hi, left)

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        left, right = self._bounds
        return subtract(t_hi - 1, left), add(t_lo, right) + 1

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        left, right = self._bounds
        return subtract(s_hi - 1, right), add(s_lo, left) + 1
