"""The mainloop of a kernel that holds a query block: steps over key blocks, from right to left."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu.schedule import Visits, is_equal
from pallas_fa.backends.gpu.visit_lists import VisitList
from pallas_fa.operands import intervals


class Steps(NamedTuple):
    """Step i visits key block `last - i`, for first <= i < end; or the i-th of a list.

    Blocks before step `boundary_end` and from step `full_end` on are boundary blocks; those between are full. What is
    known while tracing: 0 for `boundary_end` says that there are none at the start, None for `full_end` none at the end.
    """

    last: Any
    first: Any
    boundary_end: Any
    full_end: Any
    end: Any
    listed: VisitList | None = None

    @classmethod
    def of(cls, visits: Visits) -> "Steps":
        """Returns the steps that make these visits."""
        # Where there may be a boundary block at the start, the first step masks: it is compiled once, with the mask.
        boundary_end = 0
        if not is_equal(visits.full_last, visits.last):
            boundary_end = intervals.maximum(visits.last - visits.full_last, 1)
        full_end = None
        if not is_equal(visits.full_first, visits.first):
            full_end = intervals.maximum(visits.last - visits.full_first, boundary_end)
        return cls(visits.last - 1, 0, boundary_end, full_end, visits.last - visits.first)

    @classmethod
    def of_list(cls, listed: VisitList) -> "Steps":
        """Returns the steps that visit what is listed; at least one."""
        boundary_end = jnp.maximum(listed.boundary, 1)
        return cls(listed.tile(0), 0, boundary_end, None, jnp.maximum(listed.count, 1), listed)

    def key_block(self, i: Any) -> Any:
        """Returns the key block that step i visits."""
        return self.last - i if self.listed is None else self.listed.tile(i)

    def loop(self, step: Callable[..., Any], carry: Any) -> Any:
        """Returns the carry after step(i, carry, is_boundary=...) -> carry of each step, in a kernel."""
        boundary_step, full_step = (functools.partial(step, is_boundary=flag) for flag in (True, False))
        if not self.starts_full:
            carry = lax.fori_loop(0, self.boundary_end, boundary_step, carry)
        carry = lax.fori_loop(self.boundary_end, self.end if self.full_end is None else self.full_end, full_step, carry)
        if self.full_end is not None:
            carry = lax.fori_loop(self.full_end, self.end, boundary_step, carry)
        return carry

    @property
    def starts_full(self) -> bool:
        """Whether the first step is known to visit a full block."""
        return is_equal(self.boundary_end, 0)

    def is_boundary(self, i: Any) -> Any:
        """Returns whether step i visits a boundary block."""
        at_start = i < self.boundary_end
        return at_start if self.full_end is None else at_start | (i >= self.full_end)

    def boundary_steps_before(self, i: Any) -> Any:
        """Returns how many of the steps before step i visit boundary blocks."""
        full_end = self.end if self.full_end is None else self.full_end
        return i - jnp.clip(i - self.boundary_end, 0, full_end - self.boundary_end)

    def of_part(self, visits: Visits) -> "Steps":
        """Returns those of these steps in which some of the queries make these visits; at least one step."""
        part = Steps.of(visits)
        shift = self.last - part.last  # step i of the part is step shift + i here
        first = jnp.clip(shift, 0, self.end - 1)
        end = jnp.clip(shift + part.end, first + 1, self.end)
        boundary_end = 0 if part.starts_full else jnp.maximum(shift + part.boundary_end, first + 1)
        full_end = None if part.full_end is None else shift + part.full_end
        return Steps(self.last, first, boundary_end, full_end, end)
