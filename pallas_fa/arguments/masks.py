"""The arguments that say which query may attend to which key, each as a mask."""

from typing import Any

import jax.numpy as jnp

from pallas_fa import masks
from pallas_fa.arguments.arrays import array
from pallas_fa.masks.band import check_side
from pallas_fa.masks.segments import check_ids
from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import is_array, is_static_number


def as_mask(mask: Any) -> masks.Mask | None:
    """Returns `mask`, an array or a mask, as a mask."""
    if mask is None or isinstance(mask, masks.Mask):
        return mask
    x = mask_array(mask, "bool")
    if x.dtype != jnp.bool_:
        raise TypeError(
            f"mask.dtype={x.dtype} must be bool (True: may attend). For a 0/1 mask pass `mask != 0`; pass an additive"
            " mask as `bias=`."
        )
    return masks.Dense(x)


def mask_array(mask: Any, kind: str) -> Any:
    """Returns `mask`, which is no `Mask`, as an array; `kind` says of which dtype it may be."""
    several = isinstance(mask, (list, tuple)) and any(isinstance(x, masks.Mask) for x in mask)
    remedy = "Combine masks by `&` or `|`." if several else "Leave it out for none."
    what = f"a {kind} array, broadcastable to [*B, N, T, S], or a pallas_fa.masks.Mask"
    return array("mask", mask, what, remedy)


def window_mask(dims: Dims, window: Any, align: offsets.Align = "top_left") -> masks.Window | None:
    """Returns `local_window_size` as a mask; `align` as in `masks.Window`."""
    if window is None:
        return None
    sides = _window_sides(window)
    for i, side in enumerate(sides):
        if is_array(side):
            offsets.per_sequence(f"local_window_size[{i}]", side, dims)  # an error here names the argument
    return masks.Window(*sides, align=align)


def _window_sides(window: Any) -> tuple[Any, Any]:
    """The two sides of `local_window_size`, each checked by itself."""
    if is_array(window) and window.shape == (2,):
        window = tuple(window)  # as in jax.nn, which unpacks it
    scalar = is_static_number(window) or (is_array(window) and not window.shape)
    pair = (window, window) if scalar else window
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(
            f"local_window_size={window!r} must be an int or an int scalar array, or a pair (left, right) of ints, int"
            " arrays ([], [*B] or [*B, N, 1, 1]) or None."
        )
    left, right = (check_side(f"local_window_size[{i}]", side) for i, side in enumerate(pair))
    return left, right


def segment_mask(dims: Dims, query_ids: Any, key_ids: Any) -> masks.Segments | None:
    """Returns the segment ids, int [*B, T] and [*B, S], both or neither, as a mask."""
    if query_ids is None and key_ids is None:
        return None
    for name, ids in (("query_segment_ids", query_ids), ("key_value_segment_ids", key_ids)):
        if ids is None:
            raise ValueError(
                f"{name} is None but the other segment ids are given: both or neither. For self-attention pass the same"
                " array twice."
            )
    query_ids = _int_array("query_segment_ids", query_ids, (*dims.batch, dims.T), "[*B, T]")
    key_ids = _int_array("key_value_segment_ids", key_ids, (*dims.batch, dims.S), "[*B, S]")
    check_ids(query_segment_ids=query_ids, key_value_segment_ids=key_ids)  # an error here names the arguments
    return masks.Segments(query_ids, key_ids)


def lengths_mask(dims: Dims, query_lengths: Any, key_lengths: Any) -> masks.Lengths | None:
    """Returns the sequence lengths, int [*B], each or none, as a mask."""
    if query_lengths is None and key_lengths is None:
        return None
    # Without batch dims jax.nn takes lengths [1], having added one.
    unbatched = lambda x: x.reshape(()) if not dims.batch and x.shape == (1,) else x
    pairs = (("query_seq_lengths", query_lengths), ("key_value_seq_lengths", key_lengths))
    return masks.Lengths(
        *(None if x is None else _int_array(name, x, dims.batch, "[*B]", unbatched) for name, x in pairs)
    )


def _int_array(name, x, shape, letters, adapt=lambda x: x):
    x = adapt(offsets.int_array(name, x))
    have, shape = tuple(x.shape), tuple(shape)
    if have != shape:
        each = "batch entry" if letters == "[*B]" else "token"
        remedy = offsets.broadcast_remedy(have, shape, f"Pass one int for each {each}.")
        raise ValueError(f"{name}.shape={have} must be {letters} = {shape}. {remedy}")
    return x
