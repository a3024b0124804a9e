"""`Lengths`: positions past the end of a sequence are padding."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.masks.base import Mask, all_of, parts_of
from pallas_fa.operands import intervals, offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED, Range
from pallas_fa.operands.part import Part


def _join_lengths(parts: list[Mask]) -> list[Mask]:
    """Joins all bound sequence lengths to one mask with the shortest."""
    all_lengths = [part for part in parts if isinstance(part, Lengths)]

    def shortest(values):
        values = [x for x in values if x is not None]
        return intervals.minimum(*values) if values else None

    joined = Lengths(shortest([x.q_lengths for x in all_lengths]), shortest([x.kv_lengths for x in all_lengths]))
    others = [part for part in parts if not isinstance(part, Lengths)]
    return [joined, *others] if len(all_lengths) > 1 else parts


@dataclasses.dataclass(frozen=True)
class Lengths(Mask):
    """Allows t < q_lengths and s < kv_lengths; later positions are padding.

    Alone or composed by `&`, it equals the arguments `query_seq_lengths` and `key_value_seq_lengths`: padding may hold NaN,
    and gets zero gradients.

    Attributes:
      q_lengths: int [*B], or [*B, N, 1, 1] for a length per head; None for no padding.
      kv_lengths: likewise.
    """

    join = staticmethod(_join_lengths)
    scalar_ranges = True
    exact_ranges = ("kv_range", "q_range")
    q_lengths: Any = None
    kv_lengths: Any = None

    def __post_init__(self):
        for name in ("q_lengths", "kv_lengths"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, offsets.int_array(name, getattr(self, name)))

    def bind(self, dims: Dims, lengths: Any) -> "Lengths":
        def bound(name, size):
            x = getattr(self, name)
            if x is None:
                return None
            return jnp.clip(offsets.per_sequence(name, x, dims), 0, size)

        return Lengths(bound("q_lengths", dims.T), bound("kv_lengths", dims.S))

    def at_end(self) -> "Lengths":
        raise ValueError(
            "mask holds a Lengths, but a cache knows its lengths, and others would move its last row. Say how many of the"
            " queries are real by lengths=, and hide rows by masks.Custom or by a bool array [B, 1, T, S]."
        )

    def moved(self, part: Part) -> "Lengths":
        def cut(lengths, axis):
            return None if lengths is None else jnp.clip(lengths - part.start[axis], 0, part.size[axis])

        return Lengths(cut(self.q_lengths, 2), cut(self.kv_lengths, 3))

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        queries = True if self.q_lengths is None else t < self.q_lengths
        keys = True if self.kv_lengths is None else s < self.kv_lengths
        return queries & keys

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self._interval(self.kv_lengths, self.q_lengths, t_lo)

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return self._interval(self.q_lengths, self.kv_lengths, s_lo)

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self._interval(self.kv_lengths, self.q_lengths, t_hi - 1)

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return self._interval(self.q_lengths, self.kv_lengths, s_hi - 1)

    @staticmethod
    def _interval(ends, limits, position):
        """Returns the range up to `ends` where `position` is below `limits`, and the empty range elsewhere."""
        hi = UNBOUNDED if ends is None else offsets.per_tile(ends)
        if limits is None:
            return -UNBOUNDED, hi
        position, limits = intervals.with_equal_ranks(position, offsets.per_tile(limits))
        return -UNBOUNDED, jnp.where(position < limits, hi, -UNBOUNDED)


def lengths_of(mask: Mask | None) -> Lengths:
    """Returns the sequence lengths of a bound mask; both are None if it has none."""
    return next(iter(parts_of(mask, Lengths)), Lengths())


def without_lengths(mask: Mask | None) -> Mask | None:
    """Returns the rest of a bound mask: what it says of positions that are no padding; None for all allowed."""
    return all_of([part for part in parts_of(mask, Mask) if not isinstance(part, Lengths)])


def bind(mask: Mask | None, dims: Dims) -> Mask | None:
    """Binds `mask` to one call."""
    if mask is None:
        return None
    # Lengths first: a bottom-right Causal aligns to them.
    lengths = all_of(parts_of(mask, Lengths))
    return mask.bind(dims, Lengths() if lengths is None else lengths_of(lengths.bind(dims, Lengths())))
