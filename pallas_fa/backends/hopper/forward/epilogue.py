"""The end of a query block in the forward kernel: the division by the row sums, and the stores."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.work import QueryBlock, result_entry
from pallas_fa.backends.hopper.tiles import pieces


def store(
    plan: ForwardPlan,
    block: QueryBlock,
    wg: Any,
    t0: Any,
    gmem: Any,
    scratch: Any,
    acc: Any,
    m: Any,
    l: Any,
    unit: float,
    sink: Any,
) -> None:
    """Stores the output and the log-sum-exp of the 64 queries from `t0` on of warpgroup `wg`.

    Args:
      acc: the sums of p v, one array for each chunk of the head dim.
      m: [64], the maximum, where lse = m * unit + log(row sum).
      l: [64, SUM_COLUMNS], the partial row sums.
      sink: the logit of the head's sink, a scalar; None without sinks.
    """
    total = l.sum(axis=1)
    if sink is not None:
        m, total, rescale = _with_sink(sink, m, total, unit)
    empty = total == 0
    factor = jnp.where(empty, 0.0, 1 / jnp.where(empty, 1.0, total))
    if plan.problem.dropout is not None:
        factor = factor * plan.problem.dropout.scale
    if sink is not None:
        factor = factor * rescale
    lse = jnp.where(empty, -jnp.inf, m * unit + jnp.log(jnp.where(empty, 1.0, total)))
    if plan.blocks.pairs:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the stores of the block before
    smem = scratch["out_smem" if plan.separate_out else "q_smem"]
    out_smem = plan.tiles.out.matrix(smem)
    for i, x in enumerate(pieces(times_rows(acc, factor), plan.tiles.out.chunk)):
        out_smem[wg, i] = x.astype(plan.tiles.out.dtype)
    scratch["lse_smem"][wg] = lse
    plgpu.commit_smem()
    rows, entry = pl.ds(t0, 64), result_entry(plan, block)
    plan.tiles.out.store(plan.tiles.out.copied(smem).at[wg], gmem.out, entry, rows, block.n)
    lse_rows = gmem.lse.at[entry, block.n, rows]
    store_lse = lambda: plgpu.copy_smem_to_gmem(scratch["lse_smem"].at[wg], lse_rows)
    if plan.skips_steps or gmem.lse.shape[2] % plan.config.block_q == 0:
        store_lse()
    else:  # past the end lie the rows of the next head
        pl.when(t0 < plan.problem.dims.T)(store_lse)


def _with_sink(sink, m, total, unit):
    """Returns (maximum, row sum, factor of the sums so far), where the sink is one more logit of each row.

    `m`, `total`, `unit`: as in `store`, without the sink; the maximum returned has the unit of m.
    """
    sink = jnp.broadcast_to(sink * (1 / unit), m.shape)
    top = jnp.maximum(m, sink)
    top = jnp.where(top == -jnp.inf, 0.0, top)
    rescale, weight = (jnp.exp2((x - top) * (unit * LOG2E)) for x in (m, sink))
    return top, total * rescale + weight, rescale


def times_rows(chunks: tuple[Any, ...], factor: Any) -> tuple[Any, ...]:
    """Returns each of the arrays [64, columns] times `factor`, [64]."""
    return tuple(x * lax.broadcast_in_dim(factor, x.shape, [0]) for x in chunks)
