"""Which tests every change runs (`make test`), and which wait for `make test-full`: those marked `full`.

`make test` sees every mask, score, dtype, head dim, pair of lengths and number of heads at least once; the rest of the
table, and more of what is slow, is full.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.cases import TABLE, Case


def representatives(cases: Iterable[Case]) -> frozenset[Case]:
    """Few rows that have every value of every factor that `cases` have, found greedily."""
    factors = lambda c: {("mask", c.mask), ("score", c.score), ("dtype", c.dtype), ("T, S", c.T, c.S),
                         ("N, K", c.N, c.K), ("H, Hv", c.H, c.Hv), ("batch", c.batch)}  # fmt: skip
    left = set().union(*map(factors, cases))
    chosen = []
    while left:
        best = max(cases, key=lambda c: (len(factors(c) & left), -c.T * c.S))
        chosen.append(best)
        left -= factors(best)
    return frozenset(chosen)


def of_table(only: Callable[[Case], bool] = lambda case: True) -> list[Any]:
    """Parameters for the rows of the table, all but representatives marked `full`."""
    rows = [case for case in TABLE if only(case)]
    few = representatives(rows)
    return [pytest.param(c, id=str(c), marks=() if c in few else pytest.mark.full) for c in rows]


def every(n: int, values: Iterable[Any], keep: Iterable[Any] = ()) -> list[Any]:
    """Parameters for `values`, all but every n-th and those to `keep` marked `full`."""
    keep = tuple(keep)
    return [pytest.param(x, marks=() if i % n == 0 or x in keep else pytest.mark.full) for i, x in enumerate(values)]
