"""Masks: the contract, and their composition by `&` and `|`.

A mask is a frozen pytree. Its arrays span the dims (b, n, t, s) that their shapes show; `bind` gives each the shape
[B|1, N|1, T|1, S|1]. Whoever evaluates a bound mask (the reference on the whole grid, XLA on a chunk, a kernel on a
tile) puts the slices for its tile in the arrays' places (`jax.tree.map`) and calls

- `allowed(b, n, t, s)`: absolute indices as broadcastable integer arrays -> bool, elementwise, in plain jnp;
- `kv_range(t_lo, t_hi)`: an interval [lo, hi) of keys outside which no query of [t_lo, t_hi) attends to anything;
- `full_kv_range(t_lo, t_hi)`: an interval of keys to all of which every query of [t_lo, t_hi) attends;
- `q_range(s_lo, s_hi)` and `full_q_range(s_lo, s_hi)`: the same questions asked from the keys.

Ranges may reach past the ends of the sequences; lo >= hi is the empty one. Masks without arrays answer for Python ints
(with ints: loop bounds fold), NumPy arrays and traced scalars. Masks with arrays answer on the whole arrays, for NumPy
arrays of tiles of one size, with int32 arrays that broadcast to [B, N, tiles].
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from pallas_fa.operands import intervals
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED, Range
from pallas_fa.operands.part import Part
from pallas_fa.operands.pytree import Node

EVERYTHING = (-UNBOUNDED, UNBOUNDED)
_NOTHING = (0, 0)


class Mask(Node):
    """A rule that says whether query t of head n in batch entry b may attend to key s. Combine with `&` and `|`."""

    # Joins all bound masks of this kind in a conjunction into fewer; None: each stays by itself.
    join: ClassVar[Callable[[list["Mask"]], list["Mask"]] | None] = None

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        """bool, broadcast over the indices and the mask's own (sliced) arrays."""
        raise NotImplementedError

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        """[lo, hi): keys that queries t_lo <= t < t_hi may attend to; conservative."""
        return EVERYTHING

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        """[lo, hi): queries that may attend to keys s_lo <= s < s_hi; conservative."""
        return EVERYTHING

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        """[lo, hi): keys to which all queries t_lo <= t < t_hi attend; may be smaller than the truth."""
        return _NOTHING

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        """[lo, hi): queries that attend to all keys s_lo <= s < s_hi; may be smaller than the truth."""
        return _NOTHING

    def bind(self, dims: Dims, lengths: Any) -> "Mask":
        """This mask for one call: arrays checked and shaped [B|1, N|1, T|1, S|1], alignment resolved.

        `lengths`: the sequence lengths of the call, a bound `Lengths`.
        """
        return self

    def moved(self, part: Part) -> "Mask":
        """This bound mask, whose arrays are cut to `part` already, at the part's own indices."""
        return self

    def __and__(self, other: "Mask") -> "Mask":
        return And(_parts(self, And) + _parts(_checked_mask(other, "&"), And))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(_parts(self, Or) + _parts(_checked_mask(other, "|"), Or))

    # NumPy would otherwise combine an array with a Mask element by element.
    __array_ufunc__ = None

    def __bool__(self):
        raise TypeError(
            f"a {type(self).__name__} is not True or False. Combine masks by `&` and `|`, not by `and` and `or`; ask for a"
            " missing one with `mask is None`."
        )

    def __rand__(self, other: Any) -> "Mask":
        return _checked_mask(other, "&") & self

    def __ror__(self, other: Any) -> "Mask":
        return _checked_mask(other, "|") | self


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """Allowed by every part; written `a & b`."""

    parts: tuple[Mask, ...]

    def bind(self, dims, lengths):
        parts = [part.bind(dims, lengths) for part in self.parts]
        for join in dict.fromkeys(type(part).join for part in parts):
            parts = join(parts) if join else parts
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def moved(self, part):
        return And(tuple(each.moved(part) for each in self.parts))

    def allowed(self, b, n, t, s):
        result = self.parts[0].allowed(b, n, t, s)
        for part in self.parts[1:]:
            result = result & part.allowed(b, n, t, s)
        return result

    def _ask(self, question, lo, hi):
        los, his = zip(*(getattr(part, question)(lo, hi) for part in self.parts), strict=True)
        return intervals.maximum(*los), intervals.minimum(*his)

    def kv_range(self, t_lo, t_hi):
        return self._ask("kv_range", t_lo, t_hi)

    def q_range(self, s_lo, s_hi):
        return self._ask("q_range", s_lo, s_hi)

    def full_kv_range(self, t_lo, t_hi):
        return self._ask("full_kv_range", t_lo, t_hi)

    def full_q_range(self, s_lo, s_hi):
        return self._ask("full_q_range", s_lo, s_hi)


@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """Allowed by any part; written `a | b`."""

    parts: tuple[Mask, ...]

    def bind(self, dims, lengths):
        return Or(tuple(part.bind(dims, lengths) for part in self.parts))

    def moved(self, part):
        return Or(tuple(each.moved(part) for each in self.parts))

    def allowed(self, b, n, t, s):
        result = self.parts[0].allowed(b, n, t, s)
        for part in self.parts[1:]:
            result = result | part.allowed(b, n, t, s)
        return result

    def _widest(self, question, lo, hi):
        answers = [getattr(part, question)(lo, hi) for part in self.parts]
        # An empty range must not widen the hull.
        starts = [intervals.where(a < b, a, UNBOUNDED) for a, b in answers]
        ends = [intervals.where(a < b, b, -UNBOUNDED) for a, b in answers]
        return intervals.minimum(*starts), intervals.maximum(*ends)

    def _longest(self, question, lo, hi):
        best_lo, best_hi = getattr(self.parts[0], question)(lo, hi)
        for part in self.parts[1:]:
            a, b = getattr(part, question)(lo, hi)
            # Halves: -UNBOUNDED to UNBOUNDED is too far for int32.
            length, best = intervals.of_one_rank(b // 2 - a // 2, best_hi // 2 - best_lo // 2)
            longer = length > best
            best_lo, best_hi = intervals.where(longer, a, best_lo), intervals.where(longer, b, best_hi)
        return best_lo, best_hi

    def kv_range(self, t_lo, t_hi):
        return self._widest("kv_range", t_lo, t_hi)

    def q_range(self, s_lo, s_hi):
        return self._widest("q_range", s_lo, s_hi)

    def full_kv_range(self, t_lo, t_hi):
        return self._longest("full_kv_range", t_lo, t_hi)

    def full_q_range(self, s_lo, s_hi):
        return self._longest("full_q_range", s_lo, s_hi)


def all_of(masks: list[Mask]) -> Mask | None:
    """The conjunction of `masks`; None when there are none."""
    parts = tuple(part for mask in masks for part in _parts(mask, And))
    return parts[0] if len(parts) == 1 else And(parts) if parts else None


def parts_of[M: Mask](mask: Mask | None, kind: type[M]) -> list[M]:
    """The parts of a conjunction (or the one mask) that are of `kind`."""
    return [part for part in _parts(mask, And) if isinstance(part, kind)]


def _parts(mask, kind):
    return mask.parts if isinstance(mask, kind) else (mask,)


def _checked_mask(x, operator):
    if isinstance(x, Mask):
        return x
    if isinstance(x, type) and issubclass(x, Mask):
        raise TypeError(f"a Mask {operator} the class {x.__name__}: make a mask of it, {x.__name__}(...).")
    raise TypeError(
        f"a Mask {operator} {type(x).__name__} has no meaning. Wrap a bool array as pallas_fa.masks.Dense(array) first."
    )
