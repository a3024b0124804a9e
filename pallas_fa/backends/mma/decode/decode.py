"""Attention of few queries by mma.sync and cp.async: the kernel on rows, with the keys in parts, and the merge."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu import few_queries
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.head_dims import padded_forward
from pallas_fa.backends.gpu.launch import launch
from pallas_fa.backends.mma.decode.choose import choose
from pallas_fa.backends.mma.decode.kernel import Decode, Refs
from pallas_fa.backends.mma.decode.key_parts import ROWS
from pallas_fa.backends.mma.decode.plan import DecodePlan
from pallas_fa.backends.mma.decode.scratch import by_name
from pallas_fa.backends.mma.decode.scratch import scratch as scratch_of
from pallas_fa.operands.pages import Paged
from pallas_fa.problem import Operands, Problem


@padded_forward
def decode(problem: Problem, operands: Operands, gpu: Gpu, *, interpret: bool = False) -> tuple[Any, Any]:
    """Returns (out, [B, T, N, Hv] in the problem's layout, log-sum-exp [B, T, N] float32); arguments as of `forward`."""
    return few_queries.attend(problem, operands, functools.partial(choose, gpu=gpu, interpret=interpret), run)


def run(plan: DecodePlan, operands: Operands, visits: Any) -> tuple[Any, Any]:
    """Returns (out, [B * kv_splits, T, N, Hv] in the plan's query layout, lse [B * kv_splits, N, T]).

    If the keys are split they are partial results, and out is float32. `visits`: the visit table, if the plan has one.
    """
    problem, dims = plan.problem, plan.problem.dims
    k, v, arrays = operands.k, operands.v, plan.in_memory(operands, visits)
    if isinstance(k, Paged):
        arrays.append(k.table)
        k, v = k.pages, v.pages

    def flash_attention_decode(*refs, **scratch):  # the name that profilers show
        Decode(plan, _named(plan, refs), by_name(plan, scratch)).run()

    lead = dims.B * plan.config.kv_splits, dims.N, plan.query_blocks
    out, lse = launch(
        flash_attention_decode,
        operands.q,
        k,
        v,
        *arrays,
        out_type=(
            jax.ShapeDtypeStruct((*lead, plan.stored_rows, plan.tiles.v.padded_dim), plan.out_dtype),
            jax.ShapeDtypeStruct((*lead, ROWS), jnp.float32),
        ),
        ctas=plan.grid.ctas,
        warpgroups=1,
        scratch=scratch_of(plan),
        semantics=plgpu.LoweringSemantics.Lane,
    )
    out = out.reshape(*lead[:2], -1, out.shape[-1])[:, :, : dims.T, : problem.Hv]
    lse = lse[..., : plan.config.rows].reshape(*lead[:2], -1)
    return out if plan.query_layout == "BNTH" else jnp.swapaxes(out, 1, 2), lse


def _named(plan: DecodePlan, refs: tuple[Any, ...]) -> Refs:
    q, k, v, *arrays, out, lse = refs
    page_table = None if plan.problem.pages is None else arrays.pop()
    visit_table = arrays.pop() if plan.visit_table else None
    return Refs(q, k, v, tuple(arrays), visit_table, page_table, out, lse)
