"""Functions of float32 that kernels lack, or have as approximations only, in operations that they have exactly.

Each errs by at most a few units in the last place over the whole range (tests/test_float_functions.py has the bounds);
they add, multiply, divide, compare and move bits, so that they do so on a CPU as well. Polynomials are minimax fits on the
intervals named.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.backends.gpu.float_bits import exact_product, from_bits, high_part, power_of_2, rounded, scaled, to_bits

_LN2 = math.log(2)
_LN2_HIGH = 0.693359375  # 9 bits: its product with an exponent is exact
_LN2_LOW = _LN2 - _LN2_HIGH
_SQRT_HALF_BITS = 0x3F3504F3


def _horner(x, *coefficients):
    result = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        result = result * x + coefficient
    return result


# ---- exponentials ---------------------------------------------------------------------------------------------------


def _expm1_reduced(r):
    """exp(r) - 1 for |r| <= 0.35."""
    return r + r * r * _horner(r, 0.49999997, 0.16666514, 0.04166733, 0.008369539, 0.0013881868)


def exp(x: Any, low: Any = 0.0) -> Any:
    """e^(x + low), where |low| is at most 2^-9 |x|."""
    x = jnp.clip(x, -105.0, 90.0)
    n = lax.round(x * (1 / _LN2), lax.RoundingMethod.TO_NEAREST_EVEN)
    return scaled(1 + _expm1_reduced(x - n * _LN2_HIGH - n * _LN2_LOW + low), n.astype(jnp.int32))


def exp2(x: Any, low: Any = 0.0) -> Any:
    """2^(x + low), where |low| is at most 2^-9 |x|."""
    x = jnp.clip(x, -152.0, 130.0)
    n = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
    return scaled(1 + _expm1_reduced(((x - n) + low) * _LN2), n.astype(jnp.int32))


def expm1(x: Any) -> Any:
    """e^x - 1."""
    x = jnp.clip(x, -30.0, 90.0)
    n = lax.round(x * (1 / _LN2), lax.RoundingMethod.TO_NEAREST_EVEN)
    result = _expm1_reduced(x - n * _LN2_HIGH - n * _LN2_LOW)
    n = n.astype(jnp.int32)
    # (p + 1 - 2^-n) 2^n; for n = 0 that is p, and past n = 25 nobody sees 2^-n.
    return jnp.where(n == 0, result, scaled(result + (1 - power_of_2(jnp.maximum(-n, -126))), n))


def tanh(x: Any) -> Any:
    """The hyperbolic tangent, by the hardware's powers of 2 and inverse roots: a division takes more than all of it."""
    z = x * x
    near = x + x * z * _horner(z, -0.3333326, 0.1333083, -0.053688023, 0.02046942, -0.0055151638)
    root = lax.rsqrt(1 + lax.exp2(jnp.abs(x) * (2 / _LN2)))
    far = 1 - 2 * (root * root)
    return jnp.where(jnp.abs(x) < 0.65, near, jnp.where(x < 0, -far, far))


# ---- logarithms -----------------------------------------------------------------------------------------------------


def _reduced(x):
    """(e, f) with x = 2^e (1 + f), e an int32 and 1 + f between sqrt(1/2) and sqrt(2), for finite x > 0."""
    is_subnormal = x < 2.0**-126
    bits = to_bits(jnp.where(is_subnormal, x * 2.0**24, x)) - _SQRT_HALF_BITS
    exponent = (bits >> 23) - jnp.where(is_subnormal, 24, 0)
    return exponent, from_bits((bits & 0x7FFFFF) + _SQRT_HALF_BITS) - 1


def _log1p_reduced(f):
    """log(1 + f) for 1 + f between sqrt(1/2) and sqrt(2): 2 atanh(s), and 2 s = f - s f."""
    s = f / (2 + f)
    z = s * s
    return f - s * (f - z * _horner(z, 0.6666666, 0.40000346, 0.28536603, 0.23596334))


def _of_logarithm(x, result):
    """`result` where x is a finite number above 0."""
    result = jnp.where(x == 0, -jnp.inf, jnp.where(x < 0, jnp.nan, result))
    return jnp.where(x < jnp.inf, result, x)  # of infinity and NaN


def log(x: Any) -> Any:
    """The natural logarithm."""
    exponent, f = _reduced(x)
    e = exponent.astype(jnp.float32)
    return _of_logarithm(x, e * _LN2_HIGH + (_log1p_reduced(f) + e * _LN2_LOW))


def log2(x: Any) -> Any:
    """The logarithm to base 2."""
    exponent, f = _reduced(x)
    return _of_logarithm(x, exponent.astype(jnp.float32) + _log1p_reduced(f) * (1 / _LN2))


def log1p(x: Any) -> Any:
    """log(1 + x)."""
    y = rounded(1 + x)
    # What the sum has lost, as a part of it.
    lost = jnp.where(x < 1, x - (y - 1), 1 - (y - x)) / y
    exponent, f = _reduced(y)
    e = exponent.astype(jnp.float32)
    far = e * _LN2_HIGH + (_log1p_reduced(f) + (e * _LN2_LOW + lost))
    return _of_logarithm(y, jnp.where(exponent == 0, _log1p_reduced(x), far))


