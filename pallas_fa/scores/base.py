"""Scores: the interface, and composition by `then`.

A score is a frozen pytree with `apply(x, b, n, t, s) -> x`, elementwise in plain jnp. As in masks, `bind` reshapes its
arrays to [B|1, N|1, T|1, S|1], and an implementation replaces them by their slices for a tile. An array may instead span
the diagonals, [B|1, N|1, T + S - 1]: in its place comes a tile too (`operands.diagonals`). Float arrays get gradients,
summed over their broadcast dims. The derivative comes from `apply`; none is written by hand.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.operands.dims import Dims
from pallas_fa.operands.part import Part
from pallas_fa.operands.pytree import Node, is_array, is_float


class Score(Node):
    """A function of one scaled logit and its position. Compose with `then`: `SoftCap(50.0).then(Alibi(slopes))`.

    The other methods are what implementations ask of a score; who passes one to a call needs none of them.
    """

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        """Returns the new logits; `x` and float arrays are float32 (float64 for float64 inputs).

        Args:
          x: logits, broadcastable to [B, N, t, s] of a tile.
          b: batch entries, global indices as an integer array that broadcasts against x, as do the other three.
          n: query heads.
          t: query positions.
          s: key positions.
        """
        raise NotImplementedError

    def bind(self, dims: Dims, lengths: Any) -> "Score":
        """Returns this score bound to one call, alignment resolved.

        Its arrays are checked and shaped [B|1, N|1, T|1, S|1] or [B|1, N|1, T + S - 1].

        Args:
          dims: the sizes of the call.
          lengths: the sequence lengths of the call, with `q_lengths` and `kv_lengths` int32 [B|1, N|1, 1, 1] or None.
        """
        return self

    def counted_from_start(self, dims: Dims) -> str | None:
        """Returns what of this score takes the first query of a call for position 0 of its sequence; None if nothing does.

        Args:
          dims: the sizes of the call.
        """
        return None

    def at_end(self) -> "Score":
        """Returns this score for queries that are the last positions of their sequences, and t such a position.

        Arrays over T are those of the call. Raises ValueError where the score has no such meaning.
        """
        return self

    def moved(self, part: Part) -> "Score":
        """Returns this bound score at the indices of `part`, which start at 0. Its arrays are already cut to the part."""
        return self

    @property
    def bound(self) -> float | None:
        """The largest absolute value of a result; None if that is not known."""
        return None

    def __bool__(self):
        raise TypeError(
            f"a {type(self).__name__} is not True or False. Compose scores by `then`, not by `and` and `or`; ask for a"
            " missing one with `score is None`."
        )

    def then(self, other: "Score") -> "Score":
        """Returns the score that applies this one first, then `other`."""
        return Chain(_parts(self) + _parts(_checked(other, "then")))


@dataclasses.dataclass(frozen=True)
class Chain(Score):
    """Applies the parts in order; written `a.then(b)`."""

    parts: tuple[Score, ...]

    def __post_init__(self):
        if not isinstance(self.parts, (tuple, list)) or not self.parts:
            raise TypeError(
                f"Chain: parts={self.parts!r} must be a tuple of one Score or more. Pass Chain((a, b)), or write a.then(b)."
            )
        object.__setattr__(self, "parts", tuple(_checked(part, "Chain") for part in self.parts))

    def bind(self, dims: Dims, lengths: Any) -> "Chain":
        return Chain(tuple(part.bind(dims, lengths) for part in self.parts))

    def counted_from_start(self, dims: Dims) -> str | None:
        return next(filter(None, (part.counted_from_start(dims) for part in self.parts)), None)

    def at_end(self) -> "Chain":
        return Chain(tuple(part.at_end() for part in self.parts))

    def moved(self, part: Part) -> "Chain":
        return Chain(tuple(each.moved(part) for each in self.parts))

    @property
    def bound(self) -> float | None:
        return self.parts[-1].bound

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        for part in self.parts:
            x = part.apply(x, b, n, t, s)
        return x


@dataclasses.dataclass(frozen=True)
class Fixed(Score):
    """The bound `score`, of whose float arrays those with the numbers `arrays` get no gradient.

    Numbers count the float arrays alone, in the order of the leaves: `moved` may add leaves, but no floats.
    """

    score: Score
    arrays: frozenset[int]

    def moved(self, part: Part) -> "Fixed":
        return Fixed(self.score.moved(part), self.arrays)

    @property
    def bound(self) -> float | None:
        return self.score.bound

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return self.score.apply(x, b, n, t, s)


def fixed(score: Score | None, arrays: Iterable[int]) -> Score | None:
    """Returns `score`, whose float arrays of these numbers get no gradient."""
    arrays = frozenset(arrays)
    return Fixed(score, arrays) if score is not None and arrays else score


def fixed_as(score: Score | None, other: Score | None) -> Score | None:
    """Returns `score` with those float arrays fixed that are fixed in `other`, of the same structure."""
    return Fixed(score, other.arrays) if score is not None and isinstance(other, Fixed) else score


def free(score: Score | None) -> Score | None:
    """Returns `score`, all of whose float arrays get gradients."""
    return score.score if isinstance(score, Fixed) else score


def chain(scores: list[Score]) -> Score | None:
    """Returns the score that applies `scores` in order; None if there are none."""
    parts = tuple(part for score in scores for part in _parts(score))
    return parts[0] if len(parts) == 1 else Chain(parts) if parts else None


def float_leaves(score: Score | None) -> tuple[int, ...]:
    """Returns the numbers of the leaves that get gradients: float arrays, without those that are `Fixed`."""
    without = score.arrays if isinstance(score, Fixed) else ()
    floats = (i for i, x in enumerate(jax.tree.leaves(score)) if jnp.issubdtype(x.dtype, jnp.floating))
    return tuple(i for number, i in enumerate(floats) if number not in without)


def float_arrays(score: Score | None) -> tuple[Any, ...]:
    """Returns the arrays that get gradients, in the order of the tree's leaves."""
    leaves = jax.tree.leaves(score)
    return tuple(leaves[i] for i in float_leaves(score))


