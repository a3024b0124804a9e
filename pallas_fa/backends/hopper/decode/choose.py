"""The choice of tiles, and of the parts of the keys, where the query heads of a key head are rows of a tile."""

import dataclasses
import functools

import jax

from pallas_fa.backends.gpu import few_queries
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.few_queries import as_kernel_sees, fastest_splits
from pallas_fa.backends.gpu.shared_memory import first_that_fits
from pallas_fa.backends.gpu.support import why_not_functions
from pallas_fa.backends.hopper import pages, products
from pallas_fa.backends.hopper.config import ForwardConfig
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.scratch import on_gpu
from pallas_fa.problem import Problem

# Of one warpgroup, for up to 64 rows, and of two where they fit (evidence: decode/kv-splits, decode/more-queries).
_TILES = tuple(ForwardConfig(1, 64, stages, pin_softmax=False) for stages in (3, 2, 1))
_TILES_OF_MORE = (
    *(ForwardConfig(2, keys, pin_softmax=False, ping_pong=True, rescale_under_qk=True) for keys in (128, 64)),
    *_TILES,
)
_BLOCK = 128  # rows of a tile of two warpgroups
_LEAST_KEYS = 16  # for each query; beside reading them, to bring queries and output into another order takes little
_TILES_LEFT = 0.5  # of those that heads would take one by one, at most


@functools.lru_cache(maxsize=256)
def applies(problem: Problem) -> bool:
    """Whether rows of a tile are queries of all heads of a key head: few queries, and more where that takes fewer tiles.

    More than few not with tiles that the call names, which are those of the forward, nor with arrays that tell heads or
    queries apart, which would be copied.
    """
    if few_queries.applies(problem):
        return True
    dims, group = problem.dims, problem.group
    if dims.is_symbolic or problem.dropout is not None or getattr(problem.config, "forward", None) or group == 1:
        return False
    alone, shared = (-(-T // _BLOCK) * heads for T, heads in ((dims.T, group), (dims.T * group, 1)))
    if dims.S < _LEAST_KEYS * dims.T or shared > _TILES_LEFT * alone or products.parts_of(problem) > 1:
        return False
    if any(x.shape[1:3] != (1, 1) for x in jax.tree.leaves((problem.score, problem.mask))):
        return False
    return few_queries.group_of(problem) > 1 and why_not_functions(as_kernel_sees(problem)) is None


def choose(problem: Problem, gpu: Gpu, interpret: bool = False) -> ForwardPlan:
    """Returns the plan of the problem of rows, with the tiles that the call names, or with those chosen here."""
    named = problem.config and problem.config.forward
    rows = as_kernel_sees(problem)
    plan_of = lambda tiles: ForwardPlan(rows, tiles, interpret, rows_first=rows is not problem)
    if named:
        return plan_of(dataclasses.replace(named, by_tickets=False))
    tiles = _TILES if rows.dims.T <= 64 or few_queries.applies(problem) else _TILES_OF_MORE
    plans = [plan_of(x) for x in pages.fitting(problem.pages, tiles)]
    split = [
        dataclasses.replace(p, config=dataclasses.replace(p.config, kv_splits=fastest_splits(p, gpu))) for p in plans
    ]
    return first_that_fits([*split, *plans], on_gpu, gpu)
