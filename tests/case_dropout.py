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
    pair = philox2x32((t - (t & 8)) ^ n, s - (s & 9), b, 7)
    # The bytes of both words, lowest first: an element's number has one of them, or two, in its upper and its lower half.
    first, second = ([word >> np.uint64(8 * i) & np.uint64(0xFF) for i in range(4)] for word in pair)
    odd = (s & 1).astype(bool)
    of_key = lambda even, x: np.where(odd, x, even)
    upper = {
        (0, 0): of_key(first[1], first[3]),
        (0, 8): of_key(first[0] ^ second[1], first[2] ^ second[3]),
        (8, 0): of_key(second[1], second[3]),
        (8, 8): of_key(second[2] ^ first[1], second[0] ^ first[3]),
    }
    lower = {
        (0, 0): of_key(first[0], first[2]),
        (0, 8): of_key(first[1] ^ second[0], first[3] ^ second[2]),
        (8, 0): of_key(second[0], second[2]),
        (8, 8): of_key(second[3] ^ first[0], second[1] ^ first[2]),
    }
    chosen = lambda by_place: sum(np.where((t & 8 == i) & (s & 8 == j), x, 0) for (i, j), x in by_place.items())
    bits = (chosen(upper) & 0x7F) << 8 | chosen(lower)
    threshold = round(rate * 2**15)
    return np.asarray(bits >= threshold) / (1 - threshold / 2**15)
