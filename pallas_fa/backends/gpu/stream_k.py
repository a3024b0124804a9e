"""Stream-K: all visits of all units of work as one flat list, which CTAs share evenly (Osama et al., arXiv 2301.03598).

A unit is a query block of one head. The share of a CTA starts and ends anywhere in the list, so that it may have the end of
one unit, whole units and the start of another. A unit that several CTAs share has a partial result from each; they lie
where `Segment.entry` says, and `contributions` says where those of a unit lie.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.backends.gpu.grid import AXIS, quotient_and_remainder

_FEW = 1024  # up to so many units, comparing all with all is one GPU kernel, where a cumulative sum is several


class Segment(NamedTuple):
    """What one CTA does of one unit: visits [first, last) of those of the unit.

    `order`: its number among the segments of the CTA. `entry`: where its result lies.
    """

    unit: Any
    order: Any
    first: Any
    last: Any
    entry: Any


@dataclasses.dataclass(frozen=True)
class StreamK:
    """The flat list of `units` units, shared by `ctas` CTAs.

    `visits`: of each unit, where all units have the same number, known while tracing; else None, and CTAs read where their
    shares start from what `table` returns.
    """

    ctas: int
    units: int
    visits: int | None

    @property
    def entries(self) -> int:
        """Results in memory: one for each whole unit, and two partial results for each CTA."""
        return self.units + 2 * self.ctas

    def for_segments(self, table: Any, visits_of: Callable[[Any], Any], role: Callable[..., Any]) -> tuple[Any, Any]:
        """Calls role(segment, *sums) -> two counts for each segment of this CTA, and returns the sums of both.

        Args:
          table: a ref of the table, if there is one.
          visits_of: visits_of(unit) -> how many visits it has.
          role: `sums` are of the counts of the segments before.
        """
        cta = lax.axis_index(AXIS)
        (unit, offset), (last_unit, last_offset) = self._share(table)

        def one(i, sums):
            count = visits_of(unit + i)
            first = jnp.where(i == 0, offset, 0)
            last = jnp.where(unit + i == last_unit, last_offset, count)
            is_whole = (first == 0) & (last == count)
            entry = jnp.where(is_whole, unit + i, self.units + 2 * cta + jnp.where(first == 0, 1, 0))
            counts = role(Segment(unit + i, i, first, last, entry), *sums)
            return tuple(a + b for a, b in zip(sums, counts, strict=True))

        return lax.fori_loop(0, self.segments(table), one, (jnp.int32(0), jnp.int32(0)))

    def segments(self, table: Any) -> Any:
        """Returns how many segments this CTA has; none, if there are more CTAs than visits."""
        (unit, offset), (last_unit, last_offset) = self._share(table)
        is_empty = (unit == last_unit) & (offset == last_offset)
        return jnp.where(is_empty, 0, last_unit - unit + jnp.where(last_offset > 0, 1, 0))

    def _share(self, table):
        """Where the share of this CTA starts, and where it ends."""
        cta = lax.axis_index(AXIS)
        return self._start(table, cta), self._start(table, cta + 1)

    def _start(self, table, cta):
        """Where the share of a CTA starts: (unit, number of the visit in the unit)."""
        if self.visits is None:
            return table[cta, 0], table[cta, 1]
        return quotient_and_remainder(_share_start(self.units * self.visits, self.ctas, cta), self.visits)

    def most_results(self, most_visits: int, alike: int) -> int:
        """Returns how many results a unit has at most, if it has up to `most_visits`, and so do `alike` units at least."""
        visits = np.arange(1, most_visits + 1)
        share = (alike * visits + self.units - alike) // self.ctas
        return int(np.minimum(visits, -(-(visits - 1) // np.maximum(share, 1)) + 1).max())

    def table(self, counts: Any) -> Any:
        """Returns where each share starts, and the last one ends, int32 [ctas + 1, 2]: unit, and visit in the unit.

        `counts`: visits of each unit, [units], at least one each; a NumPy array where they are known while tracing, and then
        the result is one too.
        """
        number = np.arange(self.units)
        if isinstance(counts, np.ndarray):
            xp, ends = np, np.cumsum(counts)
        elif self.units <= _FEW:
            xp, ends = jnp, jnp.where(number[:, None] >= number, counts, 0).sum(axis=1, dtype=jnp.int32)
        else:
            xp, ends = jnp, jnp.cumsum(counts, dtype=jnp.int32)
        starts = _share_start(ends[-1], self.ctas, np.arange(self.ctas + 1, dtype=np.int32), xp)
        before = ends <= starts[:, None]
        return xp.stack([before.sum(axis=1), starts - xp.where(before, ends, 0).max(axis=1)], axis=1).astype(np.int32)

    def contributions(self, table: Any, most: int) -> tuple[Any, Any]:
        """Returns (entry, whether it is another result) of all results of each unit, both [units, results].

        `table`: what `table` returns. `most`: of the results that one unit may have, if the table is not known.
        """
        xp = np if isinstance(table, np.ndarray) else jnp
        unit, visit = table[:-1, 0], table[:-1, 1]
        number = np.arange(self.units)[:, None]
        first = ((unit < number) | ((unit == number) & (visit == 0))).sum(axis=1, keepdims=True) - 1
        last = (unit <= number).sum(axis=1, keepdims=True) - 1
        part = np.arange(int((last - first).max()) + 1 if xp is np else most)
        shared = self.units + 2 * xp.minimum(first + part, last) + xp.where(part == 0, 1, 0)
        return xp.where(first == last, number, shared), first + part <= last


def _share_start(total, ctas, cta, xp=jnp):
    """Where the share of CTA `cta` starts: the first shares are one longer if the total is not a multiple."""
    return cta * (total // ctas) + xp.minimum(cta, total % ctas)
