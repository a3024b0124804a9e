"""The choice of tiles, and of the parts of the keys, where there are few queries."""

import dataclasses

from pallas_fa.backends.gpu import grouped_rows
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.shared_memory import first_that_fits
from pallas_fa.backends.hopper.config import ForwardConfig
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.scratch import on_gpu
from pallas_fa.problem import Problem

MOST_QUERIES = 16
_TILES = ForwardConfig(1, 64, stages=3, pin_softmax=False), ForwardConfig(1, 64, pin_softmax=False)
_MOST_SPLITS = 64
# In key blocks: what a CTA takes beside its steps, and what one more part takes to merge.
_CTA_START, _MERGE = 4, 0.1


def applies(problem: Problem) -> bool:
    """Whether the call has few enough queries, and no dropout, whose elements are those of heads and not of rows."""
    return problem.dims.T <= MOST_QUERIES and problem.dropout is None


def group_of(problem: Problem) -> int:
    """How many query heads share a tile as its rows."""
    return 1 if grouped_rows.has_lengths_by_head(problem) else problem.group


def choose(problem: Problem, gpu: Gpu, interpret: bool = False) -> ForwardPlan:
    """Returns the plan of the problem of rows, with the tiles that the call names, or with those chosen here."""
    named = problem.config and problem.config.forward
    rows = grouped_rows.of_problem(problem) if group_of(problem) > 1 else problem
    if named:
        return ForwardPlan(rows, named, interpret)
    plans = [ForwardPlan(rows, tiles, interpret) for tiles in _TILES]
    split = [dataclasses.replace(p, config=dataclasses.replace(p.config, kv_splits=_splits(p, gpu))) for p in plans]
    return first_that_fits([*split, *plans], on_gpu, gpu)


def _splits(plan, gpu):
    """How many parts take least time, if all take the same time and CTAs of one multiprocessor share its bandwidth."""

    def time(splits):
        rounds = -(-plan.grid.ctas * splits // gpu.multiprocessors)
        return rounds * (-(-plan.kv_blocks // splits) + _CTA_START) + _MERGE * splits

    return min(range(1, min(_MOST_SPLITS, plan.kv_blocks) + 1), key=time)
