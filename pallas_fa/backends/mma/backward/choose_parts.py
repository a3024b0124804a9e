"""In how many parts the query heads of a key head are (`head_parts` of the backward's configurations).

A CTA holds a key block of one key head. With few key heads there are few CTAs, or the longest of them have most of the
work: then query heads are in parts (evidence: backward/head-parts).
"""

import dataclasses

from pallas_fa.backends.gpu import head_parts
from pallas_fa.backends.gpu.busy import busy
from pallas_fa.backends.gpu.shared_memory import scratch_bytes
from pallas_fa.backends.mma.backward.plan import BackwardPlan
from pallas_fa.backends.mma.backward.scratch import on_gpu

_FASTER = 0.97  # of the time without parts, to be worth it
_WARPGROUPS = 2  # of a multiprocessor, whose registers they fill
# What the times below are made of.
_CTA_START = 4.0  # us
_FLOPS = 2e6  # a us, of one multiprocessor
_ALONE = 0.65  # of these, those of a CTA that runs alone on a multiprocessor that may run two
_BYTES = 1.5e6  # a us, of parts


def with_best_parts(plan: BackwardPlan) -> BackwardPlan:
    """Returns the plan with the parts that are estimated to be the fastest."""
    ctas = plan.grid.ctas
    if not plan.kind.keys_stationary or plan.group == 1 or ctas > head_parts.MOST_CTAS:
        return plan
    steps = plan.visits.counts
    in_parts = lambda parts: dataclasses.replace(plan, config=dataclasses.replace(plan.config, head_parts=parts))
    timed = [(_time(x, steps), x) for x in map(in_parts, head_parts.to_try(plan, ctas))]
    best = head_parts.fewest(timed)
    return best[1] if best[0] < _FASTER * timed[0][0] else plan


def _time(plan, steps):
    """Returns how long the pass takes, in us. `steps`: of each block, for one query head."""
    grid, at_once, multiprocessors = plan.grid, _ctas_at_once(plan), plan.gpu.multiprocessors
    of_rate = 1 / at_once
    if at_once > 1 and grid.ctas <= multiprocessors:
        at_once, of_rate = 1, _ALONE
    of_ctas = steps * (plan.group * plan.flops_of_step / (_FLOPS * of_rate)) + _CTA_START
    time = busy(grid.of_all(of_ctas), multiprocessors * at_once)
    return time + head_parts.cost(plan, _BYTES)


def _ctas_at_once(plan):
    """How many CTAs a multiprocessor may run at once."""
    by_memory = plan.gpu.shared_memory // scratch_bytes(on_gpu(plan))
    return max(1, min(_WARPGROUPS // plan.config.wgs, by_memory))
