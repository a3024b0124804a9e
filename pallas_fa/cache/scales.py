"""Caches of 8 bits: rows are divided by a scale and rounded, and attention multiplies by it.

A scale is one number for all keys of a cache, or for all its values. That of keys becomes a factor of the logits, that of
values one of the output, so that no row is multiplied when it is read.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_fa.arguments.arrays import refuse_shapes
from pallas_fa.arguments.scores import split_scale
from pallas_fa.operands.pytree import has_8_bits, is_array, is_finite, is_static_number

_SMALLEST = float(np.finfo(np.float32).tiny)  # below, division is by 0 on some platforms


def checked(name: str, scale: Any, dtype: Any) -> Any:
    """Returns the scale of a cache of `dtype`, an array float32 [] of its own, or None; raises where it is none.

    A scale of 0, which an array may hold that was made of an empty prompt, counts as 1.
    """
    if scale is None:
        return None
    refuse_shapes(**{name: scale})
    if not has_8_bits(dtype):
        raise ValueError(
            f"{name}={scale!r} is for caches of 8 bits, and this one holds {jnp.dtype(dtype)}. Leave it out, or make the"
            " cache with dtype=jnp.float8_e4m3fn."
        )
    is_scalar = is_array(scale) and scale.ndim == 0 and jnp.issubdtype(scale.dtype, jnp.floating)
    if not is_static_number(scale) and not is_scalar:
        raise TypeError(f"{name}={scale!r} must be a number or a scalar float array. Leave it out for 1.0.")
    if is_static_number(scale) and not (scale >= _SMALLEST and is_finite(scale)):
        raise ValueError(
            f"{name}={scale!r} must be positive, and normal and finite in float32. Leave it out for 1.0, or pass the"
            " largest row over the largest number of the dtype."
        )
    scale = jnp.array(scale, jnp.float32)
    return jnp.where(jnp.abs(scale) < _SMALLEST, jnp.float32(1), scale)


def of(cache: Any, dtype: Any) -> tuple[Any, Any]:
    """Returns the scales of the keys and the values of a cache of `dtype`."""
    key, value = (checked(name, getattr(cache, name), dtype) for name in ("key_scale", "value_scale"))
    return key, value


def quantised(x: Any, scale: Any, dtype: Any) -> Any:
    """Returns rows over their scale in a dtype of 8 bits; what is past its largest number becomes that, and NaN stays."""
    wide = x.astype(np.promote_types(x.dtype, np.float32))
    return _saturated(wide if scale is None else wide / scale.astype(wide.dtype), dtype)


def with_key_scale(arguments: Mapping[str, Any], query: Any, key_scale: Any) -> dict[str, Any]:
    """Returns the arguments of attention to keys times their scale."""
    if key_scale is None:
        return dict(arguments)
    scale, dtype, H = arguments.get("scale"), jnp.result_type(query), jnp.shape(query)[-1]
    split_scale(scale, max(H, 1), dtype)  # raises what the product would hide
    wide = np.promote_types(dtype, np.float32)
    scale = jnp.asarray(max(H, 1) ** -0.5 if scale is None else scale).astype(wide)
    return {**arguments, "scale": key_scale.astype(wide) * scale}


def with_value_scale(results: Any, value_scale: Any) -> Any:
    """Returns the results of attention, out or (out, lse), to values times their scale."""
    if isinstance(results, tuple):
        return times(results[0], value_scale), *results[1:]
    return times(results, value_scale)


def times(out: Any, factor: Any) -> Any:
    """Returns an output times a factor (None: 1), in float32, whose range and digits a factor of 16 bits lacks."""
    if factor is None:
        return out
    wide = np.promote_types(out.dtype, np.float32)
    product = out.astype(wide) * jnp.asarray(factor).astype(wide)
    return _saturated(product, out.dtype) if has_8_bits(out.dtype) else product.astype(out.dtype)


def _saturated(x, dtype):
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)
