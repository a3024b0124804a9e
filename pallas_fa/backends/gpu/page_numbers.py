"""The pages of a tile's rows, where keys and values are not in one piece."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_fa.operands.pages import Paged


def page_numbers(pages: Paged, table: Any, b: Any, first: Any, rows: int, box: int) -> list[Any]:
    """Returns the number of the page of each `box` rows of those from `first` on, read from the `table` in device memory.

    Of an entry that is no page's, and past the end of the table, it is that of some page.
    """
    last = pages.table.shape[1] - 1
    entries = (lax.div(first + row, jnp.int32(pages.size)) for row in range(0, rows, box))
    return [jnp.clip(table[b, jnp.minimum(entry, last)], 0, pages.count - 1) for entry in entries]
