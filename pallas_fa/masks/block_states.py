"""`block_mask`: finds the blocks of a mask."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from pallas_fa.masks import block_lists
from pallas_fa.masks.base import Mask, remedy_for
from pallas_fa.masks.blocks import BlockMask, block_sizes
from pallas_fa.masks.lengths import Lengths
from pallas_fa.operands.automatic_axes import explicit_sharding, on_automatic_axes
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import is_array, is_static_int

_COUNTED = {"T": "queries", "S": "keys", "batch": "batch entries", "heads": "query heads"}


def block_mask(
    mask: Mask, T: int, S: int, block: int | tuple[int, int] = 128, *, batch: Any = None, heads: int | None = None
) -> BlockMask:
    """Returns `mask` with the states of its blocks, found by evaluating it once: a mask that visits few blocks.

    Build it once, outside the loop or the layers that use it, and pass it in: it is a pytree. Its states take
    B N ceil(T / q) ceil(S / kv) bytes, where B and N count only if the mask depends on them; up to a million of them it has
    the kernels' lists of blocks, too, if T and S are multiples of q and kv: eight bytes more for each. One row of blocks is
    evaluated at a time. Its blocks need not be those of the kernels: 128 is a good size; 64 follows finer patterns.

    Args:
      mask: any mask. Its `Causal(align="bottom_right")` aligns to T and S.
      T: queries.
      S: keys.
      block: positions of a block; an int, or (q, kv).
      batch: the batch dims of the call, an int or a tuple of them, () for none, if the mask depends on the batch entry.
      heads: the query heads of the call, if the mask depends on the head.

    Raises:
      ValueError: a size is wrong, or the mask depends on batch entries or heads and their number is not given.
      TypeError: `mask` is no `Mask`.
    """
    if not isinstance(mask, Mask):
        raise TypeError(
            f"block_mask takes a Mask, got {type(mask).__name__}. {remedy_for(mask, 'Pass one of pallas_fa.masks.')}"
        )
    entries = () if batch is None else tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    given = ("T", T), ("S", S), *(("batch", x) for x in entries), *((("heads", heads),) if heads is not None else ())
    for name, size in given:
        least = int(name == "heads")
        if not is_static_int(size) or size < least:
            value = f" of type {type(size).__name__}" if is_array(size) else f"={size!r}"
            raise ValueError(
                f"{name}{value} must be an int >= {least}, known while tracing: the number of {_COUNTED[name]}."
            )
    T, S, q, kv = int(T), int(S), *block_sizes(block)
    dims, known = Dims(tuple(map(int, entries)), T, S, int(heads or 1)), (batch is not None, heads is not None)
    indices: list[tuple[int | None, int | None]] = []

    def states(mask):
        try:
            bound = mask.bind(dims, Lengths())
        except ValueError as e:
            raise ValueError(
                f"{e} If the mask has values for each batch entry or head, pass batch= and heads=."
            ) from None
        indices.append(_indices(bound, dims, known))
        return _states(bound, dims, q, kv)

    sharding = explicit_sharding(*jax.tree.leaves(mask))
    if sharding is None:
        found, lists = states(mask)
    else:
        found, lists = on_automatic_axes(sharding.mesh, PartitionSpec(), states, mask)
    return BlockMask(found, (q, kv), mask, (T, S), indices=indices[0], lists=lists)


# Jitted, since calls outside of any `jit` would compile the loop anew each time.
@functools.partial(jax.jit, static_argnums=(1, 2, 3), inline=True)
def _states(bound, dims, q, kv):
    """The states of the blocks of a bound mask, int8 [*B|1, N|1, rows, columns], and their lists (see `BlockMask`)."""
    T, S = dims.T, dims.S
    entries, of_heads = _span(bound, (dims.B, dims.N), dims)
    rows, columns = -(-T // q), -(-S // kv)
    s = np.minimum(np.arange(columns * kv, dtype=np.int32), S - 1)  # the last position stands for those past the end

    def row(i):
        b, n, i = i // (of_heads * rows), i // rows % of_heads, i % rows
        t = jnp.minimum(i * q + jnp.arange(q, dtype=jnp.int32), T - 1)
        here = jax.tree.map(functools.partial(_cut, where=(b, n, t, s)), bound)
        index = (jnp.reshape(jnp.asarray(x, jnp.int32), shape) for x, shape in zip((b, n, t, s), _ALONG, strict=True))
        allowed = jnp.broadcast_to(here.allowed(*index), (1, 1, q, columns * kv))
        count = allowed.reshape(q, columns, kv).sum(axis=(0, 2), dtype=jnp.int32)
        return (count > 0).astype(jnp.int8) + (count == q * kv).astype(jnp.int8)

    states = jnp.zeros((entries * of_heads * rows, columns), jnp.int8)
    if states.size:  # JAX traces the body of an empty loop, too, which cannot cut empty arrays
        states = lax.map(row, jnp.arange(states.shape[0], dtype=jnp.int32))
    lists = block_lists.of_blocks(states.reshape(entries, of_heads, rows, columns), (T, S), (q, kv))
    lead = *(dims.batch if entries != 1 else (1,) * len(dims.batch)), of_heads
    lists = lists and tuple(x.reshape(*lead, *x.shape[2:]) for x in lists)
    return states.reshape(*lead, rows, columns), lists


_ALONG = (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1)


def _cut(x, where):
    """The values of a bound array at one batch entry and head, and at positions t and s."""
    for axis, i in enumerate(where):
        if x.shape[axis] > 1:
            x = jnp.take(x, jnp.atleast_1d(i), axis=axis)
    return x


def _indices(bound, dims, known):
    """(B, N), each None where the rule of a bound mask does not depend on the index; raises where that is not `known`.

    Its arrays have a size that the call must have anyway, and may be cut to a part of it.
    """
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, 1, *x.shape[2:]), x.dtype), bound)
    of_entry, of_head = (size > 1 for size in _span(one, (2, 2), dims))
    for on, has, what, how in (
        (of_entry, known[0], "batch entry", "batch= to block_mask, the batch dims of the call, () for none"),
        (of_head, known[1], "head", "heads= to block_mask, the query heads of the call"),
    ):
        if on and not has:
            raise ValueError(f"the mask depends on the {what}, so its blocks do too: pass {how}.")
    return dims.B if of_entry else None, dims.N if of_head else None


def _span(bound, sizes, dims):
    """(batch entries, heads) for which a bound mask has values of its own, of as many as `sizes` says; 1 for none."""
    shapes = (sizes[0], 1, 1, 1), (1, sizes[1], 1, 1), (1, 1, dims.T, 1), (1, 1, 1, dims.S)
    index = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    shape = jax.eval_shape(lambda b, n, t, s, mask: mask.allowed(b, n, t, s), *index, bound).shape
    return ((1,) * (4 - len(shape)) + shape)[:2]
