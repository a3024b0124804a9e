"""When the query heads of a key head may be the rows of one query block, in windows.

They see the same keys. In a short window these are so few that a block of as many queries of one head would mostly see
keys that others of its queries see. Evidence: forward/grouped-rows.
"""

import numpy as np

from pallas_fa.backends.gpu.few_queries import MOST_QUERIES
from pallas_fa.backends.gpu.support import LARGEST_HEAD_DIM
from pallas_fa.backends.hopper import products
from pallas_fa.masks.band import Window
from pallas_fa.masks.base import Mask
from pallas_fa.operands import intervals
from pallas_fa.operands.pytree import is_static_int
from pallas_fa.problem import Problem

ROWS = 64  # of a warpgroup: whole groups of heads
KEY_MULTIPLE = 8  # TMA loads swizzled tiles from such a key on


def is_static(mask: Mask | None) -> bool:
    """Whether a mask is a window of ints on both sides."""
    return isinstance(mask, Window) and all(is_static_int(x) for x in (mask.left, mask.right, mask.offset))


def why_not(problem: Problem) -> str | None:
    """Returns None if the heads of a key head may be the rows of one query block, else the reason."""
    if not is_static(problem.mask):
        return "a mask that is no window of ints on both sides"
    if problem.group == 1 or ROWS % problem.group:
        return f"{problem.group} query heads for a key head; it takes 2, 4, 8, 16, 32 or 64"
    if problem.layout != "BTNH":
        return f"layout={problem.layout!r}"
    if problem.dims.T <= MOST_QUERIES:
        return f"T={problem.dims.T} queries, whose heads are rows anyway"
    found = [("a score", problem.score), ("dropout", problem.dropout), ("keys in pages", problem.pages)]
    if name := next((name for name, x in found if x is not None), None):
        return name
    if max(problem.H, problem.Hv) > LARGEST_HEAD_DIM:
        return f"a head dim past {LARGEST_HEAD_DIM}"
    return "operands in two parts" if products.parts_of(problem) > 1 else None


def most_keys(rows: Problem, block_q: int) -> int:
    """Returns how many keys, from a multiple of `KEY_MULTIPLE` on, a query block of so many rows sees at most.

    `rows`: the problem of rows.
    """
    assert rows.mask is not None
    found = rows.mask.kv_range(*intervals.tiles(rows.dims.T, block_q))
    first, end = (np.clip(x, 0, rows.dims.S) for x in found)
    return int(np.max(end - first // KEY_MULTIPLE * KEY_MULTIPLE))
