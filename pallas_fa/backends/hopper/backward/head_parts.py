"""How a CTA stores what a part of the query heads of a key head gives (see `gpu.head_parts`)."""

from collections.abc import Sequence
from typing import Any

from jax.experimental import pallas as pl

from pallas_fa.backends.hopper.backward.warpgroup import Warpgroup


def store(w: Warpgroup, name: str, chunks: Sequence[Any]) -> None:
    """Stores the gradient `name` of this warpgroup's keys, chunks of columns, from registers.

    In float32 it would not fit the operands' shared memory.
    """
    memory, rows, first = w.gmem.gradients[name], pl.ds(w.start, 64), w.first_chunk(chunks)
    for i, x in enumerate(chunks):
        columns = pl.ds((first + i) * x.shape[1], x.shape[1])
        memory[w.block.b, w.block.head, rows, columns] = x
