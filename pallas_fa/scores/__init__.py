"""The score algebra: what happens to scale * q.k before the softmax.

A score is a frozen pytree with `apply(x, b, n, t, s) -> x`, elementwise in plain jnp, under the contract of masks: its
arrays span the dims that their shapes show, `bind` gives each the shape [B|1, N|1, T|1, S|1], and whoever evaluates it
puts the slices for its tile in their places. Every array gets a gradient, reduced over its broadcast dims; the
derivative is derived from `apply`, never written by hand.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.part import AtOrigin, Part
from pallas_fa.operands.pytree import Node, is_array, is_static_number


class Score(Node):
    """A function of one scaled logit and its position. Compose with `then`: `SoftCap(50.0).then(Alibi(slopes))`."""

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        """The new logit; `x` and the float arrays are float32 (float64 for float64 inputs)."""
        raise NotImplementedError

    def bind(self, dims: Dims) -> "Score":
        """This score for one call: arrays checked and shaped [B|1, N|1, T|1, S|1]."""
        return self

    def moved(self, part: Part) -> "Score":
        """This bound score, whose arrays are cut to `part` already, at the part's own indices."""
        return self

    @property
    def bound(self) -> float | None:
        """What no result exceeds, in either direction; None where that is not known."""
        return None

    def then(self, other: "Score") -> "Score":
        """This score first, then `other`."""
        if not isinstance(other, Score):
            raise TypeError(f"then takes a Score, got {type(other).__name__}. Wrap a function as scores.Custom(fn).")
        return Chain(_parts(self) + _parts(other))


@dataclasses.dataclass(frozen=True)
class SoftCap(Score):
    """cap * tanh(x / cap), as in Gemma 2. `cap`: a float > 0."""

    cap: float

    def __post_init__(self):
        if not is_static_number(self.cap):
            raise TypeError(f"cap={self.cap!r} must be a Python float. For a learned cap use scores.Custom(fn, cap).")
        if not (self.cap > 0 and math.isfinite(self.cap)):
            raise ValueError(f"cap={self.cap} must be positive and finite. Leave the soft cap out for no cap.")
        object.__setattr__(self, "cap", float(self.cap))

    @property
    def bound(self):
        return self.cap

    def apply(self, x, b, n, t, s):
        return self.cap * jnp.tanh(x / self.cap)


@dataclasses.dataclass(frozen=True)
class Alibi(Score):
    """x - slope * |t + offset - s| (Press et al., arXiv 2108.12409). `slopes`: float, [N] or [*B, N].

    `offset`: an int, or an int array [*B] (decoding into a cache).
    """

    slopes: Any
    offset: Any = 0

    def __post_init__(self):
        object.__setattr__(self, "slopes", _float_array("slopes", self.slopes))
        object.__setattr__(self, "offset", offsets.checked("offset", self.offset))

    def bind(self, dims):
        # [N] and [*B, N] are both meant, so the letters name the batch as well.
        return Alibi(dims.spanning("slopes", self.slopes, "BN"), offsets.bound(self.offset, dims))

    def moved(self, part):
        return Alibi(self.slopes, self.offset + part.shift)

    def apply(self, x, b, n, t, s):
        return x - self.slopes * jnp.abs(t + self.offset - s).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Bias(Score):
    """x + array. `array`: float, broadcastable to [*B, N, T, S]; its broadcast dims are never materialised."""

    array: Any

    def __post_init__(self):
        object.__setattr__(self, "array", _float_array("array", self.array))

    def bind(self, dims):
        return Bias(dims.broadcastable("bias", self.array))

    def apply(self, x, b, n, t, s):
        return x + self.array


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
        return Custom(AtOrigin(self.fn, 1), *part.origin, *self.arrays)

    def apply(self, x, b, n, t, s):
        return self.fn(x, b, n, t, s, *self.arrays)


@dataclasses.dataclass(frozen=True)
class Chain(Score):
    """The parts one after the other; written `a.then(b)`."""

    parts: tuple[Score, ...]

    def bind(self, dims):
        return Chain(tuple(part.bind(dims) for part in self.parts))

    def moved(self, part):
        return Chain(tuple(each.moved(part) for each in self.parts))

    @property
    def bound(self):
        return self.parts[-1].bound

    def apply(self, x, b, n, t, s):
        for part in self.parts:
            x = part.apply(x, b, n, t, s)
        return x


def chain(scores: list[Score]) -> Score | None:
    """`scores` one after the other; None when there are none."""
    parts = tuple(part for score in scores for part in _parts(score))
    return parts[0] if len(parts) == 1 else Chain(parts) if parts else None


def float_arrays(score: Score | None) -> tuple[Any, ...]:
    """The arrays that get gradients, in the order of the tree's leaves."""
    return tuple(x for x in jax.tree.leaves(score) if jnp.issubdtype(x.dtype, jnp.floating))


def with_float_arrays(score: Score | None, arrays: Iterable[Any]) -> Score | None:
    """`score` with other float arrays, in the order of `float_arrays`."""
    arrays = iter(arrays)
    return jax.tree.map(lambda x: next(arrays) if jnp.issubdtype(x.dtype, jnp.floating) else x, score)


def evaluate(score: Score | None, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
    """`score.apply`, with the float arrays in the dtype of x: so no gradient of theirs is rounded before it is summed."""
    arrays = (array.astype(x.dtype) for array in float_arrays(score))
    given = with_float_arrays(score, arrays)
    return x if given is None else given.apply(x, b, n, t, s)


def _parts(score):
    return score.parts if isinstance(score, Chain) else (score,)


def _float_array(name, x):
    x = x if is_array(x) else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}.dtype={x.dtype} must be a float type. Convert it with `.astype(jnp.float32)`.")
    return x
