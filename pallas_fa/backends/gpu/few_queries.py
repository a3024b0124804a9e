"""Few queries against many keys, as in decoding, whatever instructions the kernel uses.

The query heads of one key head are the rows of a tile (`grouped_rows`), so that keys and values are read once. Where that
leaves the GPU idle, the keys of a sequence are split over CTAs, as in Flash-Decoding (Dao et al., 2023), and the partial
results are merged.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_fa.backends.gpu import grouped_rows
from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.operands.layout import transpose
from pallas_fa.problem import Operands, Problem
from pallas_fa.softmax.merging import PartialResult, merge_per_element

MOST_QUERIES = 16
_MOST_NARROW_ROWS = 128  # past it, to convert keys of 8 bits for other kernels is faster (evidence: decode/narrow-keys)
_MOST_SPLITS = 64
# In key blocks: what a CTA takes beside its steps, and what one more part takes to merge.
_CTA_START, _MERGE = 4, 0.1


def applies(problem: Problem) -> bool:
    """Whether the call has few enough queries, and no dropout, whose elements are those of heads and not of rows."""
    return problem.dims.T <= MOST_QUERIES and problem.dropout is None


def taken_by_mma(problem: Problem) -> bool:
    """Whether the kernel by `mma.sync` for few queries takes the call.

    Also more queries where keys have 8 bits, and any number where they are in pages, which of these kernels it alone reads.
    Not block masks, whose visits are lists.
    """
    has_blocks = problem.mask is not None and problem.mask.has_blocks
    if has_blocks or problem.dropout is not None or getattr(problem.config, "forward", None):
        return False
    is_narrow = problem.has_narrow_keys and problem.dims.T * problem.group <= _MOST_NARROW_ROWS
    return applies(problem) or is_narrow or problem.pages is not None


def group_of(problem: Problem) -> int:
    """How many query heads share a tile as its rows: all of a key head, or 1 where an array allows no such rows."""
    if problem.group == 1 or not grouped_rows.has_rows(problem):
        return 1
    rows = grouped_rows.of_problem(problem)
    arrays = KernelArrays.of(rows.score, rows.mask, rows.dims)
    return 1 if any(array.why_not() for array in arrays) else problem.group


def as_kernel_sees(problem: Problem) -> Problem:
    """Returns the problem of rows that the kernel solves."""
    return grouped_rows.of_problem(problem) if group_of(problem) > 1 else problem


def remark(problem: Problem, splits: int) -> str | None:
    """Returns how the work is cut, in words; None where it is cut as with many queries."""
    group = group_of(problem)
    words = [f"the {group} query heads of a key head share a tile"] if group > 1 else []
    words += [f"the keys are in {splits} parts"] if splits > 1 else []
    return " and ".join(words) or None


def fastest_splits(plan: Any, gpu: Gpu) -> int:
    """Returns how many parts take least time, if all take the same time and CTAs of one multiprocessor share its bandwidth.

    `plan`: that of a kernel whose keys are in one part.
    """
    if plan.visit_lists:  # which are not split
        return 1

    def time(splits):
        rounds = -(-plan.grid.ctas * splits // gpu.multiprocessors)
        return rounds * (-(-plan.kv_blocks // splits) + _CTA_START) + _MERGE * splits

    return min(range(1, min(_MOST_SPLITS, plan.kv_blocks) + 1), key=time)


def attend(
    problem: Problem, operands: Operands, choose: Callable[[Problem], Any], run: Callable[..., tuple[Any, Any]]
) -> tuple[Any, Any]:
    """Returns (out, [B, T, N, Hv] in the problem's layout, log-sum-exp [B, T, N] float32).

    Args:
      problem, operands: the call.
      choose: returns the plan of a problem. A plan with `rows_first` is that of the problem of rows.
      run: run(plan, operands, visits) -> the results of all parts, out in the plan's query layout and lse [., N, rows].
    """
    sinks, operands = operands.sinks, operands._replace(sinks=None)
    problem = dataclasses.replace(problem, sinks=None)
    plan = choose(problem)
    rows, visited = operands, operands.mask
    if plan.rows_first:
        rows = grouped_rows.of_operands(problem, operands)
        visited = None if visited is None else grouped_rows.visited(problem, visited)
    out, lse = run(plan, rows, plan.table_of_visits(visited))
    lse, splits = lse[:, :, : plan.problem.dims.T], plan.config.kv_splits
    if plan.query_layout == "BTNH":  # the order of out, so that XLA reorders the sum and not each part
        lse = jnp.swapaxes(lse, 1, 2)
    if splits > 1:  # one part is added after the other, which XLA does in one GPU kernel
        out, lse = merge_per_element(*(PartialResult(out[i::splits], lse[i::splits]) for i in range(splits)))
    if plan.rows_first:
        out, lse = (grouped_rows.per_query(problem, x) for x in (out, lse))
    elif problem.layout == "BNTH":
        out, lse = (jnp.swapaxes(x, 1, 2) for x in (out, lse))
    if sinks is not None:
        out, lse = merge_per_element(PartialResult(out, lse), PartialResult.empty(out.shape, lse.dtype, sinks))
    return transpose(problem.layout, out.astype(problem.dtype)), lse
