"""The end of a query block in the forward kernel: the division by the row sums, and the stores."""

import functools
import operator
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.online_softmax import finish
from pallas_fa.backends.gpu.warps import any_above
from pallas_fa.backends.hopper.forward import partial_results
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.work import QueryBlock, result_entry
from pallas_fa.backends.hopper.tiles import pieces


def store(
    plan: ForwardPlan,
    block: QueryBlock,
    wg: Any,
    gmem: Any,
    scratch: Any,
    acc: Any,
    m: Any,
    l: Any,
    unit: float,
    sink: Any,
) -> None:
    """Stores the output and the log-sum-exp of the 64 queries of warpgroup `wg`.

    `acc`: the sums of p v, one array for each chunk of the head dim; m, l, unit, sink: as of `finish`.
    """
    factor, lse = finish(plan, m, l, unit, sink)
    acc = times_rows(acc, factor)
    store_partial = lambda: partial_results.store(plan, block, wg, gmem, acc, lse)
    store_whole = lambda: _store_whole(plan, block, wg, gmem, scratch, acc, lse)
    if not plan.split_heads:
        store_whole()
    elif not plan.whole_heads:
        store_partial()
    else:
        lax.cond(partial_results.head_of(plan, block) >= 0, store_partial, store_whole)


def _store_whole(plan, block, wg, gmem, scratch, acc, lse):
    tiles, slots = plan.tiles.out, plan.out_slots
    smem = scratch["out_smem" if plan.separate_out else "q_smem"]
    matrix, copied = (x.at[wg] for x in (tiles.matrix(smem), tiles.copied(smem)))
    entry, t0 = result_entry(plan, block), block.t0 + wg * 64
    rows, chunks = pl.ds(t0, 64), list(pieces(acc, tiles.chunk))
    at_once = 1 if plan.out_in_turns else len(chunks)
    for first in range(0, len(chunks), at_once):
        turn = range(first, first + at_once)
        if plan.several_blocks:  # until the stores before have read the slot; those of the block before, all of them
            plgpu.wait_smem_to_gmem(slots - at_once if first else 0, wait_read_only=True)
        for i in turn:
            matrix[i % slots] = chunks[i].astype(tiles.dtype)
        if turn[-1] == len(chunks) - 1:
            scratch["lse_smem"][wg] = lse
        plgpu.commit_smem()
        for i in turn:
            tiles.store_chunk(i, copied.at[i % slots], gmem.out, entry, rows, block.n, block.column_part)
    lse_rows = gmem.lse.at[entry, block.n, rows]
    store_lse = lambda: plgpu.copy_smem_to_gmem(scratch["lse_smem"].at[wg], lse_rows)
    conditions = [block.column_part == 0] if plan.column_parts > 1 else []
    if not (plan.skips_steps or gmem.lse.shape[2] % plan.config.block_q == 0):
        conditions.append(t0 < plan.problem.dims.T)  # past the end lie the rows of the next head
    if conditions:
        pl.when(functools.reduce(operator.and_, conditions))(store_lse)
    else:
        store_lse()


def times_rows(chunks: tuple[Any, ...], factor: Any) -> tuple[Any, ...]:
    """Returns each of the arrays [64, columns] times `factor`, [64]."""
    return tuple(x * lax.broadcast_in_dim(factor, x.shape, [0]) for x in chunks)


def times_rows_unless_1(chunks: tuple[Any, ...], factor: Any, interpret: bool) -> tuple[Any, ...]:
    """As `times_rows`, of factors up to 1; warps whose factors are all 1 do nothing."""
    is_needed = any_above(-factor, -1.0, interpret)
    return lax.cond(is_needed, lambda chunks: times_rows(chunks, factor), lambda chunks: chunks, chunks)
