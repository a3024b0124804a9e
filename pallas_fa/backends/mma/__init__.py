"""Kernels for NVIDIA GPUs of compute capability 8.0 and above, by instructions that all of them have: mma.sync, cp.async.

Importing this imports no part of Pallas.
"""

import functools
from typing import Any

from pallas_fa.backends.gpu import narrow_keys
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.mma.support import supports
from pallas_fa.backends.record import Backend
from pallas_fa.problem import Operands, Problem, Residuals


@functools.cache
def backend(gpu: Gpu, name: str) -> Backend:
    """Returns the record of the kernels for `gpu`. `implementation=None` leaves them out (`Support.only_named` says why)."""

    def forward(problem: Problem, operands: Operands) -> tuple[Any, Any]:
        from pallas_fa.backends.gpu.few_queries import taken_by_mma
        from pallas_fa.backends.mma.decode.decode import decode
        from pallas_fa.backends.mma.forward.forward import forward

        if narrow_keys.why_not_read(problem, gpu):
            problem, operands = narrow_keys.converted(problem, operands)
        return (decode if taken_by_mma(problem) else forward)(problem, operands, gpu)

    def backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        from pallas_fa.backends.mma.backward.backward import backward

        return backward(problem, residuals, d_out, d_lse, gpu)

    needs = "an NVIDIA GPU of compute capability 8.0 or above"
    answer = lambda problem: supports(problem, gpu)
    return Backend(name, answer, forward, backward, platform="cuda", needs=needs)
