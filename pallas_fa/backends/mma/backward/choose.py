"""The choice of a backward pass's tiles."""

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.gradient_pass import GradientPass
from pallas_fa.backends.gpu.shared_memory import first_that_fits
from pallas_fa.backends.mma.backward.plan import BackwardPlan
from pallas_fa.backends.mma.backward.scratch import on_gpu
from pallas_fa.backends.mma.backward.table import BackwardFacts, backward_configs
from pallas_fa.problem import Problem


def choose(problem: Problem, kind: GradientPass, gpu: Gpu, interpret: bool = False) -> BackwardPlan:
    """Returns the plan with the tiles that the call names, else with the first of the table that fit shared memory."""
    named = problem.config and problem.config.backward
    facts = BackwardFacts(kind.gives, -(-max(problem.H, problem.Hv) // 64) * 64, gpu.shared_memory // 1024)
    configs = (named,) if named else backward_configs(facts)
    return first_that_fits([BackwardPlan(problem, kind, config, gpu, interpret) for config in configs], on_gpu, gpu)
