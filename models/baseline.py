"""An order-2 byte model: the yardstick of the GPT. It knows nothing but the two previous bytes."""

from __future__ import annotations

import numpy as np


class OrderTwo:
    """Counts of all 1-, 2- and 3-byte strings, each order backed off to the next lower one (Witten and Bell, 1991):

    p(c | context) = (n(context c) + u(context) * p(c | shorter context)) / (n(context) + u(context)),

    n counts occurrences, u counts the different bytes seen after the context; below order 0 all 256 bytes are alike.
    """

    def __init__(self, train: np.ndarray):
        """train: uint8 [bytes]."""
        text = train.astype(np.int32)
        self._tables = []  # for order 0, 1, 2: n(context c) [256**order, 256], n(context), u(context) [256**order]
        for order in range(3):
            counts = np.bincount(_strings(text, order + 1), minlength=256 ** (order + 1)).reshape(-1, 256)
            self._tables.append((counts, counts.sum(axis=1), np.count_nonzero(counts, axis=1)))

    def bits(self, text: np.ndarray) -> np.ndarray:
        """float64 [bytes - 2]: the code length of text[2:], each byte given the two before it. text: uint8 [bytes]."""
        wide = text.astype(np.int32)
        byte = wide[2:]
        probability = np.full(len(byte), 1 / 256)
        for order, (counts, totals, kinds) in enumerate(self._tables):
            context = _strings(wide[2 - order : -1], order) if order else np.zeros(len(byte), np.int32)
            seen, distinct = totals[context], kinds[context]
            backed_off = (counts[context, byte] + distinct * probability) / np.maximum(seen + distinct, 1)
            probability = np.where(seen > 0, backed_off, probability)
        return -np.log2(probability)


def _strings(text: np.ndarray, length: int) -> np.ndarray:
    """int32 [bytes - length + 1]: each string of `length` bytes as one big-endian number. text: int32 [bytes]."""
    numbers = text[: len(text) - length + 1]
    for offset in range(1, length):
        numbers = numbers * 256 + text[offset : len(text) - length + 1 + offset]
    return numbers
