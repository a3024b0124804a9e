"""Which tiles of the streamed sequence the CTAs of a backward kernel visit."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.backends.gpu import schedule, visit_lists
from pallas_fa.backends.gpu.backward_pass import Pass
from pallas_fa.backends.gpu.schedule import Visits
from pallas_fa.backends.gpu.visit_lists import VisitList
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
    """

    mask: Any
    kind: Pass
    scored: bool
    stationary: int
    streamed: int
    block: int
    tile: int
    warpgroups: int
    every_tile: bool = False

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
        is_known = not jax.tree.leaves(self.mask)
        return schedule.as_lines(self._of_parts(self.mask, 1), self.blocks) if is_known else None

    @property
    def listed(self) -> bool:
        """Whether CTAs read from lists which tiles they visit, since a block mask leaves gaps."""
        return self.mask is not None and self.mask.has_blocks

    @property
    def parts(self) -> int:
        """Parts of a block with visits of their own: its warpgroups or 1.

        Where visits are known, skipping costs more than it saves (evidence: backward/skip-half-tiles).
        """
        return self.warpgroups if self.mask is not None and self.known is None and not self.listed else 1

    @property
    def _whole_only(self):
        """Whether a ragged last block finds no tile full: past the end are no keys."""
        return self.kind.keys_stationary or self.scored

    @property
    def _full_tail(self):
        """Whether a ragged last tile may be full: the statistics of queries past the end make their probabilities 0."""
        return self.kind.keys_stationary and not self.scored

    def _sides(self, stationary, streamed):
        """(of queries, of keys)"""
        return (streamed, stationary) if self.kind.keys_stationary else (stationary, streamed)

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
        by_keys, whole_only = self.kind.keys_stationary, self._whole_only
        if mask is None:
            ask = ask_full = lambda lo, hi: (0, UNBOUNDED)
        else:
            ask, ask_full = (mask.q_range, mask.full_q_range) if by_keys else (mask.kv_range, mask.full_kv_range)
        size = self.tiles * self.tile if self._full_tail else self.streamed
        part, at_least = self.block // parts, self.tiles if self.every_tile else 0
        sizes = part, self.stationary, size, self.tile
        return schedule.visits_of_blocks(ask, ask_full, *sizes, whole_only, at_least)

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
        """Returns, in a kernel, the visits of a part of block `number` at batch entry b and query head n."""
        if self.known is not None:
            return Visits(*(line.at(number) for line in self.known))
        if self.listed:  # their numbers in the list
            of_block = self.list_of(table_ref, b, n, number)
            return Visits(0, of_block.boundary, of_block.count, of_block.count)
        return schedule.in_table(table_ref, b, n, number * self.parts + part)

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
