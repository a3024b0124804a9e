"""Tiles of keys and values that lie in pages: one TMA box for each page, or part of a page, of a tile.

Evidence: decode/boxes-of-pages.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.page_numbers import page_numbers
from pallas_fa.backends.hopper.config import ForwardConfig
from pallas_fa.backends.hopper.tiles import OfChunk, Tiles, of_chunk
from pallas_fa.operands.pages import Paged


def boxes(pages: Paged | None, block_kv: int) -> int:
    """Returns how many boxes make a tile of `block_kv` rows; 1 where there are no pages."""
    return 1 if pages is None else max(1, block_kv // pages.size)


def why_not(pages: Paged, block_kv: int) -> str | None:
    """Returns None if tiles of `block_kv` rows are made of whole boxes, else the reason."""
    size = pages.size
    if size % 16 == 0 and (block_kv % size == 0 or size % block_kv == 0):
        return None
    return f"pages of {size} rows; it loads pages of 16, 32 or a multiple of 64"


def fitting(pages: Paged | None, configs: Sequence[ForwardConfig]) -> Sequence[ForwardConfig]:
    """Returns those tiles whose key blocks are made of whole boxes; all if none are, so that a caller can say why."""
    return configs if pages is None else [c for c in configs if why_not(pages, c.block_kv) is None] or configs


class Box(NamedTuple):
    """Rows that TMA copies at once: those of a page, or of a sequence where there are none, and those of a tile.

    `rows` and `of_tile` are `pl.ds`.
    """

    page: Any
    rows: Any
    of_tile: Any


def places(pages: Paged, table: Any, b: Any, rows: Any) -> list[Box]:
    """Returns the boxes of `rows` of a sequence, a `pl.ds`."""
    box = rows.size // boxes(pages, rows.size)
    first = lax.rem(rows.start, jnp.int32(pages.size)) if pages.size > box else 0
    numbers = page_numbers(pages, table, b, rows.start, rows.size, box)
    return [Box(page, pl.ds(first, box), pl.ds(i * box, box)) for i, page in enumerate(numbers)]


def load(
    tiles: Tiles,
    pages: Paged,
    gmem: Any,
    at: list[Box],
    head: Any,
    copied: Any,
    barrier: Any | OfChunk,
    column_part: Any = 0,
) -> None:
    """Starts copying rows of one head into a tile; arrives on `barrier` once for each chunk of each box.

    Args:
      tiles: those of the operand.
      pages: how its pages lie in memory.
      gmem: the pages.
      at: the `places` of the tile's rows, or some of them.
      head: of the pages.
      copied: TMA's view of the tile.
      barrier: announces the tile, or that of each chunk.
      column_part: which part of the columns, where CTAs share them.
    """
    for page, rows, of_tile in at:
        for chunk in range(tiles.chunks):
            place = page, rows, head, tiles.columns(chunk, column_part)
            place = place if pages.layout == "PSKH" else (head, page, *place[1::2])
            plgpu.copy_gmem_to_smem(gmem.at[place], copied.at[chunk, of_tile], of_chunk(barrier)(chunk))
