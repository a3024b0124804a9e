"""Which calls with few queries Hopper's kernels leave to those by mma.sync, whose tiles have fewer rows."""

import functools

from pallas_fa.backends.gpu import narrow_keys
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.few_queries import group_of, taken_by_mma
from pallas_fa.backends.record import Backend
from pallas_fa.problem import Problem

_MOST_ROWS = 16  # of the smallest tile by mma.sync
_MOST_NARROW_ROWS = 32  # with keys of 8 bits, which are converted for each warp
_LEAST_PAGE = 64  # smaller pages come faster by TMA


@functools.lru_cache(maxsize=256)
def faster_by_mma(problem: Problem, by_mma: Backend, gpu: Gpu, are_read: bool) -> bool:
    """Returns whether the kernels by mma.sync are at least as fast as Hopper's (evidence: decode/mma-on-hopper).

    Not for tiles that the call names, which are Hopper's. `are_read`: whether Hopper's kernels read keys of 8 bits as they
    are.
    """
    if problem.has_narrow_keys and not are_read:  # which these alone may read as they are
        return not narrow_keys.why_not_read(problem, gpu) and by_mma.supports(problem).forward is None
    if problem.config is not None or problem.values_in_keys or not taken_by_mma(problem):
        return False
    if problem.pages is not None and problem.pages.size < _LEAST_PAGE and not problem.has_narrow_keys:
        return False
    most = _MOST_NARROW_ROWS if problem.has_narrow_keys else _MOST_ROWS
    return problem.dims.T * group_of(problem) <= most and by_mma.supports(problem).forward is None
