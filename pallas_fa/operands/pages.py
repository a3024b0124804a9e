"""`Paged`: keys or values in pages of memory, which stand for an array [B, S, K, dim] that is nowhere in one piece."""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp
from jax import lax

from pallas_fa.operands.offsets import as_int32, int_array
from pallas_fa.operands.pytree import Node

PageLayout = Literal["PSKH", "KPSH"]
PAGE_LAYOUTS = get_args(PageLayout)


@dataclasses.dataclass(frozen=True)
class Paged(Node):
    """Rows of B sequences: row s of sequence b is row s % size of page `table[b, s // size]`.

    Attributes:
      pages: [P, size, K, dim], or [K, P, size, dim] for the layout "KPSH"; [P, size, 2 K, dim] with `interleaved`.
      table: int32 [B, pages of a sequence]. An entry that is no page's stands for any page.
      layout: the order of the dims of `pages`; P pages, S rows of a page, K heads, H head dim.
      interleaved: 0 for the even heads of `pages`, 1 for the odd ones, None for all.
      columns: how many of the first columns of the rows of `pages` are theirs; None for all.
    """

    pages: Any
    table: Any
    layout: PageLayout = "PSKH"
    interleaved: int | None = None
    columns: int | None = None

    @property
    def size(self) -> int:
        """Rows of a page."""
        return self.pages.shape[1 if self.layout == "PSKH" else 2]

    @property
    def count(self) -> int:
        """P, how many pages there are."""
        return self.pages.shape[0 if self.layout == "PSKH" else 1]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[B, S, K, dim] of the array that they stand for."""
        heads = self.pages.shape[2 if self.layout == "PSKH" else 0]
        B, pages = self.table.shape
        heads = heads if self.interleaved is None else heads // 2
        return B, pages * self.size, heads, self.columns or self.pages.shape[3]

    @property
    def ndim(self) -> int:
        """The number of dims of `shape`."""
        return 4

    @property
    def dtype(self) -> Any:
        """Of the rows."""
        return self.pages.dtype

    def gather(self, first: Any, count: int) -> Any:
        """Returns the rows [B, count * size, K, dim] in pages `first`, ..., `first + count - 1` of each sequence."""
        table = lax.dynamic_slice_in_dim(self.table, first, count, axis=1, allow_negative_indices=False)
        table = jnp.clip(table, 0, self.count - 1)
        B, _, K, dim = self.shape
        if self.layout == "KPSH":
            rows = jnp.moveaxis(self.pages[:, table], 0, -2)
        elif self.interleaved is None:
            rows = self.pages[table]
        else:
            rows = self.pages.reshape(self.count, self.size, K, 2, -1)[table, :, :, self.interleaved]
        return rows[..., :dim].reshape(B, count * self.size, K, dim)


def checked_table(table: Any, B: int) -> Any:
    """Returns a page table int32 [B, pages per sequence]; raises where it is none."""
    table = int_array("page_table", table, "PageAllocator.page_table makes one.")
    if table.ndim != 2 or table.shape[0] != B:
        raise ValueError(
            f"page_table.shape={tuple(table.shape)} must be [B, pages per sequence], with B={B} sequences. Give each"
            " sequence a row of pages, and fill it up with -1."
        )
    return as_int32(table)


def in_one_piece(x: Any) -> Any:
    """Returns keys or values as an array [B, S, K, dim], whether in pages or not."""
    return x.gather(0, x.table.shape[1]) if isinstance(x, Paged) else x
