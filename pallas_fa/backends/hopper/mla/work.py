"""Which CTA processes which heads of which query, over which keys."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu.grid import AXIS, quotient_and_remainder
from pallas_fa.backends.hopper.mla.plan import KEYS, MlaPlan


class Work(NamedTuple):
    """The work of one CTA: `ROWS` heads of a query of sequence `b`, over `steps` pairs of key blocks, from right to left.

    `query`: its number among those of all sequences. `entry`: where its result lies. `limit`: keys that it sees.
    `last`: the pair of key blocks of the first step.
    """

    b: Any
    query: Any
    row_block: Any
    entry: Any
    limit: Any
    last: Any
    steps: Any

    @classmethod
    def of_cta(cls, plan: MlaPlan, limits: Any) -> "Work":
        """Returns the work of this CTA; `limits`: a ref of the keys that each query sees, [B * T].

        CTAs of the same keys follow each other, so that the second finds them in the L2 cache.
        """
        entry, row_block = quotient_and_remainder(lax.axis_index(AXIS), plan.row_blocks)
        query, part = quotient_and_remainder(entry, plan.kv_splits)
        limit = limits[query]
        pairs = lax.div(limit + 2 * KEYS - 1, jnp.int32(2 * KEYS))
        first, last = (lax.div(pairs * i, jnp.int32(plan.kv_splits)) for i in (part, part + 1))
        # A part without keys visits a pair past the last, in which nothing is seen.
        is_empty = first == last
        last, steps = jnp.where(is_empty, pairs, last - 1), jnp.where(is_empty, 1, last - first)
        return cls(lax.div(query, jnp.int32(plan.problem.dims.T)), query, row_block, entry, limit, last, steps)

    def key_block(self, i: Any, slot: int) -> Any:
        """Returns the key block that step i has in a slot."""
        return 2 * (self.last - i) + slot
