"""Scores: the contract, and their composition by `then`.

A score is a frozen pytree with `apply(x, b, n, t, s) -> x`, elementwise in plain jnp, under the contract of masks: its
arrays span the dims that their shapes show, `bind` gives each the shape [B|1, N|1, T|1, S|1], and whoever evaluates it
puts the slices for its tile in their places. Every array gets a gradient, reduced over its broadcast dims; the
derivative is derived from `apply`, never written by hand.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.operands.dims import Dims
from pallas_fa.operands.part import Part
from pallas_fa.operands.pytree import Node, is_array


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

    def __bool__(self):
        raise TypeError(
            f"a {type(self).__name__} is not True or False. Compose scores by `then`, not by `and` and `or`; ask for a"
            " missing one with `score is None`."
        )

    def then(self, other: "Score") -> "Score":
        """This score first, then `other`."""
        if not isinstance(other, Score):
            raise TypeError(f"then takes a Score, got {type(other).__name__}. Wrap a function as scores.Custom(fn).")
        return Chain(_parts(self) + _parts(other))


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


def float_array(name: str, x: Any) -> Any:
    """`x` as an array, if it is of a float type."""
    x = x if is_array(x) else jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name}.dtype={x.dtype} must be a float type. Convert it with `.astype(jnp.float32)`.")
    return x
