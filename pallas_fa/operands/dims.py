"""`Dims`: the sizes of one call, to which the arrays of masks and scores are bound."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_AXES = {"B": "batch", "N": "query heads", "T": "query length", "S": "key length"}


@dataclasses.dataclass(frozen=True)
class Dims:
    """Sizes of one call: batch dims (any number), query length T, key length S, query heads N."""

    batch: tuple[int, ...]
    T: int
    S: int
    N: int

    @property
    def B(self) -> int:
        """The product of the batch dims."""
        return math.prod(self.batch)

    @property
    def is_symbolic(self) -> bool:
        """Whether a size is symbolic, from `jax.export.symbolic_shape`."""
        return self.has_symbolic_length or not isinstance(self.B, int)

    @property
    def has_symbolic_length(self) -> bool:
        """Whether T or S is symbolic."""
        return not (isinstance(self.T, int) and isinstance(self.S, int))

    def broadcastable(self, name: str, x: Any) -> Any:
        """Reshapes `x`, which broadcasts to [*batch, N, T, S] by NumPy's rules, to [B|1, N|1, T|1, S|1]."""
        full = (*self.batch, self.N, self.T, self.S)
        if not self.batch and x.ndim == 4 and x.shape[0] == 1:
            x = x[0]  # jax.nn accepts this: it adds a batch dim to unbatched q, k and v
        shape = (1,) * (len(full) - x.ndim) + tuple(x.shape)
        if x.ndim > len(full) or any(have not in (1, want) for have, want in zip(shape, full, strict=True)):
            raise ValueError(
                f"{name}.shape={tuple(x.shape)} is not broadcastable to [*B, N, T, S]={full}. Each of its dims, counted"
                f" from the right, must be 1 or that size. {_alignment_advice(name, x.shape, full)}"
            )
        return self._flatten_batch(x.reshape(shape))

    def diagonal(self, name: str, x: Any) -> Any:
        """Reshapes `x`, broadcastable to [*batch, N, T + S - 1], to [B|1, N|1, T + S - 1] (see `operands.diagonals`)."""
        full = (*self.batch, self.N, max(self.T + self.S - 1, 0))
        shape = (1,) * (len(full) - x.ndim) + tuple(x.shape)
        lead_fits = all(have in (1, want) for have, want in zip(shape[:-1], full[:-1], strict=False))
        if not 1 <= x.ndim <= len(full) or shape[-1] != full[-1] or not lead_fits:
            swapped = x.ndim > 1 and x.shape[-2] == full[-1]
            remedy = "Swap its last two dims." if swapped else "Compute it for these, or pass the function that does."
            raise ValueError(
                f"{name}.shape={tuple(x.shape)} is not broadcastable to [*B, N, T + S - 1]={full}: one value for each offset"
                f" s - t from -(T - 1)={1 - self.T} to S - 1={self.S - 1}, in this order. {remedy}"
            )
        return self._flatten_batch(x.reshape(shape), inner=2)

    def spanning(self, name: str, x: Any, letters: str) -> Any:
        """Reshapes `x` to [B|1, N|1, T|1, S|1].

        Args:
          name: what error messages call `x`.
          x: an array whose dims are `letters`; or one with all dims, broadcastable to [*batch, N, T, S].
          letters: the dims of `x`: "BT" is [*batch, T], or [T] for the whole batch.
        """
        nb, inner = len(self.batch), letters.replace("B", "")
        if x.ndim == nb + 3:
            return self.broadcastable(name, x)
        sizes = {"N": self.N, "T": self.T, "S": self.S}
        want = tuple(sizes[letter] for letter in inner)
        if "B" in letters and x.ndim == nb + len(inner):
            want = self.batch + want
        if x.ndim != len(want) or any(have not in (1, size) for have, size in zip(x.shape, want, strict=True)):
            meaning, of_all = ", ".join(_AXES[letter] for letter in letters), tuple(sizes[letter] for letter in inner)
            for_batch = f", or [{', '.join(inner)}] for the whole batch, here {of_all}" if "B" in letters else ""
            raise ValueError(
                f"{name}.shape={tuple(x.shape)} does not fit: {name} has the shape [{', '.join(letters)}] ({meaning}),"
                f" here {(self.batch if 'B' in letters else ()) + of_all}{for_batch}, or all dims,"
                f" broadcastable to [*B, N, T, S]={(*self.batch, self.N, self.T, self.S)}. Reshape it to one of these."
            )
        batch = x.shape[: x.ndim - len(inner)]
        inner_shape = dict(zip(inner, x.shape[x.ndim - len(inner) :], strict=True))
        shape = (1,) * (nb - len(batch)) + tuple(batch) + tuple(inner_shape.get(letter, 1) for letter in "NTS")
        return self._flatten_batch(x.reshape(shape))

    def _flatten_batch(self, x: Any, inner: int = 3) -> Any:
        batch, rest = x.shape[:-inner], x.shape[-inner:]
        if math.prod(batch) not in (1, self.B):  # broadcast along some batch dims only: a flat dim can't express that
            x = jnp.broadcast_to(x, self.batch + rest)
        return _of_jax_dtype(x.reshape((math.prod(x.shape[:-inner]), *rest)))


def _of_jax_dtype(x):
    """An array of NumPy in the dtype that JAX has for its own: else a problem would tell kernels of 64 bits that never come.

    Integers past it saturate, as distances and lengths may; masks and scores have checked that others fit.
    """
    dtype = jax.dtypes.canonicalize_dtype(x.dtype) if isinstance(x, np.ndarray) else x.dtype
    if dtype == x.dtype:
        return x
    if np.issubdtype(dtype, np.integer):
        x = x.clip(np.iinfo(dtype).min, np.iinfo(dtype).max)
    return x.astype(dtype)


def _alignment_advice(name, shape, full):
    """Returns advice: how to insert dims of size 1 so that `shape` broadcasts to `full`, in each way that is possible."""
    batch = len(full) - 3
    letters = [*("B" if batch == 1 else f"B{i}" for i in range(batch)), "N", "T", "S"]
    ways = {}
    for axes in itertools.combinations(range(len(full)), len(shape)):
        if shape and all(have in (1, full[axis]) for have, axis in zip(shape, axes, strict=True)):
            of_dims = ", ".join(letters[axis] if have != 1 else "1" for have, axis in zip(shape, axes, strict=True))
            ways.setdefault(of_dims, ", ".join(":" if i in axes else "None" for i in range(axes[0], len(full))))
    if not ways:
        return "Transpose or reshape it."
    if len(ways) == 1:
        return f"Insert dims of size 1: `{name}[{next(iter(ways.values()))}]`."
    each = "; ".join(f"`{name}[{index}]` if it is [{of_dims}]" for of_dims, index in ways.items())
    return f"Insert dims of size 1: {each}."


@dataclasses.dataclass(frozen=True)
class ShardedDims(Dims):
    """Sizes of a whole problem, where arrays of masks and scores have `rows` of the T queries: those of one device."""

    rows: int

    def broadcastable(self, name: str, x: Any) -> Any:
        return self._shard(Dims.broadcastable, name, x)

    def spanning(self, name: str, x: Any, letters: str) -> Any:
        return self._shard(Dims.spanning, name, x, letters)

    def _shard(self, method, *args):
        try:
            return method(Dims(self.batch, self.rows, self.S, self.N), *args)
        except ValueError as e:
            raise ValueError(
                f"{e} In ring attention T is the number of queries on this device, {self.rows} of {self.T}, and S that of"
                f" the keys on all devices, {self.S}: shard dim T of the array over the ring, and leave S whole."
            ) from None
