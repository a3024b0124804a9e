"""`Causal` and `Window`: masks that compare positions."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa.masks.base import Mask
from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED, Range, add, subtract
from pallas_fa.operands.part import Part
from pallas_fa.operands.pytree import is_array, is_static_int, is_static_number


def _join_bands(parts: list[Mask]) -> list[Mask]:
    """Joins all bound causal masks and windows without arrays to one window: one test instead of many."""
    bands = [part for part in parts if isinstance(part, (Causal, Window)) and not jax.tree.leaves(part)]
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
    scalar_ranges = True
    exact_ranges = ("kv_range", "q_range")
    align: offsets.Align = "top_left"
    offset: Any = 0

    def __post_init__(self):
        offsets.check_align("Causal", self.align)
        object.__setattr__(self, "offset", offsets.check("offset", self.offset))

    def bind(self, dims: Dims, lengths: Any) -> "Causal":
        return Causal(offset=offsets.bind_aligned(self.offset, self.align, dims, lengths))

    def counted_from_start(self, dims: Dims) -> str | None:
        return "Causal" if offsets.counts_from_start(self.align, self.offset) else None

    def at_end(self) -> "Causal":
        offsets.check_at_end("Causal", self.align, self.offset)
        return dataclasses.replace(self, align="bottom_right")

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


_AWAY = "pass an array, jnp.array({}), or the offset= of masks.Window"


def check_side(name: str, x: Any, away: str = _AWAY) -> Any:
    """Returns a side of a window: an int >= 0, None for no bound, or an int array; raises for anything else.

    `away` is how to have a window away from the query's own position, with the value of the side in the place of {}.
    """
    if x is None:
        return None
    if isinstance(x, (bool, np.bool_, tuple, list)) or (is_static_number(x) and not is_static_int(x)):
        raise TypeError(f"{name}={x!r} must be an int (keys on that side), an int array, or None (no bound).")
    if not is_static_number(x):
        return offsets.int_array(name, x)
    if x < 0:
        raise ValueError(
            f"{name}={x} must not be negative. For no bound on that side (-1 in flash-attn) pass None; for a window away"
            f" from the query's own position {away.format(x)}."
        )
    return int(x) if int(x) < UNBOUNDED // 2 else None


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """Allows t + offset - left <= s <= t + offset + right.

    `left` and `right` are each an int >= 0, None for no bound on that side, or an int array, traced or not: one value for
    all, [*B], or [*B, N, 1, 1] for a window per head. Tiles outside are skipped in either case. A negative value in an array
    means what the inequality says, as in `jax.nn`: with left=-1 a query does not see itself, and left + right < 0 is an
    empty window.

    Attributes:
      left: keys before the query's own position, which is t + offset.
      right: keys after it.
      offset: an int, or an int array [*B], for chunked prefill and decoding into a cache.
      align: as in `Causal`.
    """

    join = staticmethod(_join_bands)
    scalar_ranges = True
    exact_ranges = ("kv_range", "q_range")
    left: Any = None
    right: Any = None
    offset: Any = 0
    align: offsets.Align = "top_left"

    def __post_init__(self):
        offsets.check_align("Window", self.align)
        for name in ("left", "right"):
            object.__setattr__(self, name, check_side(name, getattr(self, name)))
        object.__setattr__(self, "offset", offsets.check("offset", self.offset))

    def bind(self, dims: Dims, lengths: Any) -> "Window":
        left, right = (offsets.bind(name, getattr(self, name), dims) for name in ("left", "right"))
        return Window(left, right, offsets.bind_aligned(self.offset, self.align, dims, lengths))

    def counted_from_start(self, dims: Dims) -> str | None:
        return "Window" if offsets.counts_from_start(self.align, self.offset) else None

    def at_end(self) -> "Window":
        offsets.check_at_end("Window", self.align, self.offset)
        return dataclasses.replace(self, align="bottom_right")

    def moved(self, part: Part) -> "Window":
        return Window(self.left, self.right, self.offset + part.shift)

    @property
    def _bounds(self):
        """How far the window reaches left and right of t, each broadcastable against tiles; None for no bound."""
        left, right = (None if x is None else offsets.per_tile(x) for x in (self.left, self.right))
        offset = offsets.per_tile(self.offset)
        return None if left is None else left - offset, None if right is None else right + offset

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        centre = t + self.offset
        if self.left is None:
            return s <= centre + (UNBOUNDED if self.right is None else self.right)
        if self.right is None:
            return s >= centre - self.left
        if is_array(self.left) or is_array(self.right):
            return (s >= centre - self.left) & (s <= centre + self.right)
        # One comparison for both bounds: left of the window, the difference wraps around to a large number.
        return (s - centre + self.left).astype(jnp.uint32) <= self.left + self.right

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        left, right = self._bounds
        return _before(t_lo, left), _after(t_hi, right)

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        left, right = self._bounds
        return _before(s_lo, right), _after(s_hi, left)

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        left, right = self._bounds
        return _before(t_hi - 1, left), _after(t_lo + 1, right)

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        left, right = self._bounds
        return _before(s_hi - 1, right), _after(s_lo + 1, left)


def _before(position, distance):
    return -UNBOUNDED if distance is None else subtract(position, distance)


def _after(position, distance):
    return UNBOUNDED if distance is None else add(position, distance)
