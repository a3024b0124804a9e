"""The backward kernels for Hopper (compute capability 9.0): gradients of q, k, v and of the arrays of a score.

FlashAttention-3 (Shah et al., arXiv 2407.08608) in Pallas: in the usual case, five matmuls in one kernel. A CTA holds one
key block of one key head. It loops over the query heads that share the key head and, for each, over the tiles of queries
that the mask lets see the block. dK and dV stay in registers; dQ is added up in device memory. Most head dims past 128, and
gradients that must be the same bit for bit, take two or three passes without such additions (`choose.choose_passes`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.float16_range import DsScale
from pallas_fa.backends.gpu import head_parts
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.gradient_tile import why_not_pullback
from pallas_fa.backends.gpu.head_dims import padded_backward
from pallas_fa.backends.gpu.launch import launch
from pallas_fa.backends.gpu.row_statistics import row_statistics
from pallas_fa.backends.gpu.shared_memory import fits, scratch_bytes
from pallas_fa.backends.hopper import products
from pallas_fa.backends.hopper.backward import work
from pallas_fa.backends.hopper.backward.choose import candidates, choose, choose_passes
from pallas_fa.backends.hopper.backward.kernel import kernel
from pallas_fa.backends.hopper.backward.plan import BackwardPlan
from pallas_fa.backends.hopper.backward.scratch import on_gpu
from pallas_fa.backends.hopper.backward.scratch import scratch as scratch_of
from pallas_fa.operands.layout import ordered
from pallas_fa.problem import Operands, Problem, Residuals
from pallas_fa.scores.base import float_arrays


def why_no_backward(problem: Problem, gpu: Gpu) -> str | None:
    """Returns None if these kernels can do the gradients of a `problem` that the forward kernel does, else the reason."""
    if reason := head_parts.why_not(problem):
        return reason
    for kind in choose_passes(problem, gpu):
        plans = candidates(problem, kind, gpu)
        if not plans:
            return f"the backward kernel can't share its work between its warpgroups with config={problem.config!r}"
        if not any(fits(on_gpu(plan), gpu) for plan in plans):
            needed = min(scratch_bytes(on_gpu(plan)) for plan in plans)
            return (
                f"the backward kernel needs {needed} bytes of shared memory with its tiles and the arrays of its mask and"
                f" score; there are {gpu.shared_memory}"
            )
        if plans[0].why_not_deterministic:
            return plans[0].why_not_deterministic
    return why_not_pullback(problem)


@padded_backward
def backward(
    problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any, gpu: Gpu, *, interpret: bool = False
) -> tuple[Any, ...]:
    """Returns the gradients of `operands.differentiable`, each in its array's dtype.

    `gpu`: the one that the kernels are for. `interpret`: for JAX's GPU interpret mode.
    """
    operands = residuals.operands
    plans = [choose(problem, kind, gpu, interpret) for kind in choose_passes(problem, gpu)]
    (factor,) = {plan.lse_factor for plan in plans}
    neg_lse, delta, d_sinks = row_statistics(
        problem, residuals, products.row_sums(problem, residuals.out, d_out), d_lse, factor
    )
    ds_scale = DsScale.of(problem, residuals, d_out, d_lse)
    delta = ds_scale.scaled(delta)
    # XLA would make the zeros that sums start at for all layers of a model at once, and keep them
    # (evidence: training/dq-sums-wait-for-the-gradient).
    zero, neg_lse = lax.optimization_barrier((jnp.float32(0), neg_lse))
    in_parts = (operands.q, operands.k, operands.v, d_out)
    q, k, v, d_out = (products.in_memory(problem, x, problem.layout) for x in in_parts)
    operands = operands._replace(q=q, k=k, v=v)
    found = {}
    for plan in plans:
        found |= _run(plan, operands, d_out, neg_lse, delta, ds_scale, zero)
    count = len(float_arrays(operands.score))
    of_arrays = (ds_scale.restored(found[i]) for i in range(count))
    return found["dq"], found["dk"], found["dv"], *of_arrays, *d_sinks


def _run(
    plan: BackwardPlan, operands: Operands, d_out: Any, neg_lse: Any, delta: Any, ds_scale: DsScale, zero: Any
) -> dict[Any, Any]:
    """Returns the gradients that one pass gives: by name, and those of the score's arrays by number among float arrays.

    `operands`: q, k and v as the kernel reads them. `ds_scale`: by what dS is scaled, and the arrays' gradients with it.
    `zero`: where sums and counters in device memory start.
    """
    problem, scores, dq = plan.problem, plan.score_gradients, plan.dq
    claims_shapes = [(plan.claims_shape(i), jnp.int32) for i in plan.order.ordered_sums]
    dq_start = [dq.start] if dq and dq.start else []
    counters = [(work.memory_of_tickets(plan), jnp.int32)] if plan.order.by_tickets else []
    starts = [jnp.full(shape, zero, dtype) for shape, dtype in (*counters, *dq_start, *claims_shapes)]
    of_arrays = {i: jax.ShapeDtypeStruct(plan.added_shape(i), plan.added_dtype(i)) for i in scores.added}
    stored = [of_arrays.pop(i) for i in plan.array_results]
    zeros = (jnp.full(x.shape, zero, x.dtype) for x in of_arrays.values())
    added = [jax.new_ref(x) for x in (*starts, *zeros)]
    B, T, S, N = problem.dims.B, problem.dims.T, problem.dims.S, problem.dims.N
    shapes = dict(dq=(B, T, N, problem.H), dk=(B, S, problem.K, problem.H), dv=(B, S, problem.K, problem.Hv))
    type_of = lambda name: jax.ShapeDtypeStruct(ordered(problem.layout, shapes[name]), problem.dtype)
    of_stationary = head_parts.types(plan) if plan.has_head_parts else map(type_of, plan.kind.stored)

    def flash_attention_backward(*refs, **scratch):  # the name that profilers show
        kernel(plan, *refs, **scratch)

    results = launch(
        flash_attention_backward,
        *plan.kind.by_role(operands.q, operands.k, operands.v, d_out),
        neg_lse,
        delta,
        *plan.in_memory(operands),
        *([ds_scale.factors] if plan.scales_ds else []),
        *added,
        out_type=(
            *((jax.ShapeDtypeStruct(dq.shape, dq.dtype),) if dq and dq.is_result else ()),
            *of_stationary,
            *stored,
            *(jax.ShapeDtypeStruct(plan.summed_shape(), jnp.float32) for _ in scores.summed),
        ),
        ctas=plan.order.ctas,
        warpgroups=plan.config.compute_wgs + 1,
        scratch=scratch_of(plan),
    )
    results, added = list(results), [jax.freeze(ref) for ref in added][len(counters) :]
    found = {}
    if dq:
        sums = (results if dq.is_result else added).pop(0)
        claims = added.pop(0) if dq.first_store else None
        found["dq"] = sums if dq.is_final else _dq(plan, dq, ds_scale.restored(sums), claims)
    del added[: len(claims_shapes)]
    count = len(plan.kind.stored)
    of_arrays |= dict(zip(of_arrays, added, strict=True))
    of_arrays |= dict(zip(plan.array_results, results[count:], strict=False))
    del results[count : count + len(stored)]
    results = head_parts.with_parts_merged(plan, results)
    return found | plan.gradients(operands, results, [of_arrays[i] for i in scores.added])


def _dq(plan, dq, sums, claims=None):
    """dQ from its sums in device memory; tiles that no CTA has claimed may hold anything."""
    problem = plan.problem
    if claims is not None and (problem.mask is not None or plan.interpret):
        rows = sums.shape[-3 if dq.layout == "BTNH" else -2]
        is_there = jnp.repeat(claims > 0, plan.config.width, axis=-2)[..., :rows, :]  # [.., T, N]
        is_there = jnp.swapaxes(is_there, -2, -1) if dq.layout == "BNTH" else is_there
        sums = jnp.where(is_there[..., None], sums, 0)
    sums = sums.sum(axis=0) if plan.interpret else sums
    everything = slice(None)
    present = ordered(dq.layout, (everything, slice(problem.dims.T), everything, slice(problem.H)))
    return (sums[present] * plan.qk_scale).astype(problem.dtype)
