"""What a pass of a backward kernel computes and moves, for estimates of its time."""

from pallas_fa.backends.gpu.backward_plan import BackwardCore


def flops_of_step(plan: BackwardCore) -> float:
    """Returns those of the matmuls of a CTA's step."""
    kind, problem = plan.kind, plan.problem
    qk, pv = 1 + kind.accumulates_qk + ("dq" in kind.gives), kind.accumulates_qk + kind.accumulates_pv
    return 2 * plan.config.block * plan.tile * (qk * problem.H + pv * problem.Hv)


def bytes_of_parts(plan: BackwardCore) -> float:
    """Returns what is moved where query heads are in parts: float32 parts, written and read, and their sums."""
    kind, problem = plan.kind, plan.problem
    columns = problem.H * kind.accumulates_qk + problem.Hv * kind.accumulates_pv
    return problem.dims.B * problem.dims.S * columns * (2 * 4 * plan.heads + problem.dtype.itemsize * problem.K)
