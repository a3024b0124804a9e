"""In how many parts the query heads of a key head are (`FusedBackwardConfig.head_parts`).

A CTA holds a key block of one key head. With few key heads there are few CTAs, or the longest of them have most of the
work: then query heads are in parts (evidence: backward/head-parts).
"""

import dataclasses

import numpy as np

from pallas_fa.backends.gpu.busy import busy
from pallas_fa.backends.gpu.grid import divisors
from pallas_fa.backends.gpu.pass_costs import bytes_of_parts, flops_of_step
from pallas_fa.backends.gpu.shared_memory import scratch_bytes
from pallas_fa.backends.mma.backward.plan import BackwardPlan
from pallas_fa.backends.mma.backward.scratch import on_gpu

_MOST_CTAS = 4096  # past it CTAs keep the GPU busy as they are
_FASTER = 0.97  # of the time without parts, to be worth it
_WARPGROUPS = 2  # of a multiprocessor, whose registers they fill
# What the times below are made of.
_CTA_START = 4.0  # us
_FLOPS = 2e6  # a us, of one multiprocessor
_MERGE, _BYTES = 4.0, 1.5e6  # us of the kernel that adds parts up, and what it and the stores move a us


def with_best_parts(plan: BackwardPlan) -> BackwardPlan:
    """Returns the plan with the parts that are estimated to be the fastest."""
    if not plan.kind.keys_stationary or plan.group == 1 or plan.grid.ctas > _MOST_CTAS:
        return plan
    few, steps = plan.grid.ctas <= plan.gpu.multiprocessors, plan.visits.counts
    timed = []
    for parts in divisors(plan.group):
        if parts == 1 or few or parts * plan.grid.ctas <= _MOST_CTAS:
            with_parts = dataclasses.replace(plan, config=dataclasses.replace(plan.config, head_parts=parts))
            timed.append((_time(with_parts, steps), with_parts))
    best = min(timed, key=lambda x: x[0])
    return best[1] if best[0] < _FASTER * timed[0][0] else plan


def _time(plan, steps):
    """Returns how long the pass takes, in us. `steps`: of each block, for one query head."""
    grid, at_once = plan.grid, _ctas_at_once(plan)
    of_ctas = steps * plan.group * flops_of_step(plan) * at_once / _FLOPS + _CTA_START
    groups = grid.batch * grid.heads // grid.l2_head_group
    time = busy(np.tile(np.repeat(of_ctas, grid.l2_head_group), groups), plan.gpu.multiprocessors * at_once)
    return time + _MERGE + bytes_of_parts(plan) / _BYTES if plan.has_head_parts else time


def _ctas_at_once(plan):
    """How many CTAs a multiprocessor runs at once."""
    by_memory = plan.gpu.shared_memory // scratch_bytes(on_gpu(plan))
    return max(1, min(_WARPGROUPS // plan.config.wgs, by_memory))
