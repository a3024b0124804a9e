"""The choice of the backward's passes, and of the tiles of each."""

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.shared_memory import first_that_fits, fits
from pallas_fa.backends.mma.backward.choose_parts import with_best_parts
from pallas_fa.backends.mma.backward.plan import FUSED, BackwardPlan, passes
from pallas_fa.backends.mma.backward.scratch import on_gpu
from pallas_fa.backends.mma.backward.table import BackwardFacts, backward_configs
from pallas_fa.backends.mma.config import FusedBackwardConfig
from pallas_fa.backends.mma.tiles import columns
from pallas_fa.problem import Problem


def plans(problem: Problem, gpu: Gpu, interpret: bool = False) -> tuple[BackwardPlan, ...]:
    """Returns the passes that give all gradients: one, where it may be and there are tiles for it; else two or three.

    Their tiles are those that the call names, else the first of the table that fit shared memory.
    """
    is_named = problem.config and problem.config.backward
    found = _with_tiles(problem, gpu, interpret)
    return found if is_named else tuple(map(with_best_parts, found))


def _with_tiles(problem, gpu, interpret):
    named = problem.config and problem.config.backward
    of = lambda kind, config: BackwardPlan(problem, kind, config, gpu, interpret)
    if isinstance(named, FusedBackwardConfig):
        return (of(FUSED, named),)
    if not named:
        fused = (of(FUSED, config) for config in _in_table(problem, FUSED, gpu))
        for plan in fused:
            if plan.why_not_fused is None and fits(on_gpu(plan), gpu):
                return (plan,)
    configs = lambda kind: (named,) if named else _in_table(problem, kind, gpu)
    of_kind = lambda kind: first_that_fits([of(kind, config) for config in configs(kind)], on_gpu, gpu)
    return tuple(map(of_kind, passes(problem)))


def _in_table(problem, kind, gpu):
    facts = BackwardFacts(kind.gives, columns(max(problem.H, problem.Hv)), gpu.shared_memory // 1024)
    return backward_configs(facts)
