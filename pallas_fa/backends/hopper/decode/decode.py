"""Attention of few queries: the forward kernel on rows, with the keys in parts, and the merge of the partial results.

The query heads of one key head are the rows of a tile (`gpu.grouped_rows`), so that keys and values are read once. Where
that leaves the GPU idle, the keys of a sequence are split over CTAs, as in Flash-Decoding (Dao et al., 2023).
"""

from typing import Any

import jax.numpy as jnp

from pallas_fa.backends.gpu import grouped_rows, schedule
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.decode.choose import choose, group_of
from pallas_fa.backends.hopper.forward.forward import run
from pallas_fa.backends.hopper.head_dims import padded_forward
from pallas_fa.problem import Operands, Problem
from pallas_fa.softmax.merging import PartialResult, merge


@padded_forward
def decode(problem: Problem, operands: Operands, gpu: Gpu, *, interpret: bool = False) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv], log-sum-exp [B, T, N] float32); arguments as of the forward kernel."""
    sinks, operands = operands.sinks, operands._replace(sinks=None)
    problem = problem.with_operands(operands)
    group = group_of(problem)
    plan = choose(problem, gpu, interpret)
    visits = _visit_table(plan, operands.mask, group)
    rows = grouped_rows.of_operands(operands, group) if group > 1 else operands
    out, lse = run(plan, rows, visits)
    lse = jnp.swapaxes(lse[:, :, : plan.problem.dims.T], 1, 2)
    splits = plan.config.kv_splits
    if splits > 1:
        # One part after the other, which XLA does in one GPU kernel; reductions over the parts would be several.
        out, lse = merge(*(PartialResult(out[i::splits], lse[i::splits]) for i in range(splits)))
    if group > 1:
        out, lse = grouped_rows.per_query(out, group), grouped_rows.per_query(lse, group)
    if sinks is not None:
        out, lse = merge(PartialResult(out, lse), PartialResult.empty(out.shape, lse.dtype, sinks))
    return out.astype(problem.dtype), lse


def _visit_table(plan, mask, group):
    """The visit table of the rows, from the mask of the call; None where the mask has no arrays."""
    if mask is None or not plan.visit_table:
        return None
    config, dims = plan.config, plan.problem.dims
    ask, ask_full = (grouped_rows.ask(question, group) for question in (mask.kv_range, mask.full_kv_range))
    found = schedule.visits_of_blocks(ask, ask_full, config.block_q, dims.T, dims.S, config.block_kv)
    return schedule.table(found, plan.blocks.count, plan.blocks.count)
