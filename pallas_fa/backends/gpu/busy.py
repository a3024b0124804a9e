"""How long a kernel keeps the GPU busy, from how long each of its CTAs takes."""

import heapq

import numpy as np

_ONE_BY_ONE = 2048  # the last CTAs, which decide how uneven the end is; those before keep all multiprocessors busy


def busy(times: np.ndarray, multiprocessors: int) -> float:
    """Returns how long multiprocessors are busy of which the one that is free first runs the next CTA.

    `times`: of each CTA, in the order in which they start.
    """
    if times.size <= multiprocessors:
        return times.max()
    before, last = times[:-_ONE_BY_ONE], times[-_ONE_BY_ONE:]
    free = [before.sum() / multiprocessors] * multiprocessors
    for time in last:
        heapq.heapreplace(free, free[0] + time)
    return max(free)
