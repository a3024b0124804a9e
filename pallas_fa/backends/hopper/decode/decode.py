"""Attention of few queries: the forward kernel on rows, with the keys in parts, and the merge of the partial results.

The query heads of one key head are the rows of a tile (`gpu.grouped_rows`), so that keys and values are read once. Where
that leaves the GPU idle, the keys of a sequence are split over CTAs, as in Flash-Decoding (Dao et al., 2023).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.backends.gpu import grouped_rows
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.head_dims import padded_forward
from pallas_fa.backends.hopper.decode.choose import choose
from pallas_fa.backends.hopper.forward.forward import run
from pallas_fa.operands.layout import transpose
from pallas_fa.problem import Operands, Problem
from pallas_fa.softmax.merging import PartialResult, merge


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
    out, lse = run(plan, rows, plan.table_of_visits(visited))
    lse, splits = lse[:, :, : plan.problem.dims.T], plan.config.kv_splits
    if plan.query_layout == "BTNH":  # the order of out, so that XLA reorders the sum and not each part
        lse = jnp.swapaxes(lse, 1, 2)
    if splits > 1:  # one part is added after the other, which XLA does in one GPU kernel or two
        out, lse = merge(*(PartialResult(out[i::splits], lse[i::splits]) for i in range(splits)))
    if plan.rows_first:
        out, lse = (grouped_rows.per_query(problem, x) for x in (out, lse))
    elif problem.layout == "BNTH":
        out, lse = (jnp.swapaxes(x, 1, 2) for x in (out, lse))
    if sinks is not None:
        out, lse = merge(PartialResult(out, lse), PartialResult.empty(out.shape, lse.dtype, sinks))
    return transpose(problem.layout, out.astype(problem.dtype)), lse
