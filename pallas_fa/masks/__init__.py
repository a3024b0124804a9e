"""The mask algebra: which query may attend to which key.

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
from typing import Any, Literal

import jax.numpy as jnp

from pallas_fa.operands import offsets, ranges
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.part import AtOrigin, Part
from pallas_fa.operands.pytree import Node, is_array, is_static_int
from pallas_fa.operands.ranges import FAR, Range

_EVERYTHING = (-FAR, FAR)
_NOTHING = (0, 0)


class Mask(Node):
    """A rule that says whether query t of head n in batch entry b may attend to key s. Combine with `&` and `|`."""

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        """bool, broadcast over the indices and the mask's own (sliced) arrays."""
        raise NotImplementedError

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        """[lo, hi): keys that queries t_lo <= t < t_hi may attend to; conservative."""
        return _EVERYTHING

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        """[lo, hi): queries that may attend to keys s_lo <= s < s_hi; conservative."""
        return _EVERYTHING

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        """[lo, hi): keys to which all queries t_lo <= t < t_hi attend; may be smaller than the truth."""
        return _NOTHING

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        """[lo, hi): queries that attend to all keys s_lo <= s < s_hi; may be smaller than the truth."""
        return _NOTHING

    def bind(self, dims: Dims, lengths: "Lengths") -> "Mask":
        """This mask for one call: arrays checked and shaped [B|1, N|1, T|1, S|1], alignment resolved."""
        return self

    def moved(self, part: Part) -> "Mask":
        """This bound mask, whose arrays are cut to `part` already, at the part's own indices."""
        return self

    def __and__(self, other: "Mask") -> "Mask":
        return And(_parts(self, And) + _parts(_checked_mask(other, "&"), And))

    def __or__(self, other: "Mask") -> "Mask":
        return Or(_parts(self, Or) + _parts(_checked_mask(other, "|"), Or))

    def __rand__(self, other: Any) -> "Mask":
        return _checked_mask(other, "&") & self

    def __ror__(self, other: Any) -> "Mask":
        return _checked_mask(other, "|") | self


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """s <= t + offset.

    `align="top_left"` counts from the starts of the sequences, as `jax.nn` does; `"bottom_right"` lets the last query
    see the last key: it adds S - T, or the difference of the sequence lengths where those are given (as keywords, or
    as a `Lengths` joined by `&`). `offset`: an int, or an int array [*B] (chunked prefill, decoding into a cache).
    """

    align: Literal["top_left", "bottom_right"] = "top_left"
    offset: Any = 0

    def __post_init__(self):
        if self.align not in ("top_left", "bottom_right"):
            raise ValueError(f"align={self.align!r} is not a way to align Causal. Use 'top_left' or 'bottom_right'.")
        object.__setattr__(self, "offset", offsets.checked("offset", self.offset))

    def bind(self, dims, lengths):
        offset = offsets.bound(self.offset, dims)
        if self.align == "bottom_right":
            q_lengths = dims.T if lengths.q_lengths is None else lengths.q_lengths
            kv_lengths = dims.S if lengths.kv_lengths is None else lengths.kv_lengths
            offset = offset + kv_lengths - q_lengths
        return Causal(offset=offset)

    def moved(self, part):
        return Causal(offset=self.offset + part.shift)

    def allowed(self, b, n, t, s):
        return s <= t + self.offset

    def kv_range(self, t_lo, t_hi):
        return -FAR, t_hi + offsets.per_tile(self.offset)

    def q_range(self, s_lo, s_hi):
        return s_lo - offsets.per_tile(self.offset), FAR

    def full_kv_range(self, t_lo, t_hi):
        return -FAR, t_lo + offsets.per_tile(self.offset) + 1

    def full_q_range(self, s_lo, s_hi):
        return s_hi - 1 - offsets.per_tile(self.offset), FAR


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """t + offset - left <= s <= t + offset + right, both ends included; None is no bound on that side.

    `offset`: an int, or an int array [*B] (chunked prefill, decoding into a cache).
    """

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
            object.__setattr__(self, name, int(value) if value < FAR // 2 else None)
        object.__setattr__(self, "offset", offsets.checked("offset", self.offset))

    def bind(self, dims, lengths):
        return Window(self.left, self.right, offsets.bound(self.offset, dims))

    def moved(self, part):
        return Window(self.left, self.right, self.offset + part.shift)

    @property
    def _bounds(self):
        """How far the window reaches left and right of t, against tiles."""
        left, right = (FAR if self.left is None else self.left), (FAR if self.right is None else self.right)
        offset = offsets.per_tile(self.offset)
        return left - offset, right + offset

    def allowed(self, b, n, t, s):
        centre = t + self.offset
        if self.left is None:
            return s <= centre + (FAR if self.right is None else self.right)
        if self.right is None:
            return s >= centre - self.left
        # Both bounds in one comparison: left of the window, the difference wraps to a large number.
        return (s - centre + self.left).astype(jnp.uint32) <= self.left + self.right

    def kv_range(self, t_lo, t_hi):
        left, right = self._bounds
        return t_lo - left, t_hi + right

    def q_range(self, s_lo, s_hi):
        left, right = self._bounds
        return s_lo - right, s_hi + left

    def full_kv_range(self, t_lo, t_hi):
        left, right = self._bounds
        return t_hi - 1 - left, t_lo + right + 1

    def full_q_range(self, s_lo, s_hi):
        left, right = self._bounds
        return s_hi - 1 - right, s_lo + left + 1


@dataclasses.dataclass(frozen=True)
class Segments(Mask):
    """q_ids[t] == kv_ids[s]: packed documents. Ids are compared for equality; no value is special.

    Shapes [*B, T] and [*B, S] (or [T] and [S], alike for the whole batch), int.
    """

    q_ids: Any
    kv_ids: Any

    def __post_init__(self):
        for name in ("q_ids", "kv_ids"):
            object.__setattr__(self, name, offsets.int_array(name, getattr(self, name)))

    def bind(self, dims, lengths):
        q_ids, kv_ids = dims.spanning("q_ids", self.q_ids, "BT"), dims.spanning("kv_ids", self.kv_ids, "BS")
        for name, ids, other, own in (("q_ids", q_ids, 3, "query: [*B, T]"), ("kv_ids", kv_ids, 2, "key: [*B, S]")):
            if ids.shape[other] > 1:
                raise ValueError(f"{name}.shape={ids.shape} varies over both sequences. Give one id per {own}.")
        return Segments(q_ids, kv_ids)

    def allowed(self, b, n, t, s):
        return self.q_ids == self.kv_ids

    def kv_range(self, t_lo, t_hi):
        return ranges.of_shared_ids(self.q_ids, 2, t_lo, t_hi, self.kv_ids, 3)

    def q_range(self, s_lo, s_hi):
        return ranges.of_shared_ids(self.kv_ids, 3, s_lo, s_hi, self.q_ids, 2)

    def full_kv_range(self, t_lo, t_hi):
        return ranges.of_one_id(self.q_ids, 2, t_lo, t_hi, self.kv_ids, 3)

    def full_q_range(self, s_lo, s_hi):
        return ranges.of_one_id(self.kv_ids, 3, s_lo, s_hi, self.q_ids, 2)


@dataclasses.dataclass(frozen=True)
class Lengths(Mask):
    """t < q_lengths and s < kv_lengths; what lies past them is padding. None: no padding on that side.

    int, [*B], or with all dims, [*B, N, 1, 1] (per head). On its own or joined to others by `&` it is the same as the
    keyword arguments `query_seq_lengths` and `key_value_seq_lengths`: padding may hold NaN, and gets zero gradients.
    """

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
        hi = FAR if ends is None else ends[:, :, 0]
        return -FAR, (hi if limits is None else jnp.where(position < limits[:, :, 0], hi, -FAR))


@dataclasses.dataclass(frozen=True)
class Dense(Mask):
    """`array` itself, bool, broadcastable to [*B, N, T, S]; its broadcast dims are never materialised."""

    array: Any

    def __post_init__(self):
        if not is_array(self.array) or self.array.dtype != jnp.bool_:
            kind = getattr(self.array, "dtype", type(self.array).__name__)
            raise TypeError(
                f"Dense takes a bool array, got {kind}. True means 'may attend': for a 0/1 mask pass `array != 0`; for"
                " an additive mask use pallas_fa.scores.Bias or `bias=`."
            )

    def bind(self, dims, lengths):
        return Dense(dims.broadcastable("mask", self.array))

    def allowed(self, b, n, t, s):
        return self.array

    def kv_range(self, t_lo, t_hi):
        return ranges.hull(*ranges.blocks(ranges.reduce_tiles(self.array, 2, t_lo, t_hi, jnp.any), 3, jnp.any))

    def q_range(self, s_lo, s_hi):
        return ranges.hull(*ranges.blocks(ranges.reduce_tiles(self.array, 3, s_lo, s_hi, jnp.any), 2, jnp.any))

    def full_kv_range(self, t_lo, t_hi):
        return ranges.first_run(*ranges.blocks(ranges.reduce_tiles(self.array, 2, t_lo, t_hi, jnp.all), 3, jnp.all))

    def full_q_range(self, s_lo, s_hi):
        return ranges.first_run(*ranges.blocks(ranges.reduce_tiles(self.array, 3, s_lo, s_hi, jnp.all), 2, jnp.all))


@dataclasses.dataclass(frozen=True, init=False)
class Custom(Mask):
    """fn(b, n, t, s, *slices) -> bool: any elementwise rule in jnp.

    Each of `arrays` is broadcastable to [*B, N, T, S]; `fn` gets its values at (b, n, t, s), already broadcast or
    broadcastable, so it never indexes an array. It must not close over arrays. `ranges`: a mask known to allow all
    that `fn` allows; only its ranges are used, to skip tiles (without it every tile is visited).
    """

    fn: Callable[..., Any]
    arrays: tuple[Any, ...]
    ranges: Mask | None

    def __init__(self, fn: Callable[..., Any], *arrays: Any, ranges: Mask | None = None):
        if not callable(fn):
            raise TypeError(f"fn={fn!r} must be a function fn(b, n, t, s, *slices) -> bool.")
        if ranges is not None and not isinstance(ranges, Mask):
            raise TypeError(
                f"ranges={ranges!r} must be a Mask that contains this one, such as Window(128, 0), or None."
            )
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "arrays", tuple(_as_array("arrays", x) for x in arrays))
        object.__setattr__(self, "ranges", ranges)

    def bind(self, dims, lengths):
        arrays = (dims.broadcastable(f"arrays[{i}]", x) for i, x in enumerate(self.arrays))
        return Custom(self.fn, *arrays, ranges=self.ranges and self.ranges.bind(dims, lengths))

    def moved(self, part):
        return Custom(AtOrigin(self.fn, 0), *part.origin, *self.arrays, ranges=self.ranges and self.ranges.moved(part))

    def allowed(self, b, n, t, s):
        return self.fn(b, n, t, s, *self.arrays)

    def kv_range(self, t_lo, t_hi):
        return self.ranges.kv_range(t_lo, t_hi) if self.ranges else _EVERYTHING

    def q_range(self, s_lo, s_hi):
        return self.ranges.q_range(s_lo, s_hi) if self.ranges else _EVERYTHING


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """Allowed by every part; written `a & b`."""

    parts: tuple[Mask, ...]

    def bind(self, dims, lengths):
        parts = _joined_lengths(_joined_bands([part.bind(dims, lengths) for part in self.parts]))
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
        return ranges.maximum(*los), ranges.minimum(*his)

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
        starts = [ranges.where(a < b, a, FAR) for a, b in answers]
        ends = [ranges.where(a < b, b, -FAR) for a, b in answers]
        return ranges.minimum(*starts), ranges.maximum(*ends)

    def _longest(self, question, lo, hi):
        best_lo, best_hi = getattr(self.parts[0], question)(lo, hi)
        for part in self.parts[1:]:
            a, b = getattr(part, question)(lo, hi)
            longer = b // 2 - a // 2 > best_hi // 2 - best_lo // 2  # halves: -FAR to FAR is too far for int32
            best_lo, best_hi = ranges.where(longer, a, best_lo), ranges.where(longer, b, best_hi)
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


