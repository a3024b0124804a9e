"""Distances between query and key positions, such as offsets and the sides of a window: a static int, or an int array.

An array is [*B], or [*B, N, 1, 1] for one value per head.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED, array_module
from pallas_fa.operands.pytree import is_array, is_one_of, is_static_int, is_static_number

Align = Literal["top_left", "bottom_right"]
LIMIT = UNBOUNDED // 2  # more than any distance between positions; fits int32 with a position and a window added


def check(name: str, x: Any) -> Any:
    """Returns `x` as an int clipped to +-2^29, or as an int array; raises TypeError for anything else."""
    if is_static_number(x):
        if not is_static_int(x):
            raise TypeError(f"{name}={x!r} must be an int or an int array.")
        return max(-LIMIT, min(LIMIT, int(x)))
    return int_array(name, x)


def check_align(kind: str, align: Any) -> None:
    """Raises ValueError unless `align` is one of `Align`; `kind` is what it aligns."""
    if not is_one_of(align, ("top_left", "bottom_right")):
        by_name = "" if isinstance(align, str) else " Give an offset by its name, offset=."
        raise ValueError(f"align={align!r} is not a way to align {kind}. Use 'top_left' or 'bottom_right'.{by_name}")


def counts_from_start(align: Any, offset: Any) -> bool:
    """Returns whether an offset leaves query 0 of a call at position 0."""
    return align == "top_left" and is_static_number(offset) and offset == 0


def check_at_end(kind: str, align: Any, offset: Any) -> None:
    """Raises ValueError if an offset is counted from the start of queries whose positions are known to be the last ones.

    It may be there to move the queries to these positions, or to be added to them: nobody can tell.
    """
    if align == "top_left" and not counts_from_start(align, offset):
        shown = f"of shape {tuple(offset.shape)}" if is_array(offset) else f"{offset}"
        raise ValueError(
            f"offset {shown} of {kind}(align='top_left'): here t is already the position in the sequence, that of the last"
            " rows of a cache. Leave the offset out if it moves the queries there; pass align='bottom_right' if it is"
            " meant beyond that."
        )


def bind(name: str, x: Any, dims: Dims) -> Any:
    """Returns a checked distance for one call: an int (or None), or int32 [B|1, N|1, 1, 1]."""
    if not is_array(x):
        return x
    return jnp.clip(per_sequence(name, x, dims), -LIMIT, LIMIT)


def bind_aligned(offset: Any, align: Align, dims: Dims, lengths: Any) -> Any:
    """Returns a checked offset for one call, as `bind` does, from the alignment "top_left".

    "bottom_right" adds S - T, or the difference of the bound sequence lengths `lengths`, where these are given.
    """
    offset = bind("offset", offset, dims)
    if align == "top_left":
        return offset
    q_lengths = dims.T if lengths.q_lengths is None else lengths.q_lengths
    kv_lengths = dims.S if lengths.kv_lengths is None else lengths.kv_lengths
    shift = kv_lengths - q_lengths
    if not is_array(shift) and not isinstance(shift, int):  # symbolic
        shift = jnp.full((1, 1, 1, 1), shift, jnp.int32)
    return offset + shift


def per_sequence(name: str, x: Any, dims: Dims) -> Any:
    """Returns an int array [*B] or [*B, N, 1, 1] as int32 [B|1, N|1, 1, 1]; raises ValueError for other shapes."""
    x = dims.spanning(name, x, "B")
    if x.shape[2:] != (1, 1):
        raise ValueError(
            f"{name}.shape={x.shape} varies over positions. Give one value per batch entry, [*B], or one per batch entry"
            " and head, [*B, N, 1, 1]."
        )
    return as_int32(x)


def as_int32(x: Any) -> Any:
    """Converts an int array to int32, saturating.

    This is not left to jnp.clip, which wraps bounds around that the dtype of `x` can't hold.
    """
    info = jnp.iinfo(x.dtype)
    if info.bits >= 32:
        x = array_module(x).clip(x, max(info.min, -(2**31)), 2**31 - 1)
    return jnp.asarray(x, jnp.int32)


def broadcast_remedy(have: tuple[int, ...], want: tuple[int, ...], otherwise: str) -> str:
    """Returns how to bring an array of shape `have` to the shape `want`: `otherwise` where it cannot be broadcast."""
    pairs = zip(reversed(have), reversed(want), strict=False)
    fits = len(have) <= len(want) and all(a in (1, b) for a, b in pairs)
    return f"Use jnp.broadcast_to(x, {want})." if fits else otherwise


def check_fits(name: str, x: Any, remedy: str) -> None:
    """Raises ValueError if values of a NumPy array are past its integers in JAX, which would wrap them around.

    64-bit integers are of 32 bits there unless `jax_enable_x64` is set. Values that are traced are not known here.
    """
    if not isinstance(x, (np.ndarray, np.generic)) or not np.issubdtype(x.dtype, np.integer) or not x.size:
        return
    held = np.iinfo(jax.dtypes.canonicalize_dtype(x.dtype))
    if held.dtype == x.dtype:
        return
    least, most = x.min(), x.max()
    if least < held.min or most > held.max:
        value = least if least < held.min else most
        raise ValueError(
            f"{name} holds {value}, but JAX holds {x.dtype} as {held.dtype}, from {held.min} to {held.max}. {remedy}"
        )


def per_tile(x: Any) -> Any:
    """Returns a bound distance as [B|1, N|1, 1], which broadcasts against tiles; a scalar of a kernel as it is."""
    return x[:, :, 0] if is_array(x) and jnp.ndim(x) else x


def int_array(name: str, x: Any, remedy: str = "Pass one of JAX or NumPy, or a list of ints.") -> Any:
    """Returns `x` as an int array; raises TypeError if it is none. `remedy`: what to pass in place of None and the like."""
    if not is_array(x):
        if isinstance(x, bool):
            raise TypeError(f"{name}={x!r} must be an int or an int array. Pass {int(x)} if that is meant.")
        if not isinstance(x, (int, list, tuple)):
            raise TypeError(f"{name} is a {type(x).__name__}; it must be an int array. {remedy}")
        try:
            x = jnp.asarray(x)
        except OverflowError:  # past JAX's integers: kept, for `as_int32` to saturate or `check_fits` to refuse
            x = np.asarray(x)
            if x.dtype == object:
                raise TypeError(f"{name} holds an int of more than 64 bits. Pass a smaller one.") from None
        except (TypeError, ValueError) as e:
            raise TypeError(f"{name}={x!r} must be an int array, with an int in each place of it.") from e
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name}.dtype={x.dtype} must be an integer type. Convert it with `.astype(jnp.int32)`.")
    return x
