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
    pair = philox2x32((t - (t & 8)) ^ n, s - (s & 8), b, 7)
    word = np.where(t & 8, pair[1], pair[0])
    bits = np.where(s & 8, word >> np.uint64(16), word) & np.uint64(0x7FFF)
    threshold = round(rate * 2**15)
    return (bits >= threshold) / (1 - threshold / 2**15)
