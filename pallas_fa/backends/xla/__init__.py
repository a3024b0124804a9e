"""The `xla` backend: attention in plain JAX, in chunks; any platform, any float dtype, memory by the rule of `plan`.

Its code is imported when it first runs.
"""

from typing import Any

from pallas_fa.backends.record import (
    NO_TILES,
    Backend,
    Support,
    backward_in_btnh,
    forward_in_btnh,
    no_gradients,
)
from pallas_fa.problem import Operands, Problem, Residuals


def _supports(problem: Problem) -> Support:
    if problem.pages and problem.dims.has_symbolic_length:
        return Support.neither("a symbolic length with keys in pages, which are not padded to whole chunks")
    if problem.forward_mode and problem.dims.has_symbolic_length:
        return Support.neither(
            "a symbolic length with forward_mode=True; its tangents scan over a known number of chunks"
        )
    if problem.dims.has_symbolic_length and problem.mask is not None and problem.mask.has_blocks:
        return Support.neither("a symbolic length with a BlockMask, which is not padded to whole chunks")
    if problem.config is not None:
        return Support.neither(NO_TILES.format(config=problem.config))
    return Support(backward=no_gradients(problem))


def _memory(problem: Problem) -> str | None:
    from pallas_fa.backends.xla import plan

    return plan.memory(problem)


def _forward(problem: Problem, operands: Operands) -> tuple[Any, Any]:
    from pallas_fa.backends.xla import attention

    if problem.dims.has_symbolic_length:
        from pallas_fa.backends.xla import symbolic

        return symbolic.forward(attention.forward, problem, operands)
    return attention.forward(problem, operands)


def _backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    from pallas_fa.backends.xla import attention

    if problem.dims.has_symbolic_length:
        from pallas_fa.backends.xla import symbolic

        return symbolic.backward(attention.backward, problem, residuals, d_out, d_lse)
    return attention.backward(problem, residuals, d_out, d_lse)


BACKEND = Backend("xla", _supports, forward_in_btnh(_forward), backward_in_btnh(_backward), memory=_memory)
