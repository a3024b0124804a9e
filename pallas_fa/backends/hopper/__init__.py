"""Kernels for NVIDIA Hopper (compute capability 9.0): wgmma and TMA. Importing this imports no part of Pallas."""

from typing import Any

from pallas_fa.backends.hopper.support import supports
from pallas_fa.backends.record import Backend
from pallas_fa.problem import Operands, Problem, Residuals


def _forward(problem: Problem, operands: Operands) -> tuple[Any, Any]:
    from pallas_fa.backends.hopper.forward.forward import forward

    return forward(problem, operands)


def _backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
    from pallas_fa.backends.hopper.backward.backward import backward

    return backward(problem, residuals, d_out, d_lse)


_BACKEND = Backend(
    "mosaic_gpu",
    supports,
    _forward,
    _backward,
    platform="cuda",
    needs="an NVIDIA GPU of compute capability 9.0",
)


def backend() -> Backend:
    """The record of the kernels."""
    return _BACKEND