def _joined_bands(parts: list[Mask]) -> list[Mask]:
    """Bound parts, with all causal masks and windows of known offsets joined to one window: one test instead of many."""
    bands = [part for part in parts if isinstance(part, (Causal, Window)) and is_static_int(part.offset)]
    lefts = [part.offset - part.left for part in bands if isinstance(part, Window) and part.left is not None]
    rights = [part.offset + part.right for part in bands if isinstance(part, Window) and part.right is not None]
    rights += [part.offset for part in bands if isinstance(part, Causal)]
    if len(bands) < 2 or not lefts or not rights:
        return parts
    left, right = max(lefts), min(rights)
    if not 0 <= right - left < FAR // 2 or abs(right) > FAR // 2:  # nothing, or more than a window can say
        return parts
    window = Window(left=right - left, right=0, offset=right)
    return [window, *(part for part in parts if not any(part is band for band in bands))]


def _joined_lengths(parts: list[Mask]) -> list[Mask]:
    """Bound parts, with all sequence lengths joined to one: the shortest."""
    found = [part for part in parts if isinstance(part, Lengths)]

    def shortest(values):
        values = [x for x in values if x is not None]
        return ranges.minimum(*values) if values else None

    lengths = Lengths(shortest([x.q_lengths for x in found]), shortest([x.kv_lengths for x in found]))
    others = [part for part in parts if not isinstance(part, Lengths)]
    return [lengths, *others] if len(found) > 1 else parts


def parts_of[M: Mask](mask: Mask | None, kind: type[M]) -> list[M]:
    """The parts of a conjunction (or the one mask) that are of `kind`."""
    return [part for part in _parts(mask, And) if isinstance(part, kind)]


def lengths_of(mask: Mask | None) -> Lengths:
    """The sequence lengths that a bound mask gives; both None where it gives none."""
    return next(iter(parts_of(mask, Lengths)), Lengths())


def _parts(mask, kind):
    return mask.parts if isinstance(mask, kind) else (mask,)


def _checked_mask(x, operator):
    if isinstance(x, Mask):
        return x
    raise TypeError(
        f"a Mask {operator} {type(x).__name__} has no meaning. Wrap a bool array as pallas_fa.masks.Dense(array) first."
    )


def _as_array(name, x):
    if isinstance(x, (bool, int, float, complex, list)):
        return jnp.asarray(x)
    if not is_array(x):
        raise TypeError(f"{name} holds a {type(x).__name__}; it must hold arrays, broadcastable to [*B, N, T, S].")
    return x
