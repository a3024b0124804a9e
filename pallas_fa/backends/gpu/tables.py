"""Tables of tiles: data that says what is best for which calls, with the record of the evidence.

The id of a record is its path in docs/decisions/ without the ending, such as `forward/tiles`.
"""

import dataclasses
import math
from typing import Any


@dataclasses.dataclass(frozen=True)
class Span:
    """The numbers from `least` to `most`, both included."""

    least: float = 0
    most: float = math.inf

    def __contains__(self, x: Any) -> bool:
        return self.least <= x <= self.most


def up_to(most: int) -> Span:
    """Returns the numbers of at most `most`."""
    return Span(most=most)


def at_least(least: int) -> Span:
    """Returns the numbers of at least `least`."""
    return Span(least=least)


class Row:
    """One row: a value, and where it applies.

    `where`: conditions on facts, by name: a `Span` or a set that has the fact in it, or the fact itself. `evidence`: the id
    of a record, where it is not the table's.
    """

    def __init__(self, value: Any, evidence: str | None = None, **where: Any):
        self.value, self.evidence, self.where = value, evidence, where

    def applies(self, facts: Any) -> bool:
        """Returns whether all conditions hold for `facts`, a NamedTuple."""
        return all(_holds(condition, getattr(facts, name)) for name, condition in self.where.items())


def _holds(condition, fact):
    return fact in condition if isinstance(condition, Span | set | frozenset) else fact == condition


class Table:
    """Rows in order: the first that applies has the value. The last applies everywhere.

    `evidence`: the id of the record that the rows follow.
    """

    def __init__(self, evidence: str, *rows: Row):
        assert not rows[-1].where, "the last row must apply everywhere"
        self.evidence, self.rows = evidence, rows

    def find(self, facts: Any) -> Any:
        """Returns the value for `facts`, a NamedTuple with a field for each condition of the rows."""
        return next(row.value for row in self.rows if row.applies(facts))
