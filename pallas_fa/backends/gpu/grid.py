"""The CTAs (CUDA thread blocks) of a kernel: how many there are, and which head each works on."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

AXIS = "cta"


class Place(NamedTuple):
    """Where a CTA works: batch entry, head, its number among the CTAs of the head, the number of its head group."""

    b: Any
    head: Any
    cta: Any
    group: Any


@dataclasses.dataclass(frozen=True)
class Grid:
    """CTAs along one grid axis: `ctas_per_head` for each of `heads` heads of each of `batch` entries.

    They run in the order of their numbers. `l2_head_group` heads run concurrently, so that their keys and values stay in
    the L2 cache: first CTA 0 of each of these heads, then CTA 1 of each, and so on; then the next heads.

    `by_head`: the same head of all batch entries comes before the next head; else all heads of a batch entry.
    `lead`: so many CTAs of each head come before the groups: CTA 0 of all heads, then CTA 1 of all, and so on. For those
    that may have far more work than the others: the last group would else end with them.
    """

    batch: int
    heads: int
    ctas_per_head: int
    l2_head_group: int
    by_head: bool = False
    lead: int = 0

    @property
    def ctas(self) -> int:
        """How many CTAs there are."""
        return self.batch * self.heads * self.ctas_per_head

    def place(self, number: Any = None) -> Place:
        """Returns, in a kernel, the place of CTA `number`; None: of this one."""
        number = lax.axis_index(AXIS) if number is None else number
        if not self.lead:
            return self._in_groups(number)
        heads, rest = self.batch * self.heads, self.ctas_per_head - self.lead
        first = Grid(self.batch, self.heads, self.lead, heads)._in_groups(number)
        if not rest:
            return first
        leads = heads * self.lead
        others = Grid(self.batch, self.heads, rest, self.l2_head_group)._in_groups(jnp.maximum(number - leads, 0))
        others = others._replace(cta=others.cta + self.lead)
        return Place(*(jnp.where(number < leads, x, other) for x, other in zip(first, others, strict=True)))

    def of_all(self, of_head: np.ndarray) -> np.ndarray:
        """Returns numbers of all CTAs in the order in which they run, without `lead`, from those of the CTAs of any head."""
        groups = self.batch * self.heads // self.l2_head_group
        return np.tile(np.repeat(of_head, self.l2_head_group), groups)

    def _in_groups(self, number):
        rest, head_in_group = quotient_and_remainder(number, self.l2_head_group)
        group, cta = quotient_and_remainder(rest, self.ctas_per_head)
        index = group * self.l2_head_group + head_in_group
        if self.by_head:
            head, b = quotient_and_remainder(index, self.batch)
        else:
            b, head = quotient_and_remainder(index, self.heads)
        return Place(b, head, cta, group)


def persistent_ctas(grid: Grid, multiprocessors: int, alike: bool = False) -> int:
    """Returns how many CTAs share the places of `grid` where each takes one after the other; 0 where all run at once.

    One for each multiprocessor. Unless places are `alike`, a few less: CTA i takes the places i, i + count, ..., and gets
    those of all parts of a head in turn, which may differ in work, if the count has no divisor in common with their number.
    """
    if grid.ctas <= multiprocessors:
        return 0
    if alike:
        return multiprocessors
    return next(n for n in range(multiprocessors, 0, -1) if math.gcd(n, grid.ctas_per_head) == 1)


def largest_divisor(count: int, at_most: int) -> int:
    """Returns the largest divisor of `count` that is at most `at_most`."""
    return max(d for d in range(1, min(count, at_most) + 1) if count % d == 0)


def nearest_divisor(count: int, to: float) -> int:
    """Returns the divisor of `count` whose quotient with `to` is the nearest to 1, either way."""
    return min(divisors(count), key=lambda d: abs(math.log(d / to)))


def divisors(count: int) -> list[int]:
    """Returns all divisors of `count`, the smallest first."""
    return [d for d in range(1, count + 1) if count % d == 0]


def quotient_and_remainder(x: Any, divisor: int) -> tuple[Any, Any]:
    """Returns both of an int32 x >= 0, in a kernel."""
    return lax.div(x, jnp.int32(divisor)), lax.rem(x, jnp.int32(divisor))
