"""`Backend`: the record of one implementation, with its name, what it supports, its forward and its backward."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_fa.problem import Operands, Problem, Residuals


class Support(NamedTuple):
    """Why a backend can't do the forward and the backward of a problem: a reason in words, or None where it can."""

    forward: str | None = None
    backward: str | None = None

    @classmethod
    def neither(cls, reason: str) -> "Support":
        """Returns that neither direction is supported, for one reason."""
        return cls(reason, reason)


NO_TILES = "it has no tiles to configure, but config={config!r} was given"


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
      name: what callers write in `implementation=`.
      supports: supports(problem) -> `Support`, on the platform that the backend is made for.
      forward: forward(problem, operands) -> out [B, T, N, Hv] and lse [B, T, N].
      backward: backward(problem, residuals, d_out, d_lse) -> the gradients of `operands.differentiable`, in their dtypes.
      platform: the only platform that it lowers for; None for any.
      needs: the device that it runs on, in words.
      by_default: whether `implementation=None` may choose it.
      plain: whether forward is plain JAX, which JAX differentiates itself, in any mode and any number of times.
    """

    name: str
    supports: Callable[[Problem], Support]
    forward: Callable[[Problem, Operands], tuple[Any, Any]]
    backward: Callable[[Problem, Residuals, Any, Any], tuple[Any, ...]]
    platform: str | None = None
    needs: str = "no particular device"
    by_default: bool = True
    plain: bool = False
