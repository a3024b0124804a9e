"""The backward kernel for Hopper (compute capability 9.0): gradients of q, k, v and of the arrays of a score.

FlashAttention-3 (Shah et al., arXiv 2407.08608) in Pallas, five matmuls in one kernel. A block of threads holds one
block of keys of one key head and goes through the tiles of queries, head by head of its group, that the mask lets see
them: dK and dV stay in registers, dQ is added up in device memory. See `backward_kernel`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.mosaic_gpu import elementwise, schedule
from pallas_fa.mosaic_gpu.backward_kernel import kernel, score_pullback
from pallas_fa.mosaic_gpu.backward_plan import SHARED_MEMORY, Plan
from pallas_fa.mosaic_gpu.backward_preprocess import LOG2E, row_starts
from pallas_fa.problem import Problem
from pallas_fa.scores import float_arrays

_DTYPES = ("bfloat16", "float16")


def supports_backward(problem: Problem) -> str | None:
    """None if this kernel can do the gradients of `problem`, else the reason why not."""
    dims = problem.dims
    if problem.dtype.name not in _DTYPES:
        return f"the backward kernel takes {' and '.join(_DTYPES)}, not {problem.dtype.name}"
    if 0 in (dims.B, dims.T, dims.S, dims.N):
        return "the backward kernel takes no empty arrays"
    if problem.H % 8 or problem.Hv % 8:
        return f"the backward kernel takes head dims that are multiples of 8, not H={problem.H}, Hv={problem.Hv}"
    if max(problem.H, problem.Hv) > 128:
        return f"the backward kernel takes head dims up to 128, not H={problem.H}, Hv={problem.Hv}"
    if problem.deterministic_gradients:
        return "the backward kernel adds dQ up in no fixed order, so it has no deterministic_gradients=True yet"
    plans = Plan.candidates(problem, interpret=False)
    if not plans:
        return f"the backward kernel can't share dQ between its warpgroups with config={problem.config!r}"
    reasons = [array.why_not() for array in plans[0].arrays]
    reasons += [_why_not_score(problem), _why_not_mask(problem)]
    if min(plan.shared_memory() for plan in plans) > SHARED_MEMORY:
        reasons.append("the arrays of the mask and the score need more shared memory than the backward kernel has")
    return next((reason for reason in reasons if reason is not None), None)


def _tile_of(x, dtype=None):
    return jax.ShapeDtypeStruct((64, 64), dtype or x.dtype)


def _why_not_score(problem):
    if problem.score is None:
        return None
    x, i = _tile_of(None, jnp.float32), _tile_of(None, jnp.int32)
    score = jax.tree.map(_tile_of, problem.score)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    return _because("score", elementwise.why_not(score_pullback, x, x, scalar, scalar, i, i, score))


def _why_not_mask(problem):
    if problem.mask is None:
        return None
    i, scalar = _tile_of(None, jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)
    mask = jax.tree.map(_tile_of, problem.mask)
    return _because("mask", elementwise.why_not(lambda m, *index: m.allowed(*index), mask, scalar, scalar, i, i))


def _because(what, reason):
    return reason and f"the {what} can't run in the backward kernel: {reason}"


def backward(
    problem: Problem,
    q: Any,
    k: Any,
    v: Any,
    score: Any,
    mask: Any,
    out: Any,
    lse: Any,
    d_out: Any,
    d_lse: Any,
    *,
    interpret: bool = False,
) -> tuple[Any, Any, Any, tuple[Any, ...]]:
    """(dq, dk, dv, gradients of the score's float arrays in the order of its leaves), each in its array's dtype.

    `interpret`: for JAX's GPU interpret mode.
    """
    plans = Plan.candidates(problem, interpret)
    plan = next((plan for plan in plans if plan.shared_memory() <= SHARED_MEMORY), plans[-1])
    dims, c = problem.dims, plan.config
    factor = -LOG2E if plan.scored else -1 / problem.scale
    start, delta = row_starts(problem, mask, out, lse, d_out, d_lse, factor, c.block_q)
    leaves = jax.tree.leaves((score, mask))
    arrays = [a.in_memory(jnp.swapaxes(x, 2, 3)) for a, x in zip(plan.arrays, leaves, strict=True)]
    if plan.visit_table:
        size = plan.padded(dims.T, 1 if plan.scored else c.block_q)
        arrays.append(schedule.transposed_visit_table(mask, c.block_kv, dims.S, size, c.block_q))
    shapes = plan.dq_shape(), *(plan.added_shape(i) for i in plan.added)
    added = [jax.new_ref(jnp.zeros(shape, jnp.float32)) for shape in shapes]
    section = 1 if mask is None else schedule.section(dims.B * problem.K, c.head_section)
    dk, dv, *summed = plgpu.kernel(
        functools.partial(kernel, plan, section),
        out_type=(
            jax.ShapeDtypeStruct(k.shape, problem.dtype),
            jax.ShapeDtypeStruct(v.shape, problem.dtype),
            *(jax.ShapeDtypeStruct(plan.summed_shape(), jnp.float32) for _ in plan.summed),
        ),
        grid=(dims.B * problem.K // section, plan.blocks, section),
        grid_names=("heads", "block", "head_in_section"),
        num_threads=c.compute_wgs + 1,
        thread_name="wg",
        scratch_types=plan.scratch(),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=2048 if plan.differentiated else 0
        ),
    )(q, k, v, d_out, start, delta, *arrays, *added)
    dq, *added = (jax.freeze(ref) for ref in added)
    if interpret:
        dq = dq.sum(axis=0)
    dq = (dq[:, : dims.T, :, : problem.H] * problem.scale).astype(problem.dtype)
    found = dict(zip(plan.summed, summed, strict=True)) | dict(zip(plan.added, added, strict=True))
    gradients = [_array_gradient(plan, i, found[i], x) for i, x in zip(plan.differentiated, float_arrays(score), strict=True)]
    return dq, dk, dv, tuple(gradients)


def _array_gradient(plan, i, d, x):
    """The gradient of array i, which is `x`, from what the kernel gave: summed over its broadcast dims."""
    dims, kind = plan.problem.dims, plan.arrays[i].kind
    if kind in ("scalar", "column"):
        d = d[:, :, None, : dims.S]
    elif kind == "row":
        d = (d.sum(axis=0) if plan.interpret else d)[..., : dims.T, None]
    else:
        d = jnp.swapaxes(d[:, :, : dims.S, : dims.T], 2, 3)
    summed = tuple(axis for axis in range(4) if x.shape[axis] == 1 and d.shape[axis] > 1)
    return d.sum(axis=summed, keepdims=True).astype(x.dtype)
