"""`Bias`: an array that is added to the logits."""

import dataclasses
from typing import Any

from pallas_fa.scores.base import Score, float_array


@dataclasses.dataclass(frozen=True)
class Bias(Score):
    """x + array. `array`: float, broadcastable to [*B, N, T, S]; its broadcast dims are never materialised."""

    array: Any

    def __post_init__(self):
        object.__setattr__(self, "array", float_array("array", self.array))

    def bind(self, dims):
        return Bias(dims.broadcastable("bias", self.array))

    def apply(self, x, b, n, t, s):
        return x + self.array
