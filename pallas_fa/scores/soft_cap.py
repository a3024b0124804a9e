"""`SoftCap`: bounds the logits."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from pallas_fa.operands.pytree import is_static_number
from pallas_fa.scores.base import Score


@dataclasses.dataclass(frozen=True)
class SoftCap(Score):
    """Bounds logits as in Gemma 2: cap * tanh(x / cap), with a float `cap` > 0."""

    cap: float

    def __post_init__(self):
        if not is_static_number(self.cap):
            raise TypeError(f"cap={self.cap!r} must be a Python float. For a learned cap use scores.Custom(fn, cap).")
        if not (self.cap > 0 and math.isfinite(self.cap)):
            raise ValueError(f"cap={self.cap} must be positive and finite. Leave the soft cap out for no cap.")
        object.__setattr__(self, "cap", float(self.cap))

    @property
    def bound(self) -> float:
        return self.cap

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return self.cap * jnp.tanh(x / self.cap)
