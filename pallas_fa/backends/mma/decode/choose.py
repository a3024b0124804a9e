"""The choice of tiles, and of the parts of the keys, where there are few queries."""

import dataclasses

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.few_queries import as_kernel_sees, fastest_splits
from pallas_fa.backends.gpu.shared_memory import first_that_fits
from pallas_fa.backends.mma.decode.key_parts import ROWS
from pallas_fa.backends.mma.decode.plan import DecodePlan
from pallas_fa.backends.mma.decode.scratch import on_gpu
from pallas_fa.backends.mma.decode.table import DecodeFacts, decode_configs
from pallas_fa.backends.mma.tiles import columns
from pallas_fa.problem import Problem


def choose(problem: Problem, gpu: Gpu, interpret: bool = False) -> DecodePlan:
    """Returns the plan of the problem of rows, with the tiles that the call names, or with those chosen here."""
    rows = as_kernel_sees(problem)
    plan_of = lambda tiles: DecodePlan(rows, tiles, interpret, rows_first=rows is not problem)
    if problem.config and problem.config.decode:
        return plan_of(problem.config.decode)
    skewed = any(array.skewed for array in plan_of(None).arrays)  # whose tiles have 64 rows
    needed = ROWS if skewed else min(rows.dims.T, ROWS)
    heads = problem.dims.B * problem.K / gpu.multiprocessors
    head_dim, kv_bits = columns(max(problem.H, problem.Hv)), 8 if problem.has_narrow_keys else 16
    facts = DecodeFacts(needed, head_dim, gpu.shared_memory // 1024, heads, kv_bits)
    plans = [plan_of(tiles) for tiles in decode_configs(facts)]
    split = [
        dataclasses.replace(p, config=dataclasses.replace(p.config, kv_splits=fastest_splits(p, gpu))) for p in plans
    ]
    return first_that_fits([*split, *plans], on_gpu, gpu)
