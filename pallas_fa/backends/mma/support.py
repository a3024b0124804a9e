"""Which problems the kernels by mma.sync can do. Importing this imports no part of Pallas."""

import functools
import re
from typing import Any

import jax

from pallas_fa.backends.gpu import head_dims
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.support import why_not, why_not_functions
from pallas_fa.backends.record import NEVER_RUN, Support
from pallas_fa.problem import Problem


@functools.lru_cache(maxsize=256)
def supports(problem: Problem, gpu: Gpu) -> Support:
    """Returns what the kernels can do of `problem` on `gpu`."""
    kernels = head_dims.padded(problem)
    reason = why_not(problem) or _why_no_forward(kernels, gpu)
    if reason:
        return Support.neither(reason)
    from pallas_fa.backends.mma.backward.backward import why_no_backward

    return Support(None, why_no_backward(kernels, gpu), head_dims.remark(problem), NEVER_RUN)


def runs_on(gpu: Gpu) -> bool:
    """Whether a GPU has the instructions."""
    return bool(re.fullmatch(r"([89]|1\d)\.\d", gpu.compute_capability))


def _why_no_forward(problem, gpu):
    if not runs_on(gpu):
        return f"a GPU of compute capability {gpu.compute_capability}; its kernels are for 8.0 and above"
    if problem.pages:
        return "keys in pages; its kernels read keys that lie together"
    if problem.values_in_keys:
        return "values that lie in the keys; its kernels read them from arrays of their own"
    return _config_reason(problem) or why_not_functions(problem) or _arrays_reason(problem, gpu)


def _config_reason(problem):
    from pallas_fa.backends.mma.config import Config

    if problem.config is None or isinstance(problem.config, Config):
        return None
    return f"config={problem.config!r}; it takes a pallas_fa.backends.mma.config.Config or None"


def _arrays_reason(problem, gpu):
    from pallas_fa.backends.gpu.arrays import KernelArrays
    from pallas_fa.backends.gpu.shared_memory import fits, scratch_bytes
    from pallas_fa.backends.mma.forward.choose import choose
    from pallas_fa.backends.mma.forward.scratch import on_gpu

    arrays: Any = KernelArrays.of(problem.score, problem.mask, problem.dims)
    if reason := next((reason for reason in (array.why_not() for array in arrays) if reason), None):
        return reason
    needed = on_gpu(choose(problem, gpu))
    if fits(needed, gpu):
        return None
    with_arrays = " with the arrays of its mask and score" if jax.tree.leaves((problem.score, problem.mask)) else ""
    return f"{scratch_bytes(needed)} bytes of shared memory{with_arrays}; there are {gpu.shared_memory}"
