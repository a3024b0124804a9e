"""Which calls with few queries Hopper's kernels leave to those by mma.sync, whose tiles have fewer rows."""

import functools

from pallas_fa.backends.gpu import narrow_keys
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.few_queries import group_of, taken_by_mma
from pallas_fa.backends.record import Backend
from pallas_fa.problem import Problem

_MOST_ROWS = 16  # of the smallest tile by mma.sync
_LEAST_PAGE = 64  # smaller pages come faster by TMA


@functools.lru_cache(maxsize=256)
def faster_by_mma(problem: Problem, by_mma: Backend, gpu: Gpu) -> bool:
    """Returns whether the kernels by mma.sync are at least as fast as Hopper's (evidence: decode/mma-on-hopper).

    Not for tiles that the call names, which are Hopper's.
    """
    if problem.has_narrow_keys:  # which these alone read as they are
        return not narrow_keys.why_not_read(problem, gpu) and by_mma.supports(problem).forward is None
    if problem.config is not None or problem.values_in_keys or not taken_by_mma(problem):
        return False
    if problem.pages is not None and problem.pages.size < _LEAST_PAGE:
        return False
    return problem.dims.T * group_of(problem) <= _MOST_ROWS and by_mma.supports(problem).forward is None
