"""The dropout of a case, in NumPy and independently of the library: which elements are kept, and by how much they grow."""

from typing import Any

import numpy as np

_MASK = np.uint64(2**32 - 1)


def philox2x32(first: Any, second: Any, key: Any, rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Philox2x32 of Salmon et al. (SC'11), in 64-bit integers."""
    first, second, key = (np.asarray(x, np.uint64) for x in (first, second, key))
    for _ in range(rounds):
        product = first * np.uint64(0xD256D193)
        first, second = (product >> np.uint64(32)) ^ key ^ second, product & _MASK
        key = (key + np.uint64(0x9E3779B9)) & _MASK
    return first, second


def multipliers(words: np.ndarray, rate: float, b: Any, n: Any, t: Any, s: Any) -> np.ndarray:
    """0 or 1 / (1 - rate), of a multiple of 2^-15, at these integer indices, which broadcast against each other."""
    b, n, t, s = (np.asarray(x, np.uint64) for x in (b, n, t, s))
    for word in words:
        b, n = philox2x32(b, n, word, 10)
    pair = philox2x32((t - (t & 8)) ^ n, s - (s & 25), b, 7)
    # The bytes of both words, lowest first, and what they are rotated. A number has two bytes for even and two for odd keys.
    of_bytes = lambda word: np.stack([word >> np.uint64(8 * i) & np.uint64(0xFF) for i in range(4)])
    a, z = map(of_bytes, pair)
    a_right, z_right, a_left = np.roll(a, -1, 0), np.roll(z, -1, 0), np.roll(a, 1, 0)
    numbers = {
        (0, 0, 0): a,
        (0, 0, 8): a_right ^ z,
        (0, 8, 0): z,
        (0, 8, 8): z_right ^ a,
        (16, 0, 0): a ^ a_right ^ z_right ^ a_left,
        (16, 0, 8): a_right ^ z ^ z_right,
        (16, 8, 0): a ^ a_right ^ a_left ^ z,
        (16, 8, 8): z_right ^ a_left,
    }
    bits = 0
    for (far, of_query, of_key), of_number in numbers.items():
        high, low = (np.where(s & 1, of_number[i + 2], of_number[i]) for i in (1, 0))
        here = (s & 16 == far) & (t & 8 == of_query) & (s & 8 == of_key)
        bits = bits + np.where(here, (high & 0x7F) << 8 | low, 0)
    threshold = round(rate * 2**15)
    return np.asarray(bits >= threshold) / (1 - threshold / 2**15)
