"""Which tiles of the streamed sequence the CTAs of a backward kernel visit."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.backends.gpu import schedule, visit_lists
from pallas_fa.backends.gpu.gradient_pass import GradientPass
from pallas_fa.backends.gpu.schedule import Visits
from pallas_fa.backends.gpu.visit_lists import VisitList
from pallas_fa.masks.lengths import lengths_of, without_lengths
from pallas_fa.operands import intervals
from pallas_fa.operands.intervals import UNBOUNDED


@dataclasses.dataclass(frozen=True)
class StreamedVisits:
    """The visits of all stationary blocks of a head.

    Args:
      mask: of the problem, without its arrays.
      kind: the pass.
      scored: whether logits pass through a score, which could make NaN of what lies past the end.
      stationary, streamed: lengths of the two sequences.
      block, tile: positions of a stationary block and of a streamed tile.
      warpgroups: how many could have visits of their own, where one can skip what the others visit; 1: none.
      every_tile: blocks that attend to nothing visit all tiles, too, so that all are written.
      padding_by_rows: whether tiles with padding are full tiles, of which the kernel zeroes rows.
    """

    mask: Any
    kind: GradientPass
    scored: bool
    stationary: int
    streamed: int
    block: int
    tile: int
    warpgroups: int
    every_tile: bool = False
    padding_by_rows: bool = False

    @property
    def blocks(self) -> int:
        """Stationary blocks."""
        return -(-self.stationary // self.block)

    @property
    def tiles(self) -> int:
        """Streamed tiles."""
        return -(-self.streamed // self.tile)

    @functools.cached_property
    def known(self) -> Visits | None:
        """The visits of whole blocks as lines, if they are that and known while tracing; else a table is read."""
        return self._lines(self.mask)

    def _lines(self, mask: Any) -> Visits | None:
        is_known = not jax.tree.leaves(mask)
        return schedule.as_lines(self._of_parts(mask, 1), self.blocks) if is_known else None

    @property
    def listed(self) -> bool:
        """Whether CTAs read from lists which tiles they visit, since a block mask leaves gaps."""
        return self.mask is not None and self.mask.has_blocks

    @property
    def parts(self) -> int:
        """Parts of a block with visits of their own: its warpgroups or 1.

        Where visits are known, skipping costs more than it saves (evidence: backward/skip-half-tiles).
        """
        as_one = self.mask is None or self.known is not None or self.listed or self.from_lengths
        return 1 if as_one else self.warpgroups

    @property
    def _whole_only(self):
        """Whether a ragged last block finds no tile full: past the end are no keys."""
        return (self.kind.keys_stationary and not self.padding_by_rows) or self.scored

    @property
    def _full_tail(self):
        """Whether a ragged last tile may be full: the statistics of queries past the end make their probabilities 0."""
        return self.kind.keys_stationary and not self.scored

    def _sides(self, stationary, streamed):
        """(of queries, of keys)"""
        return (streamed, stationary) if self.kind.keys_stationary else (stationary, streamed)

    def _tested(self, mask):
        return without_lengths(mask) if self.padding_by_rows else mask

    @property
    def all_full(self) -> bool:
        """Whether every block visits the first so many tiles, all of them full, up to the length of their sequence."""
        return self._tested(self.mask) is None

    @functools.cached_property
    def _without_padding(self):
        """What the visits would be without sequence lengths, as lines; None where CTAs read a table."""
        return self._lines(self._tested(self.mask)) if self.padding_by_rows else None

    @property
    def from_lengths(self) -> bool:
        """Whether CTAs compute their visits from sequence lengths, the only arrays of the mask, and read no table."""
        return self._without_padding is not None

    @functools.cached_property
    def _boundaries(self):
        """Whether a block may visit boundary tiles before its full tiles, and after them."""
        tested = self._tested(self.mask)
        if jax.tree.leaves(tested):
            return True, True
        found = self._of_parts(tested, self.parts)
        return bool(np.any(found.first != found.full_first)), bool(np.any(found.full_last != found.last))

    def in_tiles(self, mask: Any) -> Any:
        """Returns what a CTA tests of a mask that has lists."""
        return mask.in_tiles(*self._sizes_and_tiles)

    @property
    def _sizes_and_tiles(self):
        return self._sides(self.stationary, self.streamed), self._sides(self.block, self.tile)

    @functools.cached_property
    def _form(self):
        return visit_lists.Form.of(self.mask, *self._sizes_and_tiles, by_keys=self.kind.keys_stationary)

    def _of_parts(self, mask, parts):
        """The visits of each of `parts` parts of all blocks."""
        whole_only = self._whole_only
        everything, streamed = lambda lo, hi: (0, UNBOUNDED), "q_range" if self.kind.keys_stationary else "kv_range"
        ask = getattr(mask, streamed, everything)
        ask_full = getattr(self._tested(mask), f"full_{streamed}", everything)
        size = self.tiles * self.tile if self._full_tail else self.streamed
        part, at_least = self.block // parts, self.tiles if self.every_tile else 0
        sizes = part, self.stationary, size, self.tile
        return schedule.visits_of_blocks(ask, ask_full, *sizes, whole_only, at_least)

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """How many tiles each block visits, sequences at their full length; where that is not known while tracing, all."""
        mask = without_lengths(self.mask)
        if jax.tree.leaves(mask):
            return np.full(self.blocks, self.tiles)
        found = self._of_parts(mask, 1)
        return np.broadcast_to(np.asarray(found.last) - np.asarray(found.first), (1, 1, self.blocks))[0, 0]

    def table(self, mask: Any) -> Any:
        """Returns the visits of all parts, for a mask with its arrays: int32 [B|1, N|1, parts of a head, 4], or lists."""
        if self.listed:
            sizes, tiles = self._sizes_and_tiles
            full_tails = self._sides(not self._whole_only, self._full_tail)
            return visit_lists.table(mask, sizes, tiles, full_tails, by_keys=self.kind.keys_stationary)
        parts = self.parts
        count = -(-self.stationary * parts // self.block)
        found = schedule.table(self._of_parts(mask, parts), count, self.blocks * parts)
        # A part without visits stands where those of its block start, so that the block does not visit more for it.
        of_blocks = found.reshape(*found.shape[:2], self.blocks, parts, 4)
        has_visits = of_blocks[..., :1] < of_blocks[..., 3:]
        starts = jnp.where(has_visits, of_blocks[..., :1], UNBOUNDED)
        start = intervals.minimum(*(starts[:, :, :, i : i + 1] for i in range(parts)))  # in the same kernel on a GPU
        start = jnp.where(start < UNBOUNDED, start, 0)
        return jnp.where(has_visits, of_blocks, start).reshape(found.shape)

    def of_part(self, table_ref: Any, b: Any, n: Any, number: Any, part: Any) -> Visits:
        """Returns, in a kernel, the visits of a part of block `number` at batch entry b and query head n.

        `table_ref`: where `from_lengths`, the function of (b, n) that returns the mask with scalars for its arrays.
        """
        if self.known is not None:
            return Visits(*(line.at(number) for line in self.known))
        if self.listed:  # their numbers in the list
            of_block = self.list_of(table_ref, b, n, number)
            return Visits(0, of_block.boundary, of_block.count, of_block.count)
        if self.from_lengths:
            found = self._within_lengths(table_ref(b, n), number)
        else:
            found = schedule.in_table(table_ref, b, n, number * self.parts + part)
        before, after = self._boundaries
        full_first, full_last = found.full_first if before else found.first, found.full_last if after else found.last
        return found._replace(full_first=full_first, full_last=full_last)

    def _within_lengths(self, mask, number):
        """The visits of block `number`, under a mask with scalars for its arrays."""
        lines = self._without_padding
        assert lines is not None
        found = Visits(*(line.at(number) for line in lines))
        if self.every_tile:
            return found
        start = number * self.block
        _, end = lengths_of(mask).q_range(start, start + self.block)
        last = lax.div(jnp.clip(end, 0, self.streamed) + (self.tile - 1), jnp.int32(self.tile))
        last = jnp.clip(last, found.first, found.last)
        return Visits(found.first, jnp.minimum(found.full_first, last), jnp.minimum(found.full_last, last), last)

    def list_of(self, table_ref: Any, b: Any, n: Any, number: Any) -> VisitList:
        """Returns, in a kernel, the list of block `number` at batch entry b and query head n."""
        return visit_lists.in_table(table_ref, b, n, number, self._form)

    def of_block(self, table_ref: Any, b: Any, n: Any, number: Any) -> tuple[Any, Any]:
        """Returns the tiles [first, last) of a whole block: from the first to the last that any part visits."""
        found, *rest = (self.of_part(table_ref, b, n, number, part) for part in range(self.parts))
        first, last = found.first, found.last
        for other in rest:
            first, last = intervals.minimum(first, other.first), intervals.maximum(last, other.last)
        return first, last
