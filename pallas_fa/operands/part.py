"""`Part`: a box of [B, N, T, S] that one device, or one hop of a ring, computes on its own."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.operands import diagonals, offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import is_array


@dataclasses.dataclass(frozen=True)
class Part:
    """Batch entries, query heads, queries and keys [start, start + size) of the whole problem.

    Attributes:
      start: global indices (b, n, t, s), each an int or an int32 scalar array.
      size: (B, N, T, S).
      diagonal: where the part starts in arrays that span the diagonals (`diagonals.first`); 0 for all queries and keys.
    """

    start: tuple[Any, Any, Any, Any]
    size: tuple[int, int, int, int]
    diagonal: Any = 0

    @property
    def origin(self) -> tuple[Any, ...]:
        """`start` as four int32 arrays [1, 1, 1, 1]."""
        return tuple(map(_as_bound, self.start))

    @property
    def shift(self) -> Any:
        """The position of the first query less that of the first key: an int, or int32 [1, 1, 1, 1]."""
        t, s = self.start[2:]
        both_known = isinstance(t, (int, np.integer)) and isinstance(s, (int, np.integer))
        return int(t - s) if both_known else _as_bound(t - s)

    def cut(self, tree: Any) -> Any:
        """Slices the arrays of a bound mask or score, which are those of the whole problem, to this part."""

        def slice_array(x):
            for axis, (start, size) in enumerate(self._along_axes(x)):
                if x.shape[axis] > 1:
                    x = lax.dynamic_slice_in_dim(x, start, size, axis)
            return x

        return jax.tree.map(slice_array, tree)

    def add(self, whole: Any, update: Any) -> Any:
        """Adds `update` to the slice of the array `whole` that `cut` reads: the transpose of `cut`."""
        axes = zip(self._along_axes(whole), whole.shape, strict=True)
        # All int32: where 64-bit types are enabled, lax would refuse ints beside traced starts.
        starts = [jnp.int32(start if size > 1 else 0) for (start, _), size in axes]
        old = lax.dynamic_slice(whole, starts, update.shape)
        return lax.dynamic_update_slice(whole, old + update.astype(whole.dtype), starts)

    def _along_axes(self, x):
        """(start, size) of this part along each axis of a bound array."""
        axes = tuple(zip(self.start, self.size, strict=True))
        return (*axes[:2], (self.diagonal, sum(self.size[2:]) - 1)) if diagonals.spans(x) else axes


def _as_bound(x):
    if isinstance(x, (int, np.integer)):  # of NumPy: JAX computes nothing outside of a trace where a mesh is set
        return np.full((1, 1, 1, 1), x, np.int32)
    return jnp.asarray(x, jnp.int32).reshape(1, 1, 1, 1)


@dataclasses.dataclass(frozen=True)
class AtGlobalIndices:
    """Wraps the function of a custom mask or score, so that a part of a problem calls it with global indices.

    It is called as (*logit, b, n, t, s, *origin, *arrays), with the indices of the part, and its origin.

    Attributes:
      fn: the function.
      leading: how many arguments precede the indices: 0 for a mask, 1 for a score (the logit).
      axes: those along which there is an origin; that of the others is 0.
    """

    fn: Callable[..., Any]
    leading: int
    axes: tuple[int, ...] = (0, 1, 2, 3)

    def __call__(self, *args: Any) -> Any:
        logit, index, rest = args[: self.leading], list(args[self.leading : self.leading + 4]), args[self.leading + 4 :]
        for axis, start in zip(self.axes, rest, strict=False):
            index[axis] = index[axis] + start
        return self.fn(*logit, *index, *rest[len(self.axes) :])


def at_positions(
    fn: Callable[..., Any], leading: int, align: offsets.Align, dims: Dims, lengths: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns (`fn` with t counted as `align` says, the arrays that it takes before its own).

    Args:
      fn: the function of a custom mask or score.
      leading: as in `AtGlobalIndices`.
      align: as in `masks.Causal`.
      dims: the sizes of the call.
      lengths: its sequence lengths, bound.
    """
    start = offsets.bind_aligned(0, align, dims, lengths)
    if not is_array(start) and start == 0:
        return fn, ()
    start = start if is_array(start) else _as_bound(start)
    return AtGlobalIndices(fn, leading, axes=(2,)), (start,)
