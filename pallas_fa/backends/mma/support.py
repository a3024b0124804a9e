"""Which problems the kernels by mma.sync can do. Importing this imports no part of Pallas."""

import functools
import re
from typing import Any

import jax

from pallas_fa.backends.gpu import head_dims, narrow_keys
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.support import why_not, why_not_functions
from pallas_fa.backends.record import NEVER_RUN, SLOWER_ON_HOPPER, Support, no_gradients
from pallas_fa.operands import diagonals
from pallas_fa.problem import Problem


@functools.lru_cache(maxsize=256)
def supports(problem: Problem, gpu: Gpu) -> Support:
    """Returns what the kernels can do of `problem` on `gpu`."""
    not_read = narrow_keys.why_not_read(problem, gpu)
    if not_read and problem.pages:
        return Support.neither(not_read)
    own = narrow_keys.widened(problem) if not_read else problem
    kernels = head_dims.padded(own)
    if problem.pages and kernels is not own:
        return Support.neither(f"head dims H={problem.H} and Hv={problem.Hv}; it takes multiples of 8 of keys in pages")
    reason = why_not(problem) or _why_no_forward(kernels, gpu)
    if reason:
        return Support.neither(reason)
    from pallas_fa.backends.mma.backward.backward import why_no_backward

    no_backward = no_gradients(problem) or why_no_backward(kernels, gpu)
    only_named = SLOWER_ON_HOPPER if gpu.compute_capability == "9.0" else NEVER_RUN
    return Support(None, no_backward, _remark(problem, kernels, gpu, not no_backward), only_named)


def runs_on(gpu: Gpu) -> bool:
    """Whether a GPU has the instructions."""
    return bool(re.fullmatch(r"([89]|1\d)\.\d", gpu.compute_capability))


def _why_no_forward(problem, gpu):
    if not runs_on(gpu):
        return f"a GPU of compute capability {gpu.compute_capability}; its kernels are for 8.0 and above"
    if problem.values_in_keys:
        return "values that lie in the keys; its kernels read them from arrays of their own"
    return (
        _config_reason(problem)
        or _pages_reason(problem)
        or why_not_functions(problem)
        or _rows_reason(problem)
        or _arrays_reason(problem, gpu)
    )


def _remark(problem, kernels, gpu, has_backward):
    from pallas_fa.backends.gpu import few_queries, head_parts
    from pallas_fa.backends.mma.backward.choose import plans
    from pallas_fa.backends.mma.decode.choose import choose

    remarks = [narrow_keys.remark(problem, kernels), head_dims.remark(problem)]
    if few_queries.taken_by_mma(kernels):
        remarks.append(few_queries.remark(kernels, choose(kernels, gpu).config.kv_splits))
    if has_backward:
        remarks.append(head_parts.remark(plans(kernels, gpu)))
    return "; ".join(filter(None, remarks)) or None


def _pages_reason(problem):
    if problem.pages is None:
        return None
    from pallas_fa.backends.gpu.few_queries import taken_by_mma

    if problem.mask is not None and problem.mask.has_blocks:
        return "a block mask and keys in pages"
    if not taken_by_mma(problem):
        return f"config={problem.config!r} and keys in pages; its kernel for them takes DecodeConfig"
    size = problem.pages.size
    return f"pages of {size} rows; it loads pages of a multiple of 8" if size % 8 else None


def _rows_reason(problem):
    """Of few queries, whose functions are evaluated by rows."""
    from pallas_fa.backends.gpu.few_queries import as_kernel_sees, taken_by_mma

    rows = as_kernel_sees(problem) if taken_by_mma(problem) else problem
    return None if rows is problem else why_not_functions(rows)


def _config_reason(problem):
    from pallas_fa.backends.mma.config import Config

    if problem.config is None:
        return None
    if isinstance(problem.config, Config):
        return _decode_config_reason(problem)
    return f"config={problem.config!r}; it takes a pallas_fa.backends.mma.config.Config or None"


def _decode_config_reason(problem):
    from pallas_fa.backends.gpu.few_queries import MOST_QUERIES, taken_by_mma

    tiles = problem.config.decode
    if tiles is None:
        return None
    if taken_by_mma(problem):
        skewed = tiles.rows < 64 and any(map(diagonals.spans, jax.tree.leaves((problem.score, problem.mask))))
        return f"config={problem.config!r} with an array of diagonals, whose tiles have rows=64" if skewed else None
    if problem.dims.T > MOST_QUERIES:
        return f"config={problem.config!r} for few queries, and T={problem.dims.T} is more than {MOST_QUERIES} queries"
    return f"config={problem.config!r} for few queries with a block mask, dropout, or tiles of the forward kernel"


def _arrays_reason(problem, gpu):
    from pallas_fa.backends.gpu.arrays import KernelArrays
    from pallas_fa.backends.gpu.few_queries import taken_by_mma
    from pallas_fa.backends.gpu.shared_memory import fits, scratch_bytes
    from pallas_fa.backends.mma.decode import choose as decode
    from pallas_fa.backends.mma.decode import scratch as decode_scratch
    from pallas_fa.backends.mma.forward import choose as forward
    from pallas_fa.backends.mma.forward import scratch as forward_scratch

    arrays: Any = KernelArrays.of(problem.score, problem.mask, problem.dims)
    if reason := next((reason for reason in (array.why_not() for array in arrays) if reason), None):
        return reason
    if taken_by_mma(problem):
        needed = decode_scratch.on_gpu(decode.choose(problem, gpu))
    else:
        needed = forward_scratch.on_gpu(forward.choose(problem, gpu))
    if fits(needed, gpu):
        return None
    with_arrays = " with the arrays of its mask and score" if jax.tree.leaves((problem.score, problem.mask)) else ""
    return f"{scratch_bytes(needed)} bytes of shared memory{with_arrays}; there are {gpu.shared_memory}"
