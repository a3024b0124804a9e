"""The forward kernel for Hopper (compute capability 9.0).

FlashAttention-3 (Shah et al., arXiv 2407.08608) in Pallas: a CTA for each query block of one head, or for several of
them. One warpgroup loads keys and values by TMA into two rings. Each of the others holds 64 queries. Step by step it
computes the logits of the next key block on the tensor cores and, while P V of the block before is under way, their
softmax. The mask says which key blocks are visited and which are boundary blocks (`schedule.Visits`); only the latter
are masked element by element.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.grouped_rows import of_window, per_query
from pallas_fa.backends.gpu.head_dims import padded_forward
from pallas_fa.backends.gpu.launch import launch
from pallas_fa.backends.hopper import products
from pallas_fa.backends.hopper.forward import by_tickets, partial_results
from pallas_fa.backends.hopper.forward.choose import choose
from pallas_fa.backends.hopper.forward.compute import Compute
from pallas_fa.backends.hopper.forward.load import load
from pallas_fa.backends.hopper.forward.load_narrow import NarrowLoad
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.scratch import barriers, by_name
from pallas_fa.backends.hopper.forward.scratch import scratch as scratch_of
from pallas_fa.backends.hopper.forward.work import for_blocks
from pallas_fa.backends.hopper.ping_pong import PingPong
from pallas_fa.operands.layout import ordered
from pallas_fa.operands.pages import Paged
from pallas_fa.problem import Operands, Problem


@padded_forward
def forward(problem: Problem, operands: Operands, gpu: Gpu, *, interpret: bool = False) -> tuple[Any, Any]:
    """Returns (out, [B, T, N, Hv] in the problem's layout, log-sum-exp [B, T, N] float32).

    `gpu`: the one that the kernel is for. `interpret`: for JAX's GPU interpret mode.
    """
    plan = choose(problem, gpu, interpret)
    attend = functools.partial(_attend, problem, plan)
    if not plan.by_tickets:
        return attend(operands)
    dealt_out = lambda operands: _attend(problem, choose(problem, gpu, interpret, may_take_tickets=False), operands)
    return by_tickets.unless_mapped(attend, dealt_out)(operands)


def _attend(problem, plan, operands):
    if plan.group > 1:
        out, lse = run(plan, of_window(problem, operands), None)
        return out, per_query(problem, lse[:, :, : plan.problem.dims.T])
    out, lse = run(plan, operands, plan.table_of_visits(operands.mask))
    return out, jnp.swapaxes(lse[:, :, : problem.dims.T], 1, 2)


def run(plan: ForwardPlan, operands: Operands, visits: Any) -> tuple[Any, Any]:
    """Returns (out, [B, T, N, Hv] in the plan's query layout, lse [B, N, rows]), rows of whole warpgroups.

    With few queries in parts they are partial results, with [B * kv_splits, ...]; out is float32 then. `visits`: the visit
    table, if the plan has one.
    """
    problem, dims, config = plan.problem, plan.problem.dims, plan.config
    q = products.in_memory(problem, operands.q, plan.query_layout)
    k, v = (products.in_memory(problem, x, problem.layout) for x in (operands.k, operands.v))
    arrays = plan.in_memory(operands, visits)
    if isinstance(k, Paged):
        arrays.append(k.table)
        k, v = k.pages, v.pages

    def flash_attention_forward(*refs, **scratch):
        _kernel(plan, *refs, **scratch)

    entries = dims.B * config.kv_splits if plan.all_in_parts else dims.B
    out_shape = ordered(plan.query_layout, (entries, dims.T // plan.group, dims.N * plan.group, problem.Hv))
    lse_shape = entries, dims.N, pl.cdiv(dims.T, 64) * 64
    whole = jax.ShapeDtypeStruct(out_shape, plan.tiles.out.dtype), jax.ShapeDtypeStruct(lse_shape, jnp.float32)
    in_parts = partial_results.types(plan) if plan.split_heads else ()
    out_type = (*(whole if plan.whole_heads else ()), *in_parts)

    def call(*counter):
        return launch(
            flash_attention_forward,
            q,
            k,
            v,
            *arrays,
            *counter,
            out_type=out_type,
            ctas=plan.ctas,
            warpgroups=config.compute_wgs + 1,
            scratch=scratch_of(plan),
        )

    results = by_tickets.with_counter(call, out_type) if plan.by_tickets else call()
    return partial_results.merged(plan, results) if in_parts else results


class _Refs(NamedTuple):
    """Device memory.

    `arrays`: of score and mask; `visit_table`: None where the mask has no arrays; `sinks`: [B|1, N]; `dropout`: see there;
    `page_table`: None where keys and values are not in pages; `tickets`: their counter, or None; `out`, `lse`: None where
    all heads have keys in parts; `partial_out`, `partial_lse`: those of `partial_results`, or None.
    """

    q: Any
    k: Any
    v: Any
    arrays: tuple[Any, ...]
    visit_table: Any
    sinks: Any
    dropout: Any
    page_table: Any
    tickets: Any
    out: Any
    lse: Any
    partial_out: Any
    partial_lse: Any


def _kernel(plan: ForwardPlan, q, k, v, *refs, **scratch):
    *refs, partial_out, partial_lse = refs if plan.split_heads else (*refs, None, None)
    *arrays, out, lse = refs if plan.whole_heads else (*refs, None, None)
    tickets = arrays.pop() if plan.by_tickets else None
    page_table = None if plan.problem.pages is None else arrays.pop()
    dropout = None if plan.problem.dropout is None else arrays.pop()
    sinks = None if plan.problem.sinks is None else arrays.pop()
    visit_table = arrays.pop() if plan.visit_table else None
    scratch = by_name(plan, scratch)
    in_parts = partial_out, partial_lse
    gmem = _Refs(q, k, v, tuple(arrays), visit_table, sinks, dropout, page_table, tickets, out, lse, *in_parts)
    wg = lax.axis_index("wg")
    compute_registers, load_registers = plan.registers

    @pl.when(wg < plan.config.compute_wgs)
    def _():
        plgpu.set_max_registers(compute_registers, action="increase")
        of_block = lambda block: Compute(plan, block, wg, gmem, scratch).run()
        turns = PingPong.of(barriers(plan, scratch), wg)
        turns.run(lambda: for_blocks(plan, gmem, scratch, of_block, "compute"))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    @pl.when(wg == plan.config.compute_wgs)
    def _():
        plgpu.set_max_registers(load_registers, action="decrease")
        if plan.narrow_tiles:
            NarrowLoad.run(plan, gmem, scratch)
        else:
            load(plan, gmem, scratch)
