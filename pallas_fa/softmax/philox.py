"""Philox2x32, a counter-based random number generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11).

It is a bijection of two 32-bit counter words for each 32-bit key. Seven rounds pass BigCrush, by the authors' tests; ten
are their default. Elementwise, on uint32 arrays that broadcast against each other.
"""

from typing import Any

import jax.numpy as jnp

MULTIPLIER = 0xD256D193
KEY_STEP = 0x9E3779B9  # what a round adds to the key


def _wide_product(x):
    """Returns the high and the low word of x * MULTIPLIER, from 16-bit halves: `lax.mulhi` does not lower everywhere."""
    word, half = jnp.uint32, jnp.uint32(0xFFFF)
    low, high = x & half, x >> 16
    m_low, m_high = word(MULTIPLIER & 0xFFFF), word(MULTIPLIER >> 16)
    middle = high * m_low + (low * m_low >> 16)
    other = low * m_high + (middle & half)
    return high * m_high + (middle >> 16) + (other >> 16), x * word(MULTIPLIER)


def philox2x32(first: Any, second: Any, key: Any, rounds: int) -> tuple[Any, Any]:
    """Returns two words for the counter (first, second).

    Args:
      first: uint32, the counter's word that is multiplied first.
      second: uint32.
      key: uint32.
      rounds: how many.
    """
    for i in range(rounds):
        high, low = _wide_product(first)
        first, second = high ^ (key + jnp.uint32(i * KEY_STEP % 2**32)) ^ second, low
    return first, second
