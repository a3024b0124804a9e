"""The forward kernel by mma.sync and cp.async, for GPUs of compute capability 8.0 and above."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.head_dims import padded_forward
from pallas_fa.backends.gpu.launch import launch
from pallas_fa.backends.mma.forward.choose import choose
from pallas_fa.backends.mma.forward.kernel import Forward, Refs
from pallas_fa.backends.mma.forward.plan import ForwardPlan
from pallas_fa.backends.mma.forward.scratch import scratch as scratch_of
from pallas_fa.operands.layout import ordered
from pallas_fa.problem import Operands, Problem


@padded_forward
def forward(problem: Problem, operands: Operands, gpu: Gpu, *, interpret: bool = False) -> tuple[Any, Any]:
    """Returns (out, [B, T, N, Hv] in the problem's layout, log-sum-exp [B, T, N] float32).

    `gpu`: the one that the kernel is for. `interpret`: for JAX's GPU interpret mode.
    """
    plan, dims = choose(problem, gpu, interpret), problem.dims

    def flash_attention_forward(*refs, **scratch):  # the name that profilers show
        Forward(plan, _named(plan, refs), scratch).run()

    out, lse = launch(
        flash_attention_forward,
        operands.q,
        operands.k,
        operands.v,
        *plan.in_memory(operands, plan.table_of_visits(operands.mask)),
        out_type=(
            jax.ShapeDtypeStruct(ordered(problem.layout, (dims.B, dims.T, dims.N, problem.Hv)), problem.dtype),
            jax.ShapeDtypeStruct((dims.B, dims.N, plan.query_blocks * plan.config.block_q), jnp.float32),
        ),
        ctas=plan.grid.ctas,
        warpgroups=plan.config.wgs,
        scratch=scratch_of(plan),
        semantics=plgpu.LoweringSemantics.Lane,
    )
    return out, jnp.swapaxes(lse[:, :, : dims.T], 1, 2)


def _named(plan: ForwardPlan, refs: tuple[Any, ...]) -> Refs:
    q, k, v, *arrays, out, lse = refs
    dropout = None if plan.problem.dropout is None else arrays.pop()
    sinks = None if plan.problem.sinks is None else arrays.pop()
    visit_table = arrays.pop() if plan.visit_table else None
    return Refs(q, k, v, tuple(arrays), visit_table, sinks, dropout, out, lse)
