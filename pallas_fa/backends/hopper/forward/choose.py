"""The choice of a forward kernel's tiles."""

import dataclasses

import jax

from pallas_fa import masks
from pallas_fa.backends.gpu import grouped_rows
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.schedule import is_windowed
from pallas_fa.backends.gpu.shared_memory import first_that_fits
from pallas_fa.backends.hopper import narrow, pages, products
from pallas_fa.backends.hopper.config import ForwardConfig
from pallas_fa.backends.hopper.forward import windows
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.scratch import on_gpu
from pallas_fa.backends.hopper.forward.split_heads import with_split_heads
from pallas_fa.backends.hopper.forward.table import ForwardFacts, forward_configs
from pallas_fa.masks.base import parts_of
from pallas_fa.operands import intervals
from pallas_fa.problem import Problem

# Beside tiles of 8 bits at H=256.
_SMALLEST = tuple(ForwardConfig(1, 64, stages, pin_softmax=False) for stages in (2, 1))


def choose(problem: Problem, gpu: Gpu, interpret: bool = False, may_take_tickets: bool = True) -> ForwardPlan:
    """Returns the plan with the tiles that the call names, else with the first of the table that fit shared memory.

    `may_take_tickets`: whether CTAs may take blocks by tickets.
    """
    named = problem.config and problem.config.forward
    if named:
        configs = (named if may_take_tickets else dataclasses.replace(named, by_tickets=False),)
    else:
        configs = [x for x in forward_configs(_facts(problem), gpu) if may_take_tickets or not x.by_tickets]
    if problem.has_narrow_keys and not named:
        configs = (*(config for config in configs if narrow.may_convert(config)), *_SMALLEST)
    plans = [_plan(problem, config, interpret) for config in pages.fitting(problem.pages, configs)]
    plan = first_that_fits(plans, on_gpu, gpu)
    return plan if named else with_split_heads(plan, gpu)


def _plan(problem, config, interpret):
    if not config.grouped_rows:
        return ForwardPlan(problem, config, interpret)
    return ForwardPlan(grouped_rows.of_problem(problem), config, interpret, group=problem.group)


def _facts(problem):
    round_up = lambda dim: -(-dim // 64) * 64
    return ForwardFacts(
        head_dim=round_up(problem.H),
        value_dim=round_up(problem.Hv),
        length=problem.dims.T,
        keys=problem.dims.S,
        heads=problem.dims.B * problem.dims.N,
        uniform=_is_uniform(problem),
        visit_table=bool(jax.tree.leaves(problem.mask)),
        scalar_ranges=problem.mask is not None and problem.mask.scalar_ranges,
        packed=bool(parts_of(problem.mask, masks.Segments)) or (problem.mask is not None and problem.mask.has_blocks),
        blocks=problem.mask is not None and problem.mask.has_blocks,
        split=products.parts_of(problem) > 1,
        windowed=is_windowed(problem.mask, problem.dims.T),
        window=_window(problem),
        window_keys=_window_keys(problem),
        dropout=problem.dropout is not None,
        custom=bool(parts_of(problem.mask, masks.Custom)),
        group=problem.group,
    )


def _window(problem):
    if problem.score is not None or not windows.is_static(problem.mask):
        return 0
    return problem.mask.left + problem.mask.right + 1


def _window_keys(problem):
    return 0 if windows.why_not(problem) else windows.most_keys(grouped_rows.of_problem(problem), 2 * windows.ROWS)


def _is_uniform(problem):
    """Whether all queries visit the same keys, as without a mask or with a padding mask, and there is no score."""
    if problem.score is not None or problem.mask is None:
        return problem.score is None
    if not jax.tree.leaves(problem.mask):
        return False
    tiles = intervals.tiles(problem.dims.T, 64)
    ask = lambda mask: (mask.kv_range(*tiles), mask.full_kv_range(*tiles))
    return all(x.shape[-1:] in ((), (1,)) for x in jax.tree.leaves(jax.eval_shape(ask, problem.mask)))
