"""Attention of few queries: the forward kernel on rows, with the keys in parts, and the merge of the partial results.

The query heads of one key head are the rows of a tile (`gpu.grouped_rows`), so that keys and values are read once. Where
that leaves the GPU idle, the keys of a sequence are split over CTAs, as in Flash-Decoding (Dao et al., 2023). With
`stream_k` in the config, CTAs share all key blocks evenly instead (`gpu.stream_k`).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_fa.backends.gpu import grouped_rows, schedule
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.head_dims import padded_forward
from pallas_fa.backends.hopper.decode.choose import choose
from pallas_fa.backends.hopper.forward.forward import run
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.operands.layout import transpose
from pallas_fa.problem import Operands, Problem
from pallas_fa.softmax.merging import PartialResult, merge, merge_per_element


@padded_forward
def decode(problem: Problem, operands: Operands, gpu: Gpu, *, interpret: bool = False) -> tuple[Any, Any]:
    """Returns (out, [B, T, N, Hv] in the problem's layout, log-sum-exp [B, T, N] float32); arguments as of `forward`."""
    sinks, operands = operands.sinks, operands._replace(sinks=None)
    problem = dataclasses.replace(problem, sinks=None)
    plan = choose(problem, gpu, interpret)
    rows, visited = operands, operands.mask
    if plan.rows_first:
        rows = grouped_rows.of_operands(problem, operands)
        visited = None if visited is None else grouped_rows.visited(problem, visited)
    out, lse = (_by_stream_k if plan.stream_k else _by_parts)(plan, rows, visited)
    if plan.rows_first:
        out, lse = (grouped_rows.per_query(problem, x) for x in (out, lse))
    else:
        out, lse = (jnp.swapaxes(x, 1, 2) for x in (out, lse))
    if sinks is not None:
        out, lse = merge(PartialResult(out, lse), PartialResult.empty(out.shape, lse.dtype, sinks))
    return transpose(problem.layout, out.astype(problem.dtype)), lse


def _by_parts(plan: ForwardPlan, operands: Operands, mask: Any) -> tuple[Any, Any]:
    """Returns (out [B, N, T, Hv], lse [B, N, T]). `mask` answers range questions."""
    out, lse = run(plan, operands, plan.table_of_visits(mask))
    lse, splits = lse[:, :, : plan.problem.dims.T], plan.config.kv_splits
    # In the order of the rows, so that XLA reorders the sum and not each part.
    reorder = (lambda x: x) if plan.query_layout == "BNTH" else lambda x: jnp.swapaxes(x, 1, 2)
    if splits > 1:  # one part is added after the other, which XLA does in one GPU kernel or two
        lse = reorder(lse)
        out, lse = merge(*(PartialResult(out[i::splits], lse[i::splits]) for i in range(splits)))
        lse = reorder(lse)
    return reorder(out), lse


def _by_stream_k(plan: ForwardPlan, operands: Operands, mask: Any) -> tuple[Any, Any]:
    """Returns what `_by_parts` does."""
    stream_k, dims = plan.stream_k, plan.problem.dims
    assert stream_k is not None
    table, counts = plan.table_of_visits(mask), np.full(stream_k.units, plan.kv_blocks)
    if mask is not None:
        first, *_, last = _known_visits(plan, mask) if table is None else (table[..., i] for i in range(4))
        xp, shape = (np if table is None else jnp), (dims.B, dims.N, plan.blocks.count)
        counts = xp.broadcast_to(last - first, shape).reshape(-1)
    shares = stream_k.table(counts)
    out, lse = run(plan, operands, table, None if mask is None else shares)
    alike = 1 if table is not None and table.shape[1] > 1 else dims.N
    entry, is_another = stream_k.contributions(shares, stream_k.most_results(plan.kv_blocks, alike))
    lse = lse[..., : out.shape[2]]
    parts = (
        PartialResult(out[i, 0], jnp.where(flag[:, None], lse[i, 0], -jnp.inf))
        for i, flag in zip(entry.T, is_another.T, strict=True)
    )
    by_head = lambda x: x.reshape(dims.B, dims.N, -1, *x.shape[2:])[:, :, : dims.T]
    return tuple(map(by_head, merge_per_element(*parts)))


def _known_visits(plan, mask):
    dims, config = plan.problem.dims, plan.config
    sizes = config.block_q, dims.T, dims.S, config.block_kv
    return schedule.visits_of_blocks(mask.kv_range, mask.full_kv_range, *sizes)
