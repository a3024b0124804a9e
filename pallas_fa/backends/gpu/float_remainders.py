"""Rounding and remainders of float32, both exact, which kernels lack."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu.float_bits import from_bits, power_of_2, scaled, to_bits

_REM_BITS = 22  # of the quotient a step


def floor(x: Any) -> Any:
    """The largest whole number that is not above x."""
    r = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return jnp.where(r > x, r - 1, r)


def ceil(x: Any) -> Any:
    """The smallest whole number that is not below x."""
    return -floor(-x)


def rem(x: Any, y: Any) -> Any:
    """x - y * trunc(x / y), exact, with the sign of x: a long division, 22 bits of the quotient a step."""
    (x_exponent, x_mantissa), (y_exponent, y_mantissa) = map(_whole, (x, y))
    divisor = y_mantissa.astype(jnp.float32)
    inverse = 1 / divisor
    left = jnp.maximum(x_exponent - y_exponent, 0)
    r = _rem_step(x_mantissa, 0, y_mantissa, inverse)
    for _ in range(-(-253 // _REM_BITS)):
        step = jnp.minimum(left, _REM_BITS)
        r, left = _rem_step(r, step, y_mantissa, inverse), left - step
    size = scaled(r.astype(jnp.float32), y_exponent - 150)
    size = jnp.where(jnp.abs(x) < jnp.abs(y), jnp.abs(x), size)
    result = from_bits(to_bits(size) | (to_bits(x) & -0x80000000))
    return jnp.where((y != 0) & (jnp.abs(x) < jnp.inf) & (y == y), result, jnp.nan)


def _whole(x):
    """(exponent, mantissa), both int32: |x| = mantissa * 2^(exponent - 150)."""
    bits = to_bits(x) & 0x7FFFFFFF
    exponent = bits >> 23
    return jnp.maximum(exponent, 1), (bits & 0x7FFFFF) | jnp.where(exponent > 0, 0x800000, 0)


def _rem_step(r, step, divisor, inverse):
    """r * 2^step modulo the divisor; r < divisor or step = 0. The quotient may err by 1; int32 wraps round."""
    quotient = (r.astype(jnp.float32) * power_of_2(step) * inverse).astype(jnp.int32)
    r = (r << step) - quotient * divisor
    r = jnp.where(r < 0, r + divisor, r)
    return jnp.where(r >= divisor, r - divisor, r)
