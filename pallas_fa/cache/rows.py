"""The rows that an append writes: checks of their shapes, and where each of them goes."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_fa.arguments.arrays import float_array
from pallas_fa.arguments.shapes import dtypes_fit
from pallas_fa.cache import scales
from pallas_fa.operands.offsets import as_int32, check_fits, int_array
from pallas_fa.operands.pytree import as_count, is_array, is_float, names_float


class Rows(NamedTuple):
    """New keys and values, checked.

    Attributes:
      key: [B, T, K, H].
      value: [B, T, K, Hv].
      count: int32 [B], how many of the T rows of each sequence are real.
    """

    key: Any
    value: Any
    count: Any


class Placed(NamedTuple):
    """Where rows go.

    Attributes:
      writes: bool [B, T], which rows are written.
      lengths: int32 [B], the lengths afterwards.
      dropped: int32 [B], how many real rows are not written.
    """

    writes: Any
    lengths: Any
    dropped: Any


def check_sizes(**sizes: Any) -> None:
    """Raises ValueError unless every size is a positive int."""
    for name, size in sizes.items():
        as_count(name, size, "Pass the size of the cache to be made.")


def check_dtype(dtype: Any) -> None:
    """Raises TypeError unless `dtype` is one of floats."""
    if not names_float(dtype):
        raise TypeError(
            f"dtype={dtype!r} must be a float dtype, that of the keys and values to come. Pass jnp.bfloat16."
        )


def check_kept(dims: str, **kept: Any) -> None:
    """Raises unless the arrays of keys and of values of a cache, by name, belong together.

    `dims` is what their dims are called.
    """
    for name, x in kept.items():
        if not is_array(x) or len(x.shape) != 4:
            shown = f".shape={tuple(x.shape)}" if is_array(x) else f" is a {type(x).__name__}"
            raise ValueError(f"the cache's {name}{shown}, but must be an array {dims}. Make the cache with `empty`.")
        if not is_float(x.dtype):
            raise TypeError(f"the cache's {name}.dtype={x.dtype} must be a float type. Make the cache with `empty`.")
    (key_name, key), (value_name, value) = kept.items()
    if key.shape[:3] != value.shape[:3] or key.dtype != value.dtype:
        raise ValueError(
            f"the cache's {key_name} {key.dtype} {tuple(key.shape)} and {value_name} {value.dtype} {tuple(value.shape)} must"
            f" agree but for the head dim: {dims}. Make the cache with `empty`, or replace both."
        )


def checked_lengths(lengths: Any, B: int | None = None) -> Any:
    """Returns the lengths of a cache, int [B] (None: of any size); raises where they are none."""
    return jnp.asarray(_per_sequence("lengths", lengths, B, "how many rows of each sequence are there", "n"))


def check_room(lengths: Any, capacity: int) -> None:
    """Raises ValueError where the lengths of a cache are known, as those of NumPy are, and past its room for a sequence.

    Of lengths that are not known while tracing, rows past `capacity` or before row 0 are not there.
    """
    outside: Any = lengths[(lengths < 0) | (lengths > capacity)] if isinstance(lengths, np.ndarray) else ()
    if len(outside):
        raise ValueError(
            f"the cache's lengths hold {outside[0]}, but must be from 0 to {capacity}: it has room for so many rows of each"
            " sequence. Pass how many are there, or make a longer cache."
        )


def checked_dropped(dropped: Any, B: int) -> Any:
    """Returns how many rows a cache has dropped, int [B]; raises where that is none."""
    return _per_sequence("dropped", dropped, B, "how many rows of each sequence are lost", "0")


def _per_sequence(name, x, B, what, value):
    """An int array [B] of a cache."""
    array = x if is_array(x) else None
    fits = array is not None and array.ndim == 1 and B in (None, array.shape[0])
    if array is None or not fits or not jnp.issubdtype(array.dtype, jnp.integer):
        shown = f" have the shape {tuple(array.shape)} and the dtype {array.dtype}" if array is not None else f"={x!r}"
        raise ValueError(
            f"the cache's {name}{shown}, but must be an int array [B]{'' if B is None else f'={(B,)}'}: {what}. Use"
            f" dataclasses.replace(cache, {name}=jnp.full({'B' if B is None else B}, {value})) for one number of all."
        )
    check_fits(f"the cache's {name}", array, f"Pass {what}.")
    return array


def new_rows(
    key: Any,
    value: Any,
    lengths: Any,
    *,
    batch: int,
    kept: tuple[Any, Any],
    kept_scales: tuple[Any, Any],
    capacity: int,
) -> Rows:
    """Returns the rows that an append was given, in the dtype of the cache.

    Args:
      key: [B, T, K, H], in the dtype of the cache, or any of more bits where the cache has 8.
      value: [B, T, K, Hv], likewise.
      lengths: int [B], how many of the T rows are real; None for all.
      batch: B of the cache.
      kept: the arrays of keys and of values of the cache, [..., K, H] and [..., K, Hv].
      kept_scales: their scales.
      capacity: how many rows the cache has for each sequence.
    """
    key, value = float_array("key", key), float_array("value", value)
    for name, x, cache in (("key", key, kept[0]), ("value", value, kept[1])):
        want = (batch, key.shape[1] if key.ndim == 4 else "T", *cache.shape[-2:])
        if tuple(x.shape) != want:
            raise ValueError(
                f"{name}.shape={tuple(x.shape)} does not fit the cache, which takes [B, T, K, head dim]={want}, with as"
                " many rows T of key as of value. Reshape it, or make the cache with these sizes."
            )
        if not dtypes_fit(x.dtype, cache.dtype):
            raise ValueError(
                f"{name}.dtype={x.dtype}, but the cache holds {cache.dtype}: nothing is converted silently. Convert it with"
                " `.astype`, or make the cache with dtype=."
            )
    narrow = lambda x, cache, scale: x if x.dtype == cache.dtype else scales.quantised(x, scale, cache.dtype)
    key, value = map(narrow, (key, value), kept, kept_scales)
    T = key.shape[1]
    if lengths is None:
        if T > capacity:
            raise ValueError(
                f"key.shape={tuple(key.shape)} has T={T} rows, but the cache has room for {capacity} in each sequence. Make"
                " a longer cache, append fewer rows, or pass lengths= where some of the rows are padding."
            )
        return Rows(key, value, jnp.full((batch,), T, jnp.int32))
    lengths = int_array("lengths", lengths)
    if lengths.shape != (batch,):
        raise ValueError(
            f"lengths.shape={tuple(lengths.shape)} must be [B]={(batch,)}: how many of the T={T} rows are real in each"
            " sequence. Leave it out where all are."
        )
    return Rows(key, value, jnp.clip(as_int32(lengths), 0, T))


def place(rows: Rows, lengths: Any, dropped: Any, has_room: Any) -> Placed:
    """Returns where rows go that follow the first `lengths` rows: real ones, up to the first without room.

    Args:
      rows: the rows.
      lengths: int32 [B], of the cache.
      dropped: int32 [B], of the cache.
      has_room: bool [B, T], whether there is a place for each row.
    """
    real = jnp.arange(rows.key.shape[1], dtype=jnp.int32)[None] < rows.count[:, None]
    writes = jnp.cumprod(real & has_room, axis=1, dtype=jnp.int32) > 0
    written = writes.sum(axis=1, dtype=jnp.int32)
    return Placed(writes, lengths + written, dropped + rows.count - written)