def with_float_arrays(score: Score | None, arrays: Iterable[Any]) -> Score | None:
    """Replaces the float arrays of `score` by `arrays`, in the order of `float_arrays`."""
    leaves, tree = jax.tree.flatten(score)
    for i, x in zip(float_leaves(score), arrays, strict=True):
        leaves[i] = x
    return jax.tree.unflatten(tree, leaves)


def evaluate(score: Score | None, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
    """Applies `score`, with its float arrays in the dtype of x, so that their gradients are summed before they are rounded.

    Args:
      score: bound, with the slices of its arrays for a tile; None returns x.
      x: logits of the tile, float32 (float64 for float64 inputs).
      b: batch entries, global indices; so are the other three.
      n: query heads.
      t: query positions.
      s: key positions.
    """
    score = free(score)
    arrays = (array.astype(x.dtype) for array in float_arrays(score))
    cast_score = with_float_arrays(score, arrays)
    return x if cast_score is None else cast_score.apply(x, b, n, t, s)


def _checked(x, taker):
    if isinstance(x, Score):
        return x
    is_class = isinstance(x, type) and issubclass(x, Score)
    remedy = f"Make one: {x.__name__}(...)." if is_class else "Wrap a function fn(x, b, n, t, s) as scores.Custom(fn)."
    raise TypeError(
        f"{taker} takes a Score, got {'the class ' + x.__name__ if is_class else type(x).__name__}. {remedy}"
    )


def _parts(score):
    return score.parts if isinstance(score, Chain) else (score,)


def float_array(name: str, x: Any) -> Any:
    """Returns `x` as an array; raises TypeError unless its dtype is a float."""
    if not is_array(x):
        try:
            x = jnp.asarray(x)
        except (TypeError, ValueError, OverflowError) as e:
            raise TypeError(
                f"{name}={x!r} is of type {type(x).__name__}; it must be a float array. Pass one of JAX or NumPy, or a list"
                " of floats."
            ) from e
    if not is_float(x.dtype):
        raise TypeError(f"{name}.dtype={x.dtype} must be a float type. Convert it with `.astype(jnp.float32)`.")
    return x
