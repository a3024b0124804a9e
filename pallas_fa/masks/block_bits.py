"""`BlockBits`: whole blocks, as a kernel tests them in tiles that are not these blocks."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_fa.masks.base import Mask


@dataclasses.dataclass(frozen=True)
class BlockBits(Mask):
    """Allows what the blocks of a `BlockMask` allow.

    A kernel can't look blocks up by position, so each tile has a word with a bit for each block that it touches.
    Block (i, j) has bit i % counts[0] * counts[1] + j % counts[1] in the word of each tile that touches it.

    Attributes:
      words: int32 [B|1, N|1, 1, 1, q tiles, kv tiles], of which a kernel gets the one of its tile.
      block: (q, kv), the positions of a block.
      counts: of the blocks along queries and along keys, how many a tile may touch.
      t0: the first query, counted from the start of the blocks; an int or int32 [1, 1, 1, 1].
      s0: the first key, likewise.
    """

    words: Any
    block: tuple[int, int]
    counts: tuple[int, int]
    t0: Any
    s0: Any

    @property
    def fits(self) -> bool:
        """Whether a word has bits for all blocks of a tile."""
        return self.counts[0] * self.counts[1] <= 32

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        positions = zip((t + self.t0, s + self.s0), self.block, self.counts, strict=True)
        i, j = (lax.rem(lax.div(x, jnp.full_like(x, block)), jnp.full_like(x, count)) for x, block, count in positions)
        return (self.words >> (i * self.counts[1] + j)) & 1 != 0
