"""Kernels for NVIDIA Hopper (compute capability 9.0): wgmma and TMA. Importing this imports no part of Pallas."""

import functools
from typing import Any

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.support import supports
from pallas_fa.backends.record import Backend
from pallas_fa.problem import Operands, Problem, Residuals


@functools.cache
def backend(gpu: Gpu) -> Backend:
    """Returns the record of the kernels for `gpu`."""

    def forward(problem: Problem, operands: Operands) -> tuple[Any, Any]:
        if problem.values_in_keys:
            from pallas_fa.backends.hopper.mla.mla import attention

            return attention(problem, operands, gpu)
        from pallas_fa.backends.gpu.few_queries import applies
        from pallas_fa.backends.hopper.decode.decode import decode
        from pallas_fa.backends.hopper.forward.forward import forward

        return (decode if applies(problem) else forward)(problem, operands, gpu)

    def backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        from pallas_fa.backends.hopper.backward.backward import backward

        return backward(problem, residuals, d_out, d_lse, gpu)

    needs = "an NVIDIA GPU of compute capability 9.0"
    return Backend(
        "mosaic_gpu", lambda problem: supports(problem, gpu), forward, backward, platform="cuda", needs=needs
    )
