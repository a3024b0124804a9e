"""Gradients of keys and values where the query heads of a key head are in parts (`BackwardConfig.head_parts`).

Each part has CTAs of its own. They store what their query heads give, in float32, and XLA adds up the parts, always in the
same order.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_fa.backends.hopper.backward.plan import BackwardPlan
from pallas_fa.backends.hopper.backward.warpgroup import Warpgroup

_OPERAND = dict(dk="stationary_qk", dv="stationary_pv")


def types(plan: BackwardPlan) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the gradients that the kernel stores, [batch, parts of all key heads, keys, columns].

    Keys are those of whole blocks, columns those of whole tiles.
    """
    lead = plan.problem.dims.B, plan.order.heads, plan.visits.blocks * plan.config.block
    dims = (getattr(plan.tiles, _OPERAND[name]).padded_dim for name in plan.kind.stored)
    return tuple(jax.ShapeDtypeStruct((*lead, dim), jnp.float32) for dim in dims)


def store(w: Warpgroup, name: str, chunks: Sequence[Any]) -> None:
    """Stores the gradient `name` of this warpgroup's keys, chunks of columns, from registers.

    In float32 it would not fit the operands' shared memory.
    """
    memory, rows, first = w.gmem.gradients[name], pl.ds(w.start, 64), w.first_chunk(chunks)
    for i, x in enumerate(chunks):
        columns = pl.ds((first + i) * x.shape[1], x.shape[1])
        memory[w.block.b, w.block.head, rows, columns] = x


def merged(plan: BackwardPlan, name: str, parts: Any) -> Any:
    """Returns the gradient `name` in the problem's layout and dtype, from what the kernel stored."""
    dims, columns = plan.problem.dims, getattr(plan.tiles, _OPERAND[name]).dim
    x = parts.reshape(dims.B, plan.problem.K, plan.order.head_parts, *parts.shape[2:]).sum(axis=2)
    x = x[:, :, : dims.S, :columns].astype(plan.problem.dtype)
    return jnp.swapaxes(x, 1, 2) if plan.problem.layout == "BTNH" else x
