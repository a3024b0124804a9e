"""How the CTAs of one head share its query blocks."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_fa.backends.gpu.grid import quotient_and_remainder


@dataclasses.dataclass(frozen=True)
class QueryBlocks:
    """The query blocks of one head.

    Args:
      length: queries.
      size: queries of a block.
      pairs: how many pairs of blocks one CTA processes, one after the other; 0: a single block. A pair is one block from
        the end and one from the start: under a causal mask all pairs are equal work.
      front_padding: rows that the first block lacks, as blocks are counted from the end of the sequence.
      last_first: single blocks from the end of the sequence come first. Under most masks later queries see more keys, and
        the longest blocks are to start first.
    """

    length: int
    size: int
    pairs: int
    front_padding: int
    last_first: bool

    @property
    def count(self) -> int:
        """Blocks of the head."""
        return -(-self.length // self.size)

    @property
    def ctas(self) -> int:
        """CTAs that share the blocks."""
        return -(-self.count // max(1, 2 * self.pairs))

    def start(self, number: Any) -> Any:
        """Returns the first query of a block; negative where the block has front padding."""
        return number * self.size - self.front_padding

    def present(self, row: Any) -> Any:
        """Returns `row`, or the first query for a row of front padding."""
        return jnp.maximum(row, 0) if self.front_padding else row

    def for_each(self, cta: Any, body: Callable[..., tuple[Any, Any]], start: tuple[Any, Any]) -> tuple[Any, Any]:
        """Calls body(number of the block, *sums) -> two counts for each block of this CTA, and returns the sums of both.

        `sums`: of the counts of the blocks before, from `start` on.
        """
        last = self.count - 1
        if not self.pairs:
            counts = body(last - cta if self.last_first else cta, *start)
            return tuple(b if isinstance(a, int) else a + b for a, b in zip(start, counts, strict=True))

        def following(i, sums):
            pair, is_second = quotient_and_remainder(i, 2)
            pair = cta + pair * self.ctas
            counts = body(jnp.where(is_second == 0, last - pair, pair), *sums)
            return tuple(a + b for a, b in zip(sums, counts, strict=True))

        pairs = -(-self.count // 2)
        blocks = 2 * lax.div(pairs - cta + self.ctas - 1, jnp.int32(self.ctas))
        if self.count % 2:  # the block in the middle is a pair of its own, the last
            blocks -= jnp.where(cta == (pairs - 1) % self.ctas, 1, 0)
        return lax.fori_loop(0, blocks, following, tuple(map(jnp.int32, start)))
