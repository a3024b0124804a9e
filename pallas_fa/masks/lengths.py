"""`Lengths`: what lies past the end of a sequence is padding."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.masks.base import Mask, all_of, parts_of
from pallas_fa.operands import intervals, offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED


def _joined_lengths(parts: list[Mask]) -> list[Mask]:
    """Bound parts, with all sequence lengths joined to one: the shortest."""
    found = [part for part in parts if isinstance(part, Lengths)]

    def shortest(values):
        values = [x for x in values if x is not None]
        return intervals.minimum(*values) if values else None

    lengths = Lengths(shortest([x.q_lengths for x in found]), shortest([x.kv_lengths for x in found]))
    others = [part for part in parts if not isinstance(part, Lengths)]
    return [lengths, *others] if len(found) > 1 else parts


@dataclasses.dataclass(frozen=True)
class Lengths(Mask):
    """t < q_lengths and s < kv_lengths; what lies past them is padding. None: no padding on that side.

    int, [*B], or with all dims, [*B, N, 1, 1] (per head). On its own or joined to others by `&` it is the same as the
    keyword arguments `query_seq_lengths` and `key_value_seq_lengths`: padding may hold NaN, and gets zero gradients.
    """

    join = staticmethod(_joined_lengths)
    q_lengths: Any = None
    kv_lengths: Any = None

    def __post_init__(self):
        for name in ("q_lengths", "kv_lengths"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, offsets.int_array(name, getattr(self, name)))

    def bind(self, dims, lengths):
        def bound(name, size):
            x = getattr(self, name)
            if x is None:
                return None
            x = dims.spanning(name, x, "B")
            if x.shape[2:] != (1, 1):
                raise ValueError(
                    f"{name}.shape={x.shape} varies over positions. Give one length per batch entry: [*B]."
                )
            return jnp.clip(x, 0, size).astype(jnp.int32)

        return Lengths(bound("q_lengths", dims.T), bound("kv_lengths", dims.S))

    def moved(self, part):

        def cut(lengths, axis):
            return None if lengths is None else jnp.clip(lengths - part.start[axis], 0, part.size[axis])

        return Lengths(cut(self.q_lengths, 2), cut(self.kv_lengths, 3))

    def allowed(self, b, n, t, s):
        queries = True if self.q_lengths is None else t < self.q_lengths
        keys = True if self.kv_lengths is None else s < self.kv_lengths
        return queries & keys

    def kv_range(self, t_lo, t_hi):
        return self._interval(self.kv_lengths, self.q_lengths, t_lo)

    def q_range(self, s_lo, s_hi):
        return self._interval(self.q_lengths, self.kv_lengths, s_lo)

    def full_kv_range(self, t_lo, t_hi):
        return self._interval(self.kv_lengths, self.q_lengths, t_hi - 1)

    def full_q_range(self, s_lo, s_hi):
        return self._interval(self.q_lengths, self.kv_lengths, s_hi - 1)

    @staticmethod
    def _interval(ends, limits, position):
        """Up to `ends`, where `position` is below `limits`; nothing elsewhere."""
        hi = UNBOUNDED if ends is None else ends[:, :, 0]
        if limits is None:
            return -UNBOUNDED, hi
        position, limits = intervals.of_one_rank(position, limits[:, :, 0])
        return -UNBOUNDED, jnp.where(position < limits, hi, -UNBOUNDED)


def lengths_of(mask: Mask | None) -> Lengths:
    """The sequence lengths that a bound mask gives; both None where it gives none."""
    return next(iter(parts_of(mask, Lengths)), Lengths())


def bind(mask: Mask | None, dims: Dims) -> Mask | None:
    """`mask` bound to one call."""
    if mask is None:
        return None
    # Lengths first: the alignment of a bottom-right Causal asks for them.
    given = all_of(parts_of(mask, Lengths))
    return mask.bind(dims, Lengths() if given is None else lengths_of(given.bind(dims, Lengths())))
