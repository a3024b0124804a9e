"""`SoftCap`: bounds the logits."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.operands.pytree import is_finite, is_static_number
from pallas_fa.scores.base import Score

_LEAST = float(jnp.finfo(jnp.float32).tiny)  # what is smaller may count as 0, and 0 / 0 is NaN


def check_cap(name: str, cap: Any, without: str) -> float:
    """Returns a soft cap as a float; raises unless logits, in float32, can be divided and multiplied by it.

    `without` is how to have no soft cap.
    """
    if not is_static_number(cap):
        raise TypeError(
            f"{name}={cap!r} must be a float > 0, known while tracing. For a learned cap use scores.Custom(fn, cap)."
        )
    if not (cap >= _LEAST and is_finite(cap)):
        raise ValueError(
            f"{name}={cap} must be positive and finite in float32, the dtype of logits: at least {_LEAST:.3g}. {without} for"
            " no soft cap."
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
