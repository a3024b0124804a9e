"""`Alibi`: attention with linear biases (Press et al., arXiv 2108.12409)."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.part import Part
from pallas_fa.scores.base import Score, float_array


@dataclasses.dataclass(frozen=True)
class Alibi(Score):
    """Subtracts slope * |t + offset - s|.

    Attributes:
      slopes: float, [N] or [*B, N].
      offset: an int, or an int array [*B], for decoding into a cache.
    """

    slopes: Any
    offset: Any = 0

    def __post_init__(self):
        object.__setattr__(self, "slopes", float_array("slopes", self.slopes))
        object.__setattr__(self, "offset", offsets.check("offset", self.offset))

    def bind(self, dims: Dims) -> "Alibi":
        # "BN" takes slopes [N], too.
        return Alibi(dims.spanning("slopes", self.slopes, "BN"), offsets.bind(self.offset, dims))

    def moved(self, part: Part) -> "Alibi":
        return Alibi(self.slopes, self.offset + part.shift)

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return x - self.slopes * jnp.abs(t + self.offset - s).astype(x.dtype)
