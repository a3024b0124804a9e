"""The choice of tiles, and of the parts of the keys, where there are few queries."""

import dataclasses

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.few_queries import as_kernel_sees, fastest_splits
from pallas_fa.backends.gpu.shared_memory import first_that_fits
from pallas_fa.backends.hopper.config import ForwardConfig
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.scratch import on_gpu
from pallas_fa.problem import Problem

# Evidence: decode/kv-splits.
_TILES = tuple(ForwardConfig(1, 64, stages, pin_softmax=False) for stages in (3, 2, 1))


def choose(problem: Problem, gpu: Gpu, interpret: bool = False) -> ForwardPlan:
    """Returns the plan of the problem of rows, with the tiles that the call names, or with those chosen here."""
    named = problem.config and problem.config.forward
    rows = as_kernel_sees(problem)
    plan_of = lambda tiles: ForwardPlan(rows, tiles, interpret, rows_first=rows is not problem)
    if named:
        return plan_of(named)
    plans = [plan_of(tiles) for tiles in _TILES]
    split = [
        dataclasses.replace(p, config=dataclasses.replace(p.config, kv_splits=fastest_splits(p, gpu))) for p in plans
    ]
    return first_that_fits([*split, *plans], on_gpu, gpu)
