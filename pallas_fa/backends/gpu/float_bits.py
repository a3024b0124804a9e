"""Bits of float32, and exact sums and products of them.

They add, multiply, compare and move bits, which kernels do as a CPU does.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax


def to_bits(x: Any) -> Any:
    """The bits of x, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32)


def from_bits(bits: Any) -> Any:
    """The float32 of these bits."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def power_of_2(n: Any) -> Any:
    """2^n for -126 <= n <= 127."""
    return from_bits((n + 127) << 23)


def scaled(x: Any, n: Any) -> Any:
    """x * 2^n for integers -252 <= n <= 254, in two steps, since 2^n itself may not be a float."""
    half = n >> 1
    return x * power_of_2(half) * power_of_2(n - half)


def high_part(x: Any) -> Any:
    """x with 12 bits: products of two such, or of such and what is left of x, are exact."""
    return from_bits(to_bits(x) & -0x1000)


def rounded(x: Any) -> Any:
    """x without its last bit: no compiler takes it for the sum or the product that x is, and cancels or fuses that."""
    return from_bits(to_bits(x) & -2)


def exact_product(a: Any, b: Any) -> Any:
    """(p, e) with p + e = a * b, where neither overflows nor is subnormal."""
    p = rounded(a * b)
    a_high, b_high = high_part(a), high_part(b)
    a_low, b_low = a - a_high, b - b_high
    return p, ((a_high * b_high - p) + a_high * b_low + a_low * b_high) + a_low * b_low
