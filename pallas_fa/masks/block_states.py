"""`block_mask`: finds the blocks of a mask."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.masks import block_lists
from pallas_fa.masks.base import Mask
from pallas_fa.masks.blocks import BlockMask, block_sizes
from pallas_fa.masks.lengths import Lengths
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import is_array, is_static_int

_COUNTED = {"T": "queries", "S": "keys", "batch": "batch entries", "heads": "query heads"}


def block_mask(
    mask: Mask, T: int, S: int, block: int | tuple[int, int] = 128, *, batch: Any = (), heads: int | None = None
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
      batch: the batch dims of the call, an int or a tuple of them, if the mask depends on the batch entry.
      heads: the query heads of the call, if the mask depends on the head.

    Raises:
      ValueError: a size is wrong, or the mask depends on batch entries or heads and their number is not given.
      TypeError: `mask` is no `Mask`.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"block_mask takes a Mask, got {type(mask).__name__}. Wrap a bool array as Dense(array).")
    batch = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    given = ("T", T), ("S", S), *(("batch", x) for x in batch), *((("heads", heads),) if heads is not None else ())
    for name, size in given:
        if not is_static_int(size) or size <= 0:
            value = f" of type {type(size).__name__}" if is_array(size) else f"={size!r}"
            raise ValueError(f"{name}{value} must be an int > 0, known while tracing: the number of {_COUNTED[name]}.")
    T, S, q, kv = int(T), int(S), *block_sizes(block)
    dims = Dims(tuple(map(int, batch)), T, S, int(heads or 1))
    try:
        bound = mask.bind(dims, Lengths())
    except ValueError as e:
        raise ValueError(f"{e} If the mask has values for each batch entry or head, pass batch= and heads=.") from None
    entries, of_heads = _spanned(bound, dims, bool(batch), heads is not None)
    rows, columns = -(-T // q), -(-S // kv)
    s = np.minimum(np.arange(columns * kv), S - 1)  # the last position stands for those past the end

    def row(i):
        b, n, i = i // (of_heads * rows), i // rows % of_heads, i % rows
        t = jnp.minimum(i * q + jnp.arange(q, dtype=jnp.int32), T - 1)
        here = jax.tree.map(functools.partial(_cut, where=(b, n, t, s)), bound)
        index = (jnp.reshape(jnp.asarray(x, jnp.int32), shape) for x, shape in zip((b, n, t, s), _ALONG, strict=True))
        allowed = jnp.broadcast_to(here.allowed(*index), (1, 1, q, columns * kv))
        count = allowed.reshape(q, columns, kv).sum(axis=(0, 2), dtype=jnp.int32)
        return ((count > 0).astype(jnp.int8) + (count == q * kv)).astype(jnp.int8)

    states = lax.map(row, jnp.arange(entries * of_heads * rows, dtype=jnp.int32))
    lists = block_lists.of_blocks(states.reshape(entries, of_heads, rows, columns), (T, S), (q, kv))
    lead = *(batch if entries > 1 else (1,) * len(batch)), of_heads
    lists = lists and tuple(x.reshape(*lead, *x.shape[2:]) for x in lists)
    return BlockMask(states.reshape(*lead, rows, columns), (q, kv), mask, (T, S), lists=lists)


_ALONG = (1, 1, 1, 1), (1, 1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1)


def _cut(x, where):
    """The values of a bound array at one batch entry and head, and at positions t and s."""
    for axis, i in enumerate(where):
        if x.shape[axis] > 1:
            x = jnp.take(x, jnp.atleast_1d(i), axis=axis)
    return x


def _spanned(bound, dims, has_batch, has_heads):
    """(batch entries, heads) for which a bound mask has blocks of its own; 1 where it does not depend on them."""
    index = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((dims.B if has_batch else 2, 1, 1, 1),
             (1, dims.N if has_heads else 2, 1, 1), (1, 1, dims.T, 1), (1, 1, 1, dims.S))]  # fmt: skip
    shape = jax.eval_shape(lambda b, n, t, s, mask: mask.allowed(b, n, t, s), *index, bound).shape
    shape = (1,) * (4 - len(shape)) + shape
    for size, has, name, what in ((shape[0], has_batch, "batch", "entry"), (shape[1], has_heads, "heads", "head")):
        if size > 1 and not has:
            raise ValueError(
                f"the mask depends on the {'batch ' * (what == 'entry')}{what}, so its blocks do too: pass {name}= to"
                " block_mask, as in the call."
            )
    return shape[:2]
