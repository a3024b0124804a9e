"""The choice of a backward pass's tiles."""

import dataclasses

import jax

from pallas_fa.backends.gpu.backward_plan import is_scored
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.gradient_pass import GradientPass
from pallas_fa.backends.gpu.schedule import is_windowed
from pallas_fa.backends.gpu.shared_memory import first_that_fits, fits
from pallas_fa.backends.hopper import products
from pallas_fa.backends.hopper.backward.choose_order import with_best_order
from pallas_fa.backends.hopper.backward.dq import can_share_dq
from pallas_fa.backends.hopper.backward.plan import BackwardPlan, fewer_passes, passes
from pallas_fa.backends.hopper.backward.scratch import on_gpu
from pallas_fa.backends.hopper.backward.table import BackwardFacts, backward_configs
from pallas_fa.masks.band import Causal, Window
from pallas_fa.masks.lengths import Lengths, without_lengths
from pallas_fa.problem import Problem


def choose_passes(problem: Problem, gpu: Gpu) -> tuple[GradientPass, ...]:
    """Returns the passes that give all gradients: the fewest whose tiles fit registers and shared memory."""
    for kinds in fewer_passes(problem):
        if all(any(fits(on_gpu(plan), gpu) for plan in candidates(problem, kind, gpu)) for kind in kinds):
            return kinds
    return passes(problem)


def choose(problem: Problem, kind: GradientPass, gpu: Gpu, interpret: bool = False) -> BackwardPlan:
    """Returns the plan with the tiles that the call names, else with the first of the table that fit shared memory."""
    plan = first_that_fits(candidates(problem, kind, gpu, interpret), on_gpu, gpu)
    is_named = problem.config and problem.config.backward
    return plan if is_named else with_best_order(plan)


def candidates(problem: Problem, kind: GradientPass, gpu: Gpu, interpret: bool = False) -> list[BackwardPlan]:
    """Returns a plan for each configuration whose warpgroups can share the work, the best first."""
    round_up = lambda dim: -(-dim // 64) * 64
    facts = BackwardFacts(
        gives=kind.gives,
        head_dim=round_up(problem.H),
        value_dim=round_up(problem.Hv),
        columns=-(-problem.H // 16) * 16,
        length=problem.dims.S,
        queries=problem.dims.T,
        heads=problem.dims.B * problem.K,
        group=problem.group,
        masked=problem.mask is not None,
        visit_table=bool(jax.tree.leaves(problem.mask)),
        tests_arrays=bool(jax.tree.leaves(without_lengths(problem.mask))),
        blocks=problem.mask is not None and problem.mask.has_blocks,
        only_lengths=isinstance(problem.mask, Lengths),
        split=products.parts_of(problem) > 1,
        windowed=is_windowed(problem.mask, problem.dims.T),
        band=isinstance(problem.mask, (Causal, Window)),
        dropout=problem.dropout is not None,
        scored=is_scored(problem),
        score_arrays=bool(jax.tree.leaves(problem.score)),
    )
    named = problem.config and problem.config.backward
    configs = _named(named, kind) if named else backward_configs(facts, gpu)
    plans = [_applicable(BackwardPlan(problem, kind, config, gpu, interpret)) for config in configs]
    if len(kind.gives) > 1:
        plans = [p for p in plans if p.fits_registers and not p.chunked]
    if kind.fused and problem.dropout is not None and problem.dropout.aligned and not interpret:
        plans = [dataclasses.replace(p, shares_draws=shares) for p in plans for shares in (True, False)]
    return [p for p in plans if not kind.fused or can_share_dq(p.config, p.tiles.stationary_qk, p.tiles.streamed_qk)]


def _named(config, kind):
    """A configuration that a call names, for one pass.

    With `by_gradient` CTAs of the pass for dQ hold twice as many positions, and may have no memory for rings as deep.
    """
    shallower = [(config.stages[0], 1), (1, 1)] if config.by_gradient and kind.gives == ("dq",) else []
    return [dataclasses.replace(config, stages=stages) for stages in dict.fromkeys((config.stages, *shallower))]


def _applicable(plan):
    """The plan, without warpgroups for one gradient each where these do not apply."""
    if plan.by_gradient or not plan.config.by_gradient:
        return plan
    return dataclasses.replace(plan, config=dataclasses.replace(plan.config, by_gradient=False))
