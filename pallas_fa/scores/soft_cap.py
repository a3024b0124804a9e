"""`SoftCap`: logits that stay within bounds."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_fa.operands.pytree import is_static_number
from pallas_fa.scores.base import Score


@dataclasses.dataclass(frozen=True)
class SoftCap(Score):
    """cap * tanh(x / cap), as in Gemma 2. `cap`: a float > 0."""

    cap: float

    def __post_init__(self):
        if not is_static_number(self.cap):
            raise TypeError(f"cap={self.cap!r} must be a Python float. For a learned cap use scores.Custom(fn, cap).")
        if not (self.cap > 0 and math.isfinite(self.cap)):
            raise ValueError(f"cap={self.cap} must be positive and finite. Leave the soft cap out for no cap.")
        object.__setattr__(self, "cap", float(self.cap))

    @property
    def bound(self):
        return self.cap

    def apply(self, x, b, n, t, s):
        return self.cap * jnp.tanh(x / self.cap)
