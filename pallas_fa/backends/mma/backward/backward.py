"""The backward kernels by mma.sync and cp.async: gradients of q, k, v and of the arrays of a score.

They give the same bits from run to run, but for the gradients of arrays to which several CTAs add.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.float16_range import in_float16_range
from pallas_fa.backends.gpu import head_parts
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.gradient_tile import why_not_pullback
from pallas_fa.backends.gpu.head_dims import padded_backward
from pallas_fa.backends.gpu.launch import launch
from pallas_fa.backends.gpu.row_statistics import row_statistics, row_sums
from pallas_fa.backends.gpu.shared_memory import fits, scratch_bytes
from pallas_fa.backends.mma.backward.choose import plans
from pallas_fa.backends.mma.backward.fused import FusedBackward
from pallas_fa.backends.mma.backward.gmem import named
from pallas_fa.backends.mma.backward.kernel import Backward
from pallas_fa.backends.mma.backward.plan import BackwardPlan
from pallas_fa.backends.mma.backward.scratch import on_gpu
from pallas_fa.backends.mma.backward.scratch import scratch as scratch_of
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.scores.base import float_arrays


def why_no_backward(problem: Problem, gpu: Gpu) -> str | None:
    """Returns None if these kernels can do the gradients of a `problem` that the forward kernel does, else the reason."""
    if reason := head_parts.why_not(problem):
        return reason
    for plan in plans(problem, gpu):
        if reason := plan.why_not_fused or plan.why_not_deterministic:
            return reason
        if not fits(on_gpu(plan), gpu):
            what = "the arrays of the mask and the score, beside these tiles," if len(plan.arrays) else "tiles"
            needed = f"{scratch_bytes(on_gpu(plan))} bytes of shared memory, of which {gpu.shared_memory} are there"
            return f"{what} of {plan.config} need {needed}"
    return why_not_pullback(problem)


@in_float16_range
@padded_backward
def backward(
    problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any, gpu: Gpu, *, interpret: bool = False
) -> tuple[Any, ...]:
    """Returns the gradients of `operands.differentiable`, each in its array's dtype.

    `gpu`: the one that the kernels are for. `interpret`: for JAX's GPU interpret mode.
    """
    factor = -LOG2E if problem.score is None else -1.0
    neg_lse, delta, d_sinks = row_statistics(problem, residuals, row_sums(problem, residuals.out, d_out), d_lse, factor)
    found = {}
    for plan in plans(problem, gpu, interpret):
        found |= run(plan, residuals.operands, d_out, neg_lse, delta)
    count = len(float_arrays(residuals.operands.score))
    return found["dq"], found["dk"], found["dv"], *(found[i] for i in range(count)), *d_sinks


def run(plan: BackwardPlan, operands: Operands, d_out: Any, neg_lse: Any, delta: Any) -> dict[Any, Any]:
    """Returns the gradients that one pass gives: by name, and those of the score's arrays by number among float arrays."""
    q, k, v, *_ = operands
    scores, kind = plan.score_gradients, plan.kind
    # Constant zeros would not depend on a loop that this is in: the derivative of a scan would make the refs outside of it,
    # which JAX refuses.
    zero, delta = lax.optimization_barrier((jnp.float32(0), delta))
    added = [jax.new_ref(jnp.full(plan.added_shape(i), zero)) for i in scores.added]
    dq = [jax.new_ref(jnp.full(plan.dq.shape, zero))] if kind.fused else []
    inputs = dict(dq=q, dk=k, dv=v)
    type_of = lambda name: jax.ShapeDtypeStruct(inputs[name].shape, plan.problem.dtype)
    of_stationary = head_parts.types(plan) if plan.has_head_parts else map(type_of, kind.stored)

    def flash_attention_backward(*refs, **scratch):  # the name that profilers show
        (FusedBackward if kind.fused else Backward)(plan, named(plan, refs), scratch).run()

    results = launch(
        flash_attention_backward,
        *kind.by_role(q, k, v, d_out),
        neg_lse,
        delta,
        *plan.in_memory(operands),
        *added,
        *dq,
        out_type=(
            *of_stationary,
            *(jax.ShapeDtypeStruct(plan.summed_shape(), jnp.float32) for _ in scores.summed),
        ),
        ctas=plan.grid.ctas,
        warpgroups=plan.config.wgs,
        scratch=scratch_of(plan),
        semantics=plgpu.LoweringSemantics.Lane,
    )
    found = plan.gradients(operands, head_parts.with_parts_merged(plan, results), [jax.freeze(ref) for ref in added])
    if kind.fused:
        found["dq"] = plan.dq.total(jax.freeze(*dq), plan.qk_scale, plan.problem.dtype)
    return found
