"""The choice of tiles, and of the parts of the keys, where there are few queries."""

import dataclasses

from pallas_fa.backends.gpu import grouped_rows
from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.shared_memory import first_that_fits
from pallas_fa.backends.hopper.config import ForwardConfig
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.scratch import on_gpu
from pallas_fa.problem import Problem

MOST_QUERIES = 16
# Evidence: decode/kv-splits.
_TILES = tuple(ForwardConfig(1, 64, stages, pin_softmax=False) for stages in (3, 2, 1))
_MOST_SPLITS = 64
# In key blocks: what a CTA takes beside its steps, and what one more part takes to merge.
_CTA_START, _MERGE = 4, 0.1


def applies(problem: Problem) -> bool:
    """Whether the call has few enough queries, and no dropout, whose elements are those of heads and not of rows."""
    return problem.dims.T <= MOST_QUERIES and problem.dropout is None


def group_of(problem: Problem) -> int:
    """How many query heads share a tile as its rows: all of a key head, or 1 where an array allows no such rows."""
    if problem.group == 1 or not grouped_rows.has_rows(problem):
        return 1
    rows = grouped_rows.of_problem(problem)
    arrays = KernelArrays.of(rows.score, rows.mask, rows.dims)
    return 1 if any(array.why_not() for array in arrays) else problem.group


def as_kernel_sees(problem: Problem) -> Problem:
    """Returns the problem of rows that the kernel solves."""
    return grouped_rows.of_problem(problem) if group_of(problem) > 1 else problem


def choose(problem: Problem, gpu: Gpu, interpret: bool = False) -> ForwardPlan:
    """Returns the plan of the problem of rows, with the tiles that the call names, or with those chosen here."""
    named = problem.config and problem.config.forward
    rows = as_kernel_sees(problem)
    plan_of = lambda tiles: ForwardPlan(rows, tiles, interpret, rows_first=rows is not problem)
    if named:
        return plan_of(named)
    plans = [plan_of(tiles) for tiles in _TILES]
    split = [dataclasses.replace(p, config=dataclasses.replace(p.config, kv_splits=_splits(p, gpu))) for p in plans]
    return first_that_fits([*split, *plans], on_gpu, gpu)


def remark(problem: Problem, gpu: Gpu) -> str | None:
    """Returns how the work is cut, in words; None where it is cut as with many queries."""
    group, splits = group_of(problem), choose(problem, gpu).config.kv_splits
    words = [f"the {group} query heads of a key head share a tile"] if group > 1 else []
    words += [f"the keys are in {splits} parts"] if splits > 1 else []
    return " and ".join(words) or None


def _splits(plan, gpu):
    """How many parts take least time, if all take the same time and CTAs of one multiprocessor share its bandwidth."""
    if plan.visit_lists:  # which are not split
        return 1

    def time(splits):
        rounds = -(-plan.grid.ctas * splits // gpu.multiprocessors)
        return rounds * (-(-plan.kv_blocks // splits) + _CTA_START) + _MERGE * splits

    return min(range(1, min(_MOST_SPLITS, plan.kv_blocks) + 1), key=time)
