"""The backward kernels for Hopper (compute capability 9.0): gradients of q, k, v and of the arrays of a score.

FlashAttention-3 (Shah et al., arXiv 2407.08608) in Pallas: in the usual case, five matmuls in one kernel. A block of
threads holds one block of keys of one key head and goes through the tiles of queries, head by head of its group, that
the mask lets see them: dK and dV stay in registers, dQ is added up in device memory. Large head dims, and gradients that
must be the same bit for bit, take two or three passes without such additions (`backward_plan.passes`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu import elementwise
from pallas_fa.backends.gpu.launch import launch
from pallas_fa.backends.hopper.backward import work as backward_work
from pallas_fa.backends.hopper.backward.kernel import kernel
from pallas_fa.backends.hopper.backward.plan import Plan, passes
from pallas_fa.backends.hopper.backward.preprocess import row_starts
from pallas_fa.backends.hopper.backward.tile import score_pullback
from pallas_fa.backends.hopper.config import SHARED_MEMORY
from pallas_fa.problem import Problem
from pallas_fa.scores import float_arrays


def supports_backward(problem: Problem) -> str | None:
    """None if these kernels can do the gradients of a `problem` that the forward kernel does, else the reason why not."""
    for gives in passes(problem):
        plans = Plan.candidates(problem, gives, interpret=False)
        if not plans:
            return f"the backward kernel can't share its work between its warpgroups with config={problem.config!r}"
        if min(plan.shared_memory() for plan in plans) > SHARED_MEMORY:
            return "the arrays of the mask and the score need more shared memory than the backward kernel has"
        if problem.deterministic_gradients and any(_has_many_terms(plans[0], i) for i in plans[0].added):
            return (
                "the backward kernel adds up gradients of arrays [.., T, S] that are broadcast over batch entries or heads"
                " in no fixed order, so it can't do them with deterministic_gradients=True"
            )
    return _why_not_score(problem)


def _has_many_terms(plan, i):
    dims, array = plan.problem.dims, plan.arrays[i]
    return (dims.B > 1 and not array.batched) or (dims.N > 1 and not array.per_head)


def _why_not_score(problem):
    if problem.score is None:
        return None
    x, i, scalar = (jax.ShapeDtypeStruct(*like) for like in (((64, 64), "float32"), ((64, 64), "int32"), ((), "int32")))
    is_scalar = lambda a: a.shape[2:4] == (1, 1) and not jnp.issubdtype(a.dtype, jnp.floating)
    score = jax.tree.map(lambda a: jax.ShapeDtypeStruct(() if is_scalar(a) else x.shape, a.dtype), problem.score)
    reason = elementwise.why_not(score_pullback, x, x, scalar, scalar, i, i, score)
    return reason and f"the score can't run in the backward kernel: {reason}"


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
    factor = -1.0 if problem.score is not None or problem.scale <= 0 else -1 / problem.scale
    start, delta = row_starts(problem, mask, out, lse, d_out, d_lse, factor)
    # XLA would make the zeros that sums start at for all layers of a model at once, and keep them.
    zero, start = lax.optimization_barrier((jnp.float32(0), start))
    found = {}
    for gives in passes(problem):
        plan = Plan.of(problem, gives, interpret)
        found |= _run(plan, q, k, v, d_out, start, delta, score, mask, zero)
    arrays = tuple(found[i] for i in range(len(float_arrays(score))))
    return found["dq"], found["dk"], found["dv"], arrays


def _run(plan, q, k, v, d_out, start, delta, score, mask, zero) -> dict[Any, Any]:
    """One pass: the gradients that it gives, by name, and those of the score's arrays, by number among float arrays.

    `zero`: where sums and counters in device memory start.
    """
    problem = plan.problem
    dims = problem.dims
    arrays = plan.in_memory(jax.tree.leaves((score, mask)))
    if plan.known_visits is None:
        arrays.append(backward_work.visit_table(plan, mask))
    starts = []
    if plan.first_stores:
        starts = [jnp.full(plan.dq_claims_shape(), zero, jnp.int32)]
    elif plan.fused:
        starts = [jnp.full(plan.dq_shape(), zero)]
    added = [jax.new_ref(x) for x in (*starts, *(jnp.full(plan.added_shape(i), zero) for i in plan.added))]
    inputs = dict(dq=q, dk=k, dv=v)

    def flash_attention_backward(*refs, **scratch):  # the name that profilers show
        kernel(plan, *refs, **scratch)

    results = launch(
        flash_attention_backward,
        *((k, v, q, d_out) if plan.by_keys else (q, d_out, k, v)),
        start,
        delta,
        *arrays,
        *added,
        out_type=(
            *((jax.ShapeDtypeStruct(plan.dq_shape(), jnp.float32),) if plan.first_stores else ()),
            *(jax.ShapeDtypeStruct(inputs[name].shape, problem.dtype) for name in plan.stored),
            *(jax.ShapeDtypeStruct(plan.summed_shape(), jnp.float32) for _ in plan.summed),
        ),
        blocks=dims.B * plan.heads * plan.blocks,
        warpgroups=plan.config.compute_wgs + 1,
        scratch=plan.scratch(),
    )
    results, added = list(results), [jax.freeze(ref) for ref in added]
    found = {}
    if plan.first_stores:
        found["dq"] = _dq(plan, results.pop(0), claims=added.pop(0))
    elif plan.fused:
        found["dq"] = _dq(plan, added.pop(0))
    found |= dict(zip(plan.stored, results, strict=False))
    by_array = dict(zip(plan.summed, results[len(plan.stored) :], strict=True)) | dict(
        zip(plan.added, added, strict=True)
    )
    for number, (i, x) in enumerate(zip(plan.float_arrays, float_arrays(score), strict=True)):
        if i in by_array:
            found[number] = _array_gradient(plan, i, by_array[i], x)
    return found


def _dq(plan, sums, claims=None):
    """dQ from its sums in device memory; tiles that nobody has claimed may hold anything."""
    problem = plan.problem
    if claims is not None and (problem.mask is not None or plan.interpret):
        is_there = jnp.repeat(claims > 0, plan.config.width, axis=-1)[..., : sums.shape[-3]]
        sums = jnp.where(jnp.swapaxes(is_there, -2, -1)[..., None], sums, 0)
    sums = sums.sum(axis=0) if plan.interpret else sums
    return (sums[:, : problem.dims.T, :, : problem.H] * problem.scale).astype(problem.dtype)


def _array_gradient(plan, i, d, x):
    """The gradient of array i, which is `x`, from what the kernel gave: summed over its broadcast dims."""
    own, other = plan.own_a.length, plan.other_a.length
    d = d[:, :, :own, :other] if plan.arrays[i].kind == "tile" else d[:, :, :own, None]
    d = jnp.swapaxes(d, 2, 3) if plan.by_keys else d
    summed = tuple(axis for axis in range(4) if x.shape[axis] == 1 and d.shape[axis] > 1)
    return d.sum(axis=summed, keepdims=True).astype(x.dtype)
