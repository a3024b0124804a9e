"""The choice of the forward kernel's tiles."""

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.shared_memory import first_that_fits
from pallas_fa.backends.mma.forward.plan import ForwardPlan
from pallas_fa.backends.mma.forward.scratch import on_gpu
from pallas_fa.backends.mma.forward.table import ForwardFacts, forward_configs
from pallas_fa.backends.mma.tiles import columns
from pallas_fa.problem import Problem


def choose(problem: Problem, gpu: Gpu, interpret: bool = False) -> ForwardPlan:
    """Returns the plan with the tiles that the call names, else with the first of the table that fit shared memory."""
    named = problem.config and problem.config.forward
    facts = ForwardFacts(columns(max(problem.H, problem.Hv)), problem.dims.S, gpu.shared_memory // 1024)
    plans = [ForwardPlan(problem, config, interpret) for config in ((named,) if named else forward_configs(facts))]
    return first_that_fits(plans, on_gpu, gpu)
