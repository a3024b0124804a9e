"""The results of heads whose keys are in parts: what a CTA stores of them, and how XLA merges them into the output."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa.backends.hopper.forward.plan import ForwardPlan
from pallas_fa.backends.hopper.forward.work import QueryBlock
from pallas_fa.operands.layout import ordered
from pallas_fa.softmax.merging import PartialResult, merge_per_element


def types(plan: ForwardPlan) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the partial results: out [parts, heads, rows, columns] and lse [parts, heads, rows].

    Rows are those of whole query blocks, front padding included; columns those of whole tiles.
    """
    lead = plan.config.kv_splits, plan.split_heads, plan.blocks.count * plan.config.block_q
    columns = plan.tiles.v.padded_dim * plan.column_parts
    return jax.ShapeDtypeStruct((*lead, columns), jnp.float32), jax.ShapeDtypeStruct(lead, jnp.float32)


def head_of(plan: ForwardPlan, block: QueryBlock) -> Any:
    """Returns the number of the block's head among those whose keys are in parts; negative for the others."""
    return block.b * plan.problem.dims.N + block.n - plan.whole_heads


def store(plan: ForwardPlan, block: QueryBlock, wg: Any, gmem: Any, acc: tuple[Any, ...], lse: Any) -> None:
    """Stores the partial result of warpgroup `wg`, for 64 queries: `acc`, chunks of columns, and `lse`.

    From registers: a tile in float32 would not fit shared memory beside those of the operands.
    """
    head, (part, _) = head_of(plan, block), block.parts
    rows = pl.ds(block.number * plan.config.block_q + wg * 64, 64)

    @pl.when(block.column_part == 0)
    def _():
        gmem.partial_lse[part, head, rows] = lse

    first = block.column_part * plan.tiles.v.padded_dim
    for i, x in enumerate(acc):
        gmem.partial_out[part, head, rows, pl.ds(first + i * x.shape[1], x.shape[1])] = x


def merged(plan: ForwardPlan, results: tuple[Any, ...]) -> tuple[Any, Any]:
    """Returns (out, lse) of all heads, as `run` does. `results`: those of the kernel: out, lse, and the partial ones.

    Where the keys of all heads are in parts, there are only the latter.
    """
    *whole, outs, lses = results
    dims, Hv, front = plan.problem.dims, plan.problem.Hv, plan.blocks.front_padding
    entries, heads = divmod(plan.split_heads, dims.N)
    entries, heads = (1, heads) if entries == 0 else (entries, dims.N)
    box = lambda x: x.reshape(entries, heads, *x.shape[1:])[:, :, front : front + dims.T]
    parts = (PartialResult(box(out[..., :Hv]), box(lse)) for out, lse in zip(outs, lses, strict=True))
    out, lse = merge_per_element(*parts)
    out = out.astype(plan.problem.dtype)
    out = jnp.swapaxes(out, 1, 2) if plan.query_layout == "BTNH" else out
    if not whole:
        return out, lse
    first = dims.B - entries, dims.N - heads
    out = lax.dynamic_update_slice(whole[0], out, ordered(plan.query_layout, (first[0], 0, first[1], 0)))
    return out, lax.dynamic_update_slice(whole[1], lse, (*first, 0))
