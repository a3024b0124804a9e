"""Kernels for NVIDIA Hopper (compute capability 9.0): wgmma and TMA. Importing this imports no part of Pallas."""

import functools
from typing import Any

from pallas_fa.backends.gpu import narrow_keys
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper import narrow
from pallas_fa.backends.hopper.support import reads_narrow, supports
from pallas_fa.backends.record import Backend, Support
from pallas_fa.problem import Operands, Problem, Residuals


@functools.cache
def backend(gpu: Gpu, by_mma: Backend) -> Backend:
    """Returns the record of the kernels for `gpu`, and of those of `by_mma` where they are faster: for some few queries."""

    def is_left_to_mma(problem: Problem) -> bool:
        from pallas_fa.backends.hopper.decode.faster_by_mma import faster_by_mma

        return faster_by_mma(problem, by_mma, gpu, reads_narrow(problem, gpu))

    def answer(problem: Problem) -> Support:
        is_not_converted = problem.has_narrow_keys and problem.pages and not reads_narrow(problem, gpu)
        if is_not_converted and (reason := narrow.why_not_tiles(problem)):
            return Support.neither(reason)
        if is_not_converted or (problem.has_narrow_keys and is_left_to_mma(problem)):
            found = by_mma.supports(problem)._replace(only_named=None)
        else:
            found = supports(problem, gpu)
        if found.forward is not None or not is_left_to_mma(problem):
            return found
        remark = "; ".join(filter(None, ("few queries by mma.sync", by_mma.supports(problem).remark)))
        return found._replace(remark=remark)

    def forward(problem: Problem, operands: Operands) -> tuple[Any, Any]:
        if is_left_to_mma(problem):
            return by_mma.forward(problem, operands)
        if not reads_narrow(problem, gpu):
            problem, operands = narrow_keys.converted(problem, operands)
        if problem.values_in_keys:
            from pallas_fa.backends.hopper.mla.mla import attention

            return attention(problem, operands, gpu)
        from pallas_fa.backends.hopper.decode.choose import applies
        from pallas_fa.backends.hopper.decode.decode import decode
        from pallas_fa.backends.hopper.forward.forward import forward

        return (decode if applies(problem) else forward)(problem, operands, gpu)

    def backward(problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        from pallas_fa.backends.hopper.backward.backward import backward

        return backward(problem, residuals, d_out, d_lse, gpu)

    needs = "an NVIDIA GPU of compute capability 9.0"
    return Backend("mosaic_gpu", answer, forward, backward, platform="cuda", needs=needs)
