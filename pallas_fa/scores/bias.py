"""`Bias`: adds an array to the logits."""

import dataclasses
from typing import Any

from pallas_fa.operands.dims import Dims
from pallas_fa.scores.base import Score, float_array


@dataclasses.dataclass(frozen=True)
class Bias(Score):
    """Adds `array`, float and broadcastable to [*B, N, T, S], whose broadcast dims are never materialised."""

    array: Any

    def __post_init__(self):
        object.__setattr__(self, "array", float_array("array", self.array))

    def bind(self, dims: Dims, lengths: Any) -> "Bias":
        return Bias(dims.broadcastable("bias", self.array))

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return x + self.array
