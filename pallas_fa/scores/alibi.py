"""`Alibi`: attention with linear biases."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.operands import offsets
from pallas_fa.scores.base import Score, float_array


@dataclasses.dataclass(frozen=True)
class Alibi(Score):
    """x - slope * |t + offset - s| (Press et al., arXiv 2108.12409). `slopes`: float, [N] or [*B, N].

    `offset`: an int, or an int array [*B] (decoding into a cache).
    """

    slopes: Any
    offset: Any = 0

    def __post_init__(self):
        object.__setattr__(self, "slopes", float_array("slopes", self.slopes))
        object.__setattr__(self, "offset", offsets.checked("offset", self.offset))

    def bind(self, dims):
        # [N] and [*B, N] are both meant, so the letters name the batch as well.
        return Alibi(dims.spanning("slopes", self.slopes, "BN"), offsets.bound(self.offset, dims))

    def moved(self, part):
        return Alibi(self.slopes, self.offset + part.shift)

    def apply(self, x, b, n, t, s):
        return x - self.slopes * jnp.abs(t + self.offset - s).astype(x.dtype)
