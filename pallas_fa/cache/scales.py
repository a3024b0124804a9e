"""Caches of 8 bits: rows are divided by a scale and rounded, and attention multiplies by it.

A scale is one number for all keys of a cache, or for all its values. That of keys becomes a factor of the logits, that of
values one of the output, so that no row is multiplied when it is read.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_fa.arguments.scores import split_scale
from pallas_fa.operands.pytree import is_array, is_finite, is_static_number


def is_narrow(dtype: Any) -> bool:
    """Whether a cache of this float dtype takes scales: one of 8 bits."""
    return jnp.dtype(dtype).itemsize == 1


def checked(name: str, scale: Any, dtype: Any) -> Any:
    """Returns the scale of a cache of `dtype`, float32 [], or None; raises where it is none."""
    if scale is None:
        return None
    if not is_narrow(dtype):
        raise ValueError(
            f"{name}={scale!r} is for caches of 8 bits, and this one holds {jnp.dtype(dtype)}. Leave it out, or make the"
            " cache with dtype=jnp.float8_e4m3fn."
        )
    is_scalar = is_array(scale) and scale.ndim == 0 and jnp.issubdtype(scale.dtype, jnp.floating)
    if not is_static_number(scale) and not is_scalar:
        raise TypeError(f"{name}={scale!r} must be a number or a scalar float array. Leave it out for 1.0.")
    if is_static_number(scale) and not (scale > 0 and is_finite(scale)):
        raise ValueError(f"{name}={scale!r} must be positive, and finite in float32. Leave it out for 1.0.")
    return jnp.asarray(scale, jnp.float32)


def of(cache: Any, dtype: Any) -> tuple[Any, Any]:
    """Returns the scales of the keys and the values of a cache of `dtype`."""
    key, value = (checked(name, getattr(cache, name), dtype) for name in ("key_scale", "value_scale"))
    return key, value


def quantised(x: Any, scale: Any, dtype: Any) -> Any:
    """Returns rows over their scale in a dtype of 8 bits; what is past its largest number becomes that, and NaN stays."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    wide = wide if scale is None else wide / scale
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(wide, -largest, largest).astype(dtype)


def attend(
    attention: Callable[..., Any], query: Any, key_scale: Any, value_scale: Any, arguments: Mapping[str, Any]
) -> Any:
    """Returns attention(query, **arguments) to keys and values times their scales."""
    arguments = dict(arguments)
    if key_scale is not None:
        scale, H = arguments.pop("scale", None), jnp.shape(query)[-1]
        split_scale(scale, H, jnp.result_type(query))  # raises what the product would hide
        arguments["scale"] = key_scale * (H**-0.5 if scale is None else scale)
    results = attention(query, **arguments)
    if isinstance(results, tuple):
        return times(results[0], value_scale), *results[1:]
    return times(results, value_scale)


def times(out: Any, factor: Any) -> Any:
    """Returns an output times a factor (None: 1), in float32, whose range and digits a factor of 16 bits lacks."""
    return out if factor is None else (out.astype(np.promote_types(out.dtype, np.float32)) * factor).astype(out.dtype)