def _log2_extended(x):
    """(high, low) whose sum is log2(x) to some 2^-35 of itself, for finite x > 0."""
    exponent, f = _reduced(x)
    # s = f / (2 + f) and z = s^2, each as a sum of two floats; log(1 + f) = 2 s (1 + z / 3 + z^2 / 5 + ...).
    d = rounded(2 + f)
    s = f / d
    p, p_low = exact_product(s, d)
    s_low = ((f - p) - p_low - s * (f - (d - 2))) / d
    z, z_low = exact_product(s, s)
    z_low = z_low + 2 * s * s_low
    third, third_low = exact_product(z, 1 / 3)
    third_low = third_low + z_low * (1 / 3) + z * (1 / 3 - float(np.float32(1 / 3)))
    third_low = third_low + z * z * _horner(z, 0.20000078, 0.14273316, 0.11715507)
    t, t_low = exact_product(s, third)
    y = rounded(s + t)
    y_low = (t - (y - s)) + (s_low + t_low + s * third_low)
    base = np.float32(2 / _LN2)
    q, q_low = exact_product(y, base)
    q_low = q_low + y * (2 / _LN2 - float(base)) + y_low * base
    e = exponent.astype(jnp.float32)
    high = rounded(e + q)
    return high, (q - (high - e)) + q_low


def pow(x: Any, y: Any) -> Any:
    """x^y; of a negative x for whole y."""
    high, low = _log2_extended(jnp.abs(x))
    exponent = jnp.clip(y, -(2.0**40), 2.0**40)
    p, p_low = exact_product(exponent, high)
    in_range = jnp.abs(p) < 200
    size = exp2(p, jnp.where(in_range, p_low + exponent * low, 0.0))

    finite_y = jnp.abs(y) < jnp.inf
    whole = lax.round(y, lax.RoundingMethod.TO_NEAREST_EVEN)
    half = 0.5 * whole
    is_whole = finite_y & (whole == y)
    is_odd = is_whole & (lax.round(half, lax.RoundingMethod.TO_NEAREST_EVEN) != half)

    grows = (y > 0) == (jnp.abs(x) > 1)  # where x or y is infinite, or x is 0
    extreme = (x == 0) | (jnp.abs(x) == jnp.inf) | ~finite_y
    size = jnp.where(extreme, jnp.where(grows, jnp.inf, 0.0), size)
    negative = is_odd & (to_bits(x) < 0)
    result = jnp.where(negative, -size, size)
    result = jnp.where((x < 0) & finite_y & (x > -jnp.inf) & ~is_whole, jnp.nan, result)
    result = jnp.where((x != x) | (y != y), x + y, result)
    return jnp.where((y == 0) | (x == 1) | ((x == -1) & (jnp.abs(y) == jnp.inf)), 1.0, result)


# ---- error functions ------------------------------------------------------------------------------------------------


def _erf_near_0(x):
    """erf(x) for |x| <= 1."""
    coefficients = 0.12837917, -0.37612626, 0.11283585, -0.02685381, 0.0051883277, -0.00080101925, 7.853858e-05
    return x + x * _horner(x * x, *coefficients)


def _erfc_far(x):
    """erfc(x) for x >= 1: exp(-x^2) times a polynomial in (x - 3) / (x + 3), over 1 + 2 x."""
    x = jnp.minimum(x, 10.5)
    t = (x - 3) / (x + 3)
    series = _horner(
        t, 1.253008, -0.1356211, -0.047562249, 0.12964509, -0.11927509, 0.068309687, -0.02375526, 0.0025129106, 0.0018215163,
        -0.00070611521,
    )  # fmt: skip
    high = high_part(x)
    return exp(-high * high, -(x - high) * (x + high)) * (series / (1 + 2 * x))


def erf(x: Any) -> Any:
    """The error function."""
    far = 1 - _erfc_far(jnp.abs(x))
    return jnp.where(jnp.abs(x) < 1, _erf_near_0(x), jnp.where(x < 0, -far, jnp.where(x > 0, far, x)))


def erfc(x: Any) -> Any:
    """1 - erf(x)."""
    far = _erfc_far(jnp.abs(x))
    return jnp.where(jnp.abs(x) < 1, 1 - _erf_near_0(x), jnp.where(x < 0, 2 - far, jnp.where(x > 0, far, x)))


# ---- inverse tangents -----------------------------------------------------------------------------------------------


def atan(x: Any) -> Any:
    """The inverse tangent."""
    return atan2(x, jnp.ones_like(x))


def atan2(y: Any, x: Any) -> Any:
    """The angle between the x axis and (x, y), from -pi to pi."""
    shorter, longer = jnp.minimum(abs(x), abs(y)), jnp.maximum(abs(x), abs(y))
    ratio = jnp.where(shorter == longer, jnp.where(longer == 0, 0.0, 1.0), shorter / longer)
    is_far = ratio > math.tan(math.pi / 8)
    r = jnp.where(is_far, (ratio - 1) / (ratio + 1), ratio)
    z = r * r
    angle = r + r * z * _horner(z, -0.33333316, 0.1999849, -0.14243849, 0.10595997, -0.06083442)
    angle = jnp.where(is_far, math.pi / 4 + angle, angle)
    angle = jnp.where(abs(y) > abs(x), math.pi / 2 - angle, angle)
    angle = jnp.where(to_bits(x) < 0, math.pi - angle, angle)
    angle = jnp.where(to_bits(y) < 0, -angle, angle)
    return jnp.where((x != x) | (y != y), x + y, angle)
