"""`Backend`: the record of one implementation, with its name, what it supports, its forward and its backward."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from pallas_fa.operands.layout import transpose
from pallas_fa.problem import Operands, Problem, Residuals


class Support(NamedTuple):
    """Why a backend can't do the forward and the backward of a problem: a reason in words, or None where it can.

    `remark`: what else it does for the problem, in words that follow its name; None for nothing. `only_named`: why
    `implementation=None` does not choose it; None where it does. `gradients_only_named`: why it leaves the backward to
    the next one then.
    """

    forward: str | None = None
    backward: str | None = None
    remark: str | None = None
    only_named: str | None = None
    gradients_only_named: str | None = None

    @classmethod
    def neither(cls, reason: str) -> "Support":
        """Returns that neither direction is supported, for one reason."""
        return cls(reason, reason)


NO_TILES = "it has no tiles to configure, but config={config!r} was given"
NEVER_RUN = "compiled for this GPU, but not run on one yet"
SLOWER_ON_HOPPER = "tested on Hopper, where the kernels of mosaic_gpu are faster"


def no_gradients(problem: Problem) -> str | None:
    """Returns why a problem has no gradients but those of 'reference', which JAX differentiates; None where it has."""
    if problem.pages:
        return "keys and values in pages are for inference"
    return f"{problem.kv_dtype} keys and values are for inference" if problem.has_narrow_keys else None


def forward_in_btnh(forward: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    """Returns `forward(problem, operands)`, which knows the layout "BTNH" only, for any layout. XLA fuses transposes."""

    def run(problem, operands):
        out, lse = forward(*problem.in_btnh(operands))
        return transpose(problem.layout, out), lse

    return run


def backward_in_btnh(backward: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
    """Returns `backward(problem, residuals, d_out, d_lse)`, which knows the layout "BTNH" only, for any layout."""

    def run(problem, residuals, d_out, d_lse):
        operands, out, lse = residuals
        btnh, operands = problem.in_btnh(operands)
        out, d_out = (transpose(problem.layout, x) for x in (out, d_out))
        d_q, d_k, d_v, *rest = backward(btnh, Residuals(operands, out, lse), d_out, d_lse)
        return *(transpose(problem.layout, x) for x in (d_q, d_k, d_v)), *rest

    return run


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute attention.

    Attributes:
      name: what callers write in `implementation=`.
      supports: supports(problem) -> `Support`, on the platform that the backend is made for.
      forward: forward(problem, operands) -> out, [B, T, N, Hv] in the problem's layout, and lse [B, T, N].
      backward: backward(problem, residuals, d_out, d_lse) -> the gradients of `operands.differentiable`, in their dtypes.
      platform: the only platform that it lowers for; None for any.
      needs: the device that it runs on, in words.
      by_default: whether `implementation=None` may choose it.
      plain: whether forward is plain JAX, which JAX differentiates itself, in any mode and any number of times.
      memory: memory(problem) says in words which logits it holds at once, for `explain`; None where that is not known.
    """

    name: str
    supports: Callable[[Problem], Support]
    forward: Callable[[Problem, Operands], tuple[Any, Any]]
    backward: Callable[[Problem, Residuals, Any, Any], tuple[Any, ...]]
    platform: str | None = None
    needs: str = "no particular device"
    by_default: bool = True
    plain: bool = False
    memory: Callable[[Problem], str | None] = lambda problem: None
