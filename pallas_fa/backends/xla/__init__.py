"""The `xla` backend: attention in plain JAX, in chunks; any platform, any float dtype, O(T) memory.

Its code is imported when it first runs.
"""

from typing import Any

from pallas_fa.backends.record import NO_TILES, Backend, Support
from pallas_fa.problem import Operands, Problem, Residuals


def _supports(problem: Problem) -> Support:
    return Support() if problem.config is None else Support.neither(NO_TILES.format(config=problem.config))


def _forward(problem: Problem, operands: Operands) -> tuple[Any, Any]:
    from pallas_fa.backends.xla import attention

    return attention.forward(problem, operands)


def _backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    from pallas_fa.backends.xla import attention

    return attention.backward(problem, residuals, d_out, d_lse)


BACKEND = Backend("xla", _supports, _forward, _backward)
