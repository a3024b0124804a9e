"""Masks: the interface, and composition by `&` and `|`.

A mask is a frozen pytree. `bind` reshapes its arrays to [B|1, N|1, T|1, S|1]. An implementation evaluates a bound mask a
tile at a time (the reference all at once). It replaces the arrays by their slices for the tile (`jax.tree.map`), and calls

- `allowed(b, n, t, s)`: which positions are allowed, elementwise, in plain jnp.

Range questions, asked of the whole arrays before any loop, find the tiles worth visiting:

- `kv_range(t_lo, t_hi)`: an interval [lo, hi) of keys outside which no query of [t_lo, t_hi) attends to anything;
- `full_kv_range(t_lo, t_hi)`: an interval of keys to all of which every query of [t_lo, t_hi) attends;
- `q_range(s_lo, s_hi)` and `full_q_range(s_lo, s_hi)`: the same for queries that attend to keys [s_lo, s_hi).

Ranges may reach past the ends of the sequences; lo >= hi is the empty range. Masks without arrays take Python ints, NumPy
arrays and traced scalars; from ints they return ints, so that loop bounds fold. Masks with arrays take NumPy arrays that
bound tiles of one size, and return int32 arrays that broadcast to [B, N, tiles]. Those with `scalar_ranges` take ints in a
kernel too, with a scalar in the place of each array, and return scalars.

A mask in which a `BlockMask` says what is worth visiting is asked for the state of each tile instead, since one interval a
tile is too many: `tile_states(queries, keys)`. `kv_range` and the others then answer the hull.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np

from pallas_fa.operands import intervals
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED, Range
from pallas_fa.operands.part import Part
from pallas_fa.operands.pytree import Node, is_array

EVERYTHING = (-UNBOUNDED, UNBOUNDED)
_NOTHING = (0, 0)
EMPTY, BOUNDARY, FULL = 0, 1, 2  # the state of a tile: no pair of it is allowed, some may be, all are
Tiles = tuple[np.ndarray, np.ndarray]  # starts and ends of the tiles of a sequence


class Mask(Node):
    """A rule that says whether query t of head n in batch entry b may attend to key s. Compose with `&` and `|`.

    The methods are what implementations ask of a mask; who passes one to a call needs none of them.
    """

    # Simplifies a conjunction of bound masks, joining those of this kind; None where that is impossible.
    join: ClassVar[Callable[[list["Mask"]], list["Mask"]] | None] = None
    scalar_ranges: bool | property = False
    # Which of "kv_range" and "q_range" answer, asked about one position, what that position attends to, and no more.
    exact_ranges: tuple[str, ...] | property = ()

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        """Returns which positions are allowed: bool, broadcast over the indices and the mask's (sliced) arrays.

        Args:
          b: batch entries, global indices as an integer array; all four broadcast against each other.
          n: query heads.
          t: query positions.
          s: key positions.
        """
        raise NotImplementedError

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        """Returns [lo, hi): all keys that queries t_lo <= t < t_hi may attend to, possibly more."""
        return EVERYTHING

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        """Returns [lo, hi): all queries that may attend to keys s_lo <= s < s_hi, possibly more."""
        return EVERYTHING

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        """Returns [lo, hi): keys to which all queries t_lo <= t < t_hi attend, possibly not all such keys."""
        return _NOTHING

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        """Returns [lo, hi): queries that attend to all keys s_lo <= s < s_hi, possibly not all such queries."""
        return _NOTHING

    def tile_states(self, queries: Tiles, keys: Tiles) -> Any:
        """Returns the state of each tile of queries and keys: int8, broadcastable to [B, N, q tiles, kv tiles]."""
        (lo, hi), (full_lo, full_hi) = (
            [x[..., None] if np.ndim(x) else x for x in question(*queries)]
            for question in (self.kv_range, self.full_kv_range)
        )
        start, end = keys
        of_equal_ranks = lambda operation, a, b: operation(*intervals.with_equal_ranks(a, b))
        less_equal, both = (functools.partial(of_equal_ranks, x) for x in (operator.le, operator.and_))
        some = both(less_equal(lo, end - 1), less_equal(start + 1, hi))
        every = both(less_equal(full_lo, start), less_equal(end, full_hi))
        states = intervals.where(every, FULL, intervals.where(some, BOUNDARY, EMPTY)).astype(np.int8)
        return states.reshape((1,) * (4 - states.ndim) + states.shape)

    @property
    def has_blocks(self) -> bool:
        """Whether a `BlockMask` in it says what is worth visiting."""
        return False

    def tiles_of_lists(self, sizes: tuple[int, int], tiles: tuple[int, int]) -> tuple[int, int] | None:
        """Returns how many tiles of queries and of keys a block of the mask's own lists has (see `BlockMask.lists`).

        None where it has none, or tiles don't divide its blocks. The arguments are those of `in_tiles`.
        """
        return None

    def in_tiles(self, sizes: tuple[int, int], tiles: tuple[int, int]) -> "Mask":
        """Returns this bound mask as a kernel tests it inside of tiles that `tile_states` calls boundary tiles.

        Args:
          sizes: queries and keys.
          tiles: positions of their tiles.
        """
        return self

    def bind(self, dims: Dims, lengths: Any) -> "Mask":
        """Returns this mask bound to one call: arrays checked and shaped [B|1, N|1, T|1, S|1], alignment resolved.

        Args:
          dims: the sizes of the call.
          lengths: the sequence lengths of the call, a bound `Lengths`.
        """
        return self

    def counted_from_start(self, dims: Dims) -> str | None:
        """Returns what of this mask takes the first query of a call for position 0 of its sequence; None if nothing does.

        Args:
          dims: the sizes of the call.
        """
        return None

    def at_end(self) -> "Mask":
        """Returns this mask for queries that are the last positions of their sequences, and t such a position.

        Arrays over T are those of the call. Raises ValueError where the mask has no such meaning.
        """
        return self

    def moved(self, part: Part) -> "Mask":
        """Returns this bound mask at the indices of `part`, which start at 0. Its arrays are already cut to the part."""
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

    def __invert__(self):
        raise TypeError(
            f"~mask: a {type(self).__name__} has no opposite here. Write it as a function of its own, such as"
            " masks.Custom(lambda b, n, t, s: t < s) for what a causal mask hides."
        )

    def __rand__(self, other: Any) -> "Mask":
        return _checked_mask(other, "&") & self

    def __ror__(self, other: Any) -> "Mask":
        return _checked_mask(other, "|") | self


@dataclasses.dataclass(frozen=True)
class _Composed(Mask):
    """What `And` and `Or` have in common."""

    parts: tuple[Mask, ...]

    def __post_init__(self):
        name = type(self).__name__
        if not isinstance(self.parts, (tuple, list)) or not self.parts:
            raise TypeError(
                f"{name}: parts={self.parts!r} must be a tuple of one Mask or more. Pass {name}((a, b)), or compose by"
                " `&` and `|`."
            )
        object.__setattr__(self, "parts", tuple(_checked_mask(part, name) for part in self.parts))

    @property
    def scalar_ranges(self) -> bool:
        return all(part.scalar_ranges for part in self.parts)

    def moved(self, part: Part) -> Mask:
        return type(self)(tuple(each.moved(part) for each in self.parts))

    def counted_from_start(self, dims: Dims) -> str | None:
        return next(filter(None, (part.counted_from_start(dims) for part in self.parts)), None)

    def at_end(self) -> Mask:
        return type(self)(tuple(part.at_end() for part in self.parts))

    def in_tiles(self, sizes: tuple[int, int], tiles: tuple[int, int]) -> Mask:
        return type(self)(tuple(part.in_tiles(sizes, tiles) for part in self.parts))

    @property
    def has_blocks(self) -> bool:
        return any(part.has_blocks for part in self.parts)


@dataclasses.dataclass(frozen=True)
class And(_Composed):
    """Allowed by every part; written `a & b`."""

    def bind(self, dims: Dims, lengths: Any) -> Mask:
        parts = [part.bind(dims, lengths) for part in self.parts]
        for join in dict.fromkeys(type(part).join for part in parts):
            parts = join(parts) if join else parts
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    @property
    def exact_ranges(self) -> tuple[str, ...]:
        return tuple(x for x in ("kv_range", "q_range") if all(x in part.exact_ranges for part in self.parts))

    def tile_states(self, queries: Tiles, keys: Tiles) -> Any:
        return intervals.minimum(*(part.tile_states(queries, keys) for part in self.parts))

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        result = self.parts[0].allowed(b, n, t, s)
        for part in self.parts[1:]:
            result = result & part.allowed(b, n, t, s)
        return result

    def _intersection(self, question, lo, hi):
        los, his = zip(*(getattr(part, question)(lo, hi) for part in self.parts), strict=True)
        return intervals.maximum(*los), intervals.minimum(*his)

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self._intersection("kv_range", t_lo, t_hi)

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return self._intersection("q_range", s_lo, s_hi)

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self._intersection("full_kv_range", t_lo, t_hi)

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return self._intersection("full_q_range", s_lo, s_hi)


@dataclasses.dataclass(frozen=True)
class Or(_Composed):
    """Allowed by any part; written `a | b`."""

    def bind(self, dims: Dims, lengths: Any) -> Mask:
        return Or(tuple(part.bind(dims, lengths) for part in self.parts))

    def tile_states(self, queries: Tiles, keys: Tiles) -> Any:
        return intervals.maximum(*(part.tile_states(queries, keys) for part in self.parts))

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        result = self.parts[0].allowed(b, n, t, s)
        for part in self.parts[1:]:
            result = result | part.allowed(b, n, t, s)
        return result

    def _answers(self, question, lo, hi):
        return [intervals.with_equal_ranks(*getattr(part, question)(lo, hi)) for part in self.parts]

    def _union_hull(self, question, lo, hi):
        answers = self._answers(question, lo, hi)
        # An empty range must not widen the hull.
        starts = [intervals.where(a < b, a, UNBOUNDED) for a, b in answers]
        ends = [intervals.where(a < b, b, -UNBOUNDED) for a, b in answers]
        return intervals.minimum(*starts), intervals.maximum(*ends)

    def _longest(self, question, lo, hi):
        (best_lo, best_hi), *others = self._answers(question, lo, hi)
        for a, b in others:
            # Half the length: that of (-UNBOUNDED, UNBOUNDED) exceeds int32.
            length, best = intervals.with_equal_ranks(b // 2 - a // 2, best_hi // 2 - best_lo // 2)
            longer = length > best
            best_lo, best_hi = intervals.where(longer, a, best_lo), intervals.where(longer, b, best_hi)
        return best_lo, best_hi

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self._union_hull("kv_range", t_lo, t_hi)

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return self._union_hull("q_range", s_lo, s_hi)

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self._longest("full_kv_range", t_lo, t_hi)

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return self._longest("full_q_range", s_lo, s_hi)


def all_of(masks: list[Mask]) -> Mask | None:
    """Returns the conjunction of `masks`; None if there are none."""
    parts = tuple(part for mask in masks for part in _parts(mask, And))
    return parts[0] if len(parts) == 1 else And(parts) if parts else None


def parts_of[M: Mask](mask: Mask | None, kind: type[M]) -> list[M]:
    """Returns the parts of a conjunction (or of a single mask) that are of `kind`."""
    return [part for part in _parts(mask, And) if isinstance(part, kind)]


def remedy_for(x: Any, otherwise: str) -> str:
    """Returns how to make a mask of `x`, which is none; `otherwise` where that is not known."""
    if isinstance(x, type) and issubclass(x, Mask):
        return f"Make a mask of the class: {x.__name__}(...)."
    if callable(x):
        return "Wrap a function fn(b, n, t, s) as pallas_fa.masks.Custom(fn)."
    return "Wrap a bool array as pallas_fa.masks.Dense(array)." if isinstance(x, list) or is_array(x) else otherwise


def _parts(mask, kind):
    return mask.parts if isinstance(mask, kind) else (mask,)


def _checked_mask(x, operator):
    if isinstance(x, Mask):
        return x
    if isinstance(x, type) and issubclass(x, Mask):
        raise TypeError(f"a Mask {operator} the class {x.__name__}: make a mask of it, {x.__name__}(...).")
    wrap = "Wrap a bool array as pallas_fa.masks.Dense(array) first."
    raise TypeError(f"a Mask {operator} {type(x).__name__} has no meaning. {remedy_for(x, wrap)}")
