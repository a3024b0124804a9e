"""`SoftCap`: bounds the logits."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.operands.pytree import as_python, is_static_number
from pallas_fa.scores.base import Score

# Past these, x / cap or its derivative times cap is below what float32 holds, and counts as 0.
_LEAST, _MOST = 2.0**-100, 2.0**100


def check_cap(name: str, cap: Any, without: str) -> float:
    """Returns a soft cap as a float; raises unless logits and gradients in float32 can be divided and multiplied by it.

    `without` is how to have no soft cap.
    """
    if not is_static_number(cap):
        raise TypeError(
            f"{name}={cap!r} must be a float > 0, known while tracing. For a learned cap use scores.Custom(fn, cap)."
        )
    if not _LEAST <= as_python(cap) <= _MOST:
        raise ValueError(
            f"{name}={cap} must be positive, and from {_LEAST:.1e} to {_MOST:.1e}: logits divided by others leave the range"
            f" of float32. {without} for no soft cap."
        )
    return float(cap)


@dataclasses.dataclass(frozen=True)
class SoftCap(Score):
    """Bounds logits as in Gemma 2: cap * tanh(x / cap), with a float `cap` > 0."""

    cap: float

    def __post_init__(self):
        object.__setattr__(self, "cap", check_cap("cap", self.cap, "Leave the soft cap out"))

    @property
    def bound(self) -> float:
        return self.cap

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return self.cap * jnp.tanh(x / self.cap)
