"""How CTAs share the heads: in how many parts the query heads of a key head are, and how many heads run at once.

A CTA holds a key block of one key head. With few key heads there are few CTAs, or the longest of them have most of the
work: then query heads are in parts. Of the CTAs that run together, those of the same head share the L2 cache, and those of
others fill the GPU (evidence: backward/head-parts).
"""

import dataclasses
import math
from collections.abc import Iterator

import jax

from pallas_fa.backends.gpu import head_parts
from pallas_fa.backends.gpu.busy import busy
from pallas_fa.backends.gpu.grid import divisors, nearest_divisor
from pallas_fa.backends.hopper.backward.plan import BackwardPlan

_ROUNDS = 12  # of CTAs on all multiprocessors, past which they do so in the table's order of heads that are not grouped
_FASTER = 0.98  # of the time without parts, or with the heads of the table, to be worth it
# What the times below are made of.
_CTA_START = 4.0  # us
_FLOPS = 4.2e6  # a us, of one multiprocessor
_OF_L2 = 0.06  # more time, tile after tile, for each doubling of the heads that share the L2 cache
_STREAMED, _HIDDEN = 4.5e6, 0.88  # bytes that memory streams a us, and what part of that time matmuls hide
_BY_HEAD = 1.05  # times the time of tile after tile
_JUST_FULL = 0.02  # more time where several head groups follow each other and each fills the GPU but once
_BYTES = 5e6  # a us, of parts


def with_best_order(plan: BackwardPlan) -> BackwardPlan:
    """Returns the plan with the parts and the head groups that are estimated to be the fastest."""
    order = plan.order
    most = head_parts.MOST_CTAS if plan.group > 1 else _ROUNDS * plan.gpu.multiprocessors
    if not plan.kind.keys_stationary or order.persistent or order.grid.ctas > most:
        return plan
    steps = plan.visits.counts
    timed = [(_time(x, steps), x) for x in _candidates(plan)]
    fastest = lambda some: min(some, key=lambda x: x[0])
    usual = fastest(x for x in timed if x[1].config.head_parts == 1) if plan.group > 1 else (_time(plan, steps), plan)
    best = head_parts.fewest([usual, *timed])
    return best[1] if best[0] < _FASTER * usual[0] else usual[1]


def _candidates(plan: BackwardPlan) -> Iterator[BackwardPlan]:
    order, mask = plan.order, plan.problem.mask
    changed = lambda **options: dataclasses.replace(plan, config=dataclasses.replace(plan.config, **options))
    for parts in head_parts.to_try(plan, order.grid.ctas):
        if not plan.kind.fused or mask is None or jax.tree.leaves(mask):
            yield changed(head_parts=parts, l2_head_group=plan.config.l2_head_group * parts)
            continue
        for group in _heads_at_once(plan, parts):
            if plan.group > 1 or group >= order.grid.l2_head_group:
                yield changed(head_parts=parts, l2_head_group=group)


def _heads_at_once(plan, parts):
    """Divisors of all heads of which the CTAs fill half of the GPU to eight times as much as it has; else the nearest."""
    grid = plan.order.grid
    heads, count = grid.batch * grid.heads * parts, plan.gpu.multiprocessors
    filling = [x for x in divisors(heads) if 0.5 <= x * grid.ctas_per_head / count <= 8]
    return filling or [nearest_divisor(heads, count / grid.ctas_per_head)]


def _time(plan, steps):
    """Returns how long the pass takes, in us. `steps`: of each block, for one query head."""
    grid = plan.order.grid
    of_ctas = steps * (plan.group * plan.flops_of_step / _FLOPS) + _CTA_START
    time = busy(grid.of_all(of_ctas), plan.gpu.multiprocessors)
    if plan.problem.mask is not None:
        time = _in_groups(plan, time, steps)
    return time + head_parts.cost(plan, _BYTES)


def _in_groups(plan, time, steps):
    """Returns how long the pass takes, whose matmuls take `time`, where so many heads share the L2 cache."""
    problem, grid = plan.problem, plan.order.grid
    fills = grid.l2_head_group * grid.ctas_per_head / plan.gpu.multiprocessors
    if plan.order.by_tile:  # of each head a few tiles are in use
        return time * (1 + _OF_L2 * math.log2(max(min(fills, grid.l2_head_group), 1)))
    just_full = _JUST_FULL if fills < 1.2 and grid.batch * grid.heads > grid.l2_head_group else 0
    of_query = problem.dtype.itemsize * (problem.H + problem.Hv) + 4 * problem.H  # q and dO, and sums of dQ
    queries = problem.dims.B * problem.dims.N * problem.dims.T
    # The CTAs of a head that run at once stream what they see together, those that start later once more: under a causal
    # mask, where each sees half of the queries in the mean, nearly all; under a window little of it is the same.
    seen = min(2 * steps.mean() / plan.visits.tiles, 1)
    streamed = max(fills * seen, 1) * queries * of_query
    return time * _BY_HEAD * (1 + just_full) + (1 - _HIDDEN) * streamed / _STREAMED
