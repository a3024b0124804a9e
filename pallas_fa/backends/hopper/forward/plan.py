"""What is static in one forward kernel: its tiles, its arrays, how CTAs share the work."""

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_fa.backends.gpu.dropout_numbers import FACTORS
from pallas_fa.backends.gpu.forward_plan import ForwardCore, OperandTiles
from pallas_fa.backends.gpu.grid import Grid, largest_divisor
from pallas_fa.backends.gpu.online_softmax import LAG
from pallas_fa.backends.gpu.query_blocks import QueryBlocks
from pallas_fa.backends.gpu.support import LARGEST_HEAD_DIM
from pallas_fa.backends.hopper import pages, products
from pallas_fa.backends.hopper.config import ForwardConfig
from pallas_fa.backends.hopper.forward import windows
from pallas_fa.backends.hopper.tiles import Tiles, in_same_chunks
from pallas_fa.operands.layout import Layout

_REGISTERS_TO_CONVERT = {1: (240, 56), 2: (224, 56)}  # of ForwardPlan.registers, by compute warpgroups


class ValueRows(NamedTuple):
    """A part of the rows of a tile of values: the name of its memory, its first row, how many rows, how they lie there."""

    name: str
    first: int
    count: int
    tiles: Tiles


@dataclasses.dataclass(frozen=True)
class ForwardPlan(ForwardCore):
    """All that is static in one kernel."""

    config: ForwardConfig
    rows_first: bool = False  # queries and output are in the layout "BNTH", whatever the problem's is
    group: int = 1  # query heads that are rows of one tile: `problem` is that of rows, which are gathered by TMA

    @property
    def query_layout(self) -> Layout:
        """The layout of queries and output."""
        return "BNTH" if self.rows_first else self.problem.layout

    @property
    def wide(self) -> bool:
        """Whether a tile of each operand is more than shared memory and registers hold (evidence: forward/wide-heads)."""
        return max(self.problem.H, self.problem.Hv) > LARGEST_HEAD_DIM

    @property
    def column_parts(self) -> int:
        """CTAs that share the columns of the output of a query block; each computes all of its logits."""
        return -(-self.problem.Hv // LARGEST_HEAD_DIM)

    @property
    def k_pieces(self) -> int:
        """Pieces of a tile of keys that are loaded, used and released one by one: its chunks, or all of it."""
        return self.tiles.k.chunks if self.wide else 1

    @functools.cached_property
    def tiles(self) -> OperandTiles[Tiles]:
        """The tiles of the operands."""
        problem, (T, S) = self.problem, (self.problem.dims.T, self.problem.dims.S)
        shapes = (T, problem.H), (S, problem.H), (S, problem.Hv), (T, problem.Hv)
        layouts = self.query_layout, problem.layout, problem.layout, self.query_layout
        parts, dtype = products.parts_of(problem), products.operand_dtype(problem)
        q, k, v, out = (
            Tiles(*shape, dtype, layout, self.interpret, in_chunks=self.wide, parts=parts)
            for shape, layout in zip(shapes, layouts, strict=True)
        )
        out = dataclasses.replace(out, dtype=problem.dtype, parts=1)
        column_parts = dict(column_parts=self.column_parts, multiple=64 * self.column_parts)
        v, out = (dataclasses.replace(x, **column_parts) for x in (v, out))
        if self.group > 1:
            q, out = (dataclasses.replace(x, group=self.group, in_chunks=True) for x in (q, out))
        q, k = in_same_chunks(q, k)  # the factors of q k^T meet chunk by chunk,
        v = v.summed_over(self.config.block_kv)
        if self.all_in_parts:  # partial results are float32
            out = dataclasses.replace(out, dtype=np.dtype(np.float32), in_chunks=True)
        if self.out_in_turns:
            out = dataclasses.replace(out, in_chunks=True)
        if self.all_in_parts or self.group > 1 or self.out_in_turns:
            v = dataclasses.replace(v, in_chunks=v.chunk % out.chunk > 0)
        else:
            v, out = in_same_chunks(v, out)  # and the chunks of p v are those of v
        if v.chunk % out.chunk:  # each is stored as whole chunks of the output
            out = dataclasses.replace(out, swizzle_bytes=v.swizzle_bytes)
        return OperandTiles(q, k, v, out)

    @functools.cached_property
    def narrow_tiles(self) -> dict[str, Tiles]:
        """The tiles of keys ("k") and values ("v") of 8 bits, from which those of `tiles` are made; none of 16 bits."""
        problem = self.problem
        if not problem.has_narrow_keys:
            return {}
        of = lambda dim: Tiles(problem.dims.S, dim, problem.kv_dtype, problem.layout, self.interpret)
        return {"k": of(problem.H), "v": of(problem.Hv)}

    @property
    def k_arrivals(self) -> int:
        """How often a tile of keys, or a piece of it, is announced."""
        return 1 if self.narrow_tiles else self.tiles.k.copies // self.k_pieces * self.boxes

    @property
    def v_arrivals(self) -> int:
        """How often a tile of values is announced."""
        return 1 if self.narrow_tiles else sum(part.tiles.copies for part in self.value_rows) * self.boxes

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of a compute and of the load warpgroup, which needs more to convert."""
        return _REGISTERS_TO_CONVERT[self.config.compute_wgs] if self.narrow_tiles else self.config.registers

    @functools.cached_property
    def value_rows(self) -> tuple[ValueRows, ...]:
        """The parts of a tile of values.

        Rows past a multiple of 64 have a narrower swizzle. They lie apart, so that TMA and tensor cores read the others in
        full width; but not where chunks would have two widths, or where rows are read in 64s to zero padding.
        """
        rows, v = self.config.block_kv, self.tiles.v
        rest = rows % 64
        if not rest or not v.whole or self.zeroes_padding or self.problem.pages:
            return (ValueRows("v", 0, rows, v),)
        parts = ("v", 0, rows - rest), ("v_rest", rows - rest, rest)
        return tuple(ValueRows(name, first, count, v.summed_over(count)) for name, first, count in parts)

    @functools.cached_property
    def blocks(self) -> QueryBlocks:
        """The query blocks of one head, and how CTAs share them."""
        c, T = self.config, self.problem.dims.T
        is_masked = self.problem.mask is not None
        # Under most masks the first queries see the fewest keys, so rows that a block lacks cost least there.
        # Evidence: forward/front-padding-rows.
        rows = -(-T // 64) * 64  # of whole warpgroups
        front_padding = -rows % c.block_q if is_masked and self.skips_steps else 0
        return QueryBlocks(T, c.block_q, c.q_block_pairs if T > c.block_q else 0, front_padding, last_first=is_masked)

    @property
    def all_in_parts(self) -> bool:
        """Whether the results are partial ones of all heads, as with few queries."""
        return self.config.kv_splits > 1 and not self.split_heads

    @property
    def split_heads(self) -> int:
        """The last heads, of all batch entries counted together, whose keys are in parts (see `ForwardConfig`).

        A device's share of a call may have fewer heads than the call for which the tiles were named: then all heads of as
        many entries.
        """
        N = self.problem.dims.N
        count = min(self.config.split_heads, self.problem.dims.B * N)
        return count if count <= N else count - count % N

    @property
    def whole_heads(self) -> int:
        """Heads, of all batch entries counted together, before those whose keys are in parts (`split_heads`)."""
        return self.problem.dims.B * self.problem.dims.N - self.split_heads

    @functools.cached_property
    def grid(self) -> Grid:
        """The CTAs of the kernel, or of `whole_heads`, which come first."""
        dims, ctas = self.problem.dims, self.blocks.ctas * self.column_parts
        if self.split_heads:
            return Grid(1, self.whole_heads, ctas, self._concurrent(self.whole_heads))
        return Grid(dims.B, dims.N, ctas * self.config.kv_splits, self._concurrent(dims.B * dims.N))

    @functools.cached_property
    def grid_of_parts(self) -> Grid:
        """The CTAs of the heads whose keys are in parts."""
        heads, ctas = self.split_heads, self.blocks.ctas * self.column_parts * self.config.kv_splits
        return Grid(1, heads, ctas, self._concurrent(heads))

    def _concurrent(self, heads):
        is_alike = self.blocks.pairs > 0 or not self.config.persistent_ctas or self.by_tickets
        is_grouped = self.problem.mask is not None and is_alike
        return largest_divisor(heads, self.config.l2_head_group) if is_grouped and heads else 1

    @property
    def places(self) -> int:
        """CTAs of the kernel, if each took one place."""
        return self.grid.ctas + (self.grid_of_parts.ctas if self.split_heads else 0)

    @property
    def ctas(self) -> int:
        """CTAs of the kernel."""
        return min(self.places, self.config.persistent_ctas or self.places)

    @property
    def by_tickets(self) -> bool:
        """Whether each CTA takes the first block that none has begun (see `tickets`); else blocks are dealt out in turn."""
        return self.config.by_tickets and self.config.persistent_ctas > 0

    @property
    def several_blocks(self) -> bool:
        """Whether a CTA may process several query blocks, one after the other."""
        return self.blocks.pairs > 0 or self.config.persistent_ctas > 0

    @property
    def boxes(self) -> int:
        """Of how many boxes TMA makes a tile of keys or values: several where it has several pages."""
        return pages.boxes(self.problem.pages, self.config.block_kv)

    @property
    def has_padding_keys(self) -> bool:
        """Whether a step may see keys past the end of the sequence."""
        if self.group > 1:  # key blocks end anywhere
            dims, mask = self.problem.dims, self.problem.mask
            return mask is None or mask.kv_range(dims.T - 1, dims.T)[1] > dims.S
        all_have_keys = self.problem.mask is None and self.config.kv_splits <= self.kv_blocks  # all parts
        return super().has_padding_keys or (self.config.kv_splits > 1 and not all_have_keys)

    @functools.cached_property
    def single_step(self) -> bool:
        """Whether a query block visits one key block, whatever it sees."""
        return self.group > 1 and windows.most_keys(self.problem, self.config.block_q) <= self.config.block_kv

    @property
    def rescales_under_qk(self) -> bool:
        """Whether the sums of P V are rescaled under the next Q K^T."""
        return self.config.rescale_under_qk and self.subtract_max

    @property
    def hides_count_of_steps(self) -> bool:
        """Whether compilers may not know how many steps a query block has, where it is known while tracing.

        Else ptxas counts them in vector registers, with the addresses of tiles, and spills (evidence:
        forward/persistent-ctas).
        """
        c, problem = self.config, self.problem
        is_single = c.persistent_ctas > 0 and not self.blocks.pairs and self.kv_blocks > 4
        return is_single and c.compute_wgs == 2 and 64 < problem.H <= 128 and 64 < problem.Hv <= 128

    @property
    def lag(self) -> float:
        """By how much a row's maximum may lag behind, in base 2 (evidence: forward/lagging-maximum)."""
        return LAG[self.problem.dtype.name]

    @property
    def maxima_by_sums(self) -> bool:
        """Whether row sums say where a maximum must be raised, and not the largest logits, where no mask hides logits.

        Not with a score, by which maxima may have to be raised in every step. Only where it is faster
        (evidence: forward/maxima-by-sums).
        """
        problem, c = self.problem, self.config
        is_plain = self.subtract_max and problem.score is None and products.parts_of(problem) == 1
        has_tiles = (c.compute_wgs, c.block_kv) == (2, 128) and 96 < problem.H <= 128 and 96 < problem.Hv <= 128
        is_long = problem.mask is None or problem.dims.S > (512 if c.persistent_ctas else 1024)
        return is_plain and has_tiles and is_long

    @property
    def probability_dtype(self) -> np.dtype:
        """The dtype of the probabilities that a step hands to the next one, which rounds them if these are float32.

        Those that dropout selects from are rounded at once: its random words need the registers.
        """
        packs = self.maxima_by_sums and self.problem.dropout is not None
        return self.problem.dtype if packs else np.dtype(np.float32)

    @property
    def pins_maximum(self) -> bool:
        """Whether each step stores the maximum, to keep it before the wait for P V; else the row sums."""
        return self.config.pin_softmax and self.rescales_under_qk

    @property
    def starts_at_sink(self) -> bool:
        """Whether the online softmax starts with the sink as the first logit of each row; else it is added at the end.

        Only where probabilities have the exponents of float32: next to a large sink, they are all small
        (evidence: forward/sinks).
        """
        has_range = products.operand_dtype(self.problem) == jnp.bfloat16
        return self.problem.sinks is not None and self.subtract_max and has_range

    @property
    def dropout_scale(self) -> float:
        """What the sums of P V are multiplied by at the end; it takes back the `FACTORS` of probabilities that are kept."""
        factor = 1.0 if self.problem.dropout is None else FACTORS[products.operand_dtype(self.problem).name]
        return super().dropout_scale / factor

    @property
    def ping_pong(self) -> bool:
        """Whether a warpgroup issues its matmuls after those of the one before: one's softmax overlaps the other's."""
        return self.config.ping_pong and self.config.compute_wgs > 1

    @property
    def skips_steps(self) -> bool:
        """Whether a warpgroup skips steps in which only other queries of its block see keys.

        Only where a warpgroup sees fewer key blocks than the CTA: query blocks longer than these, or past the end
        (evidence: forward/skip-half-tiles).
        """
        c = self.config
        shorter = self.problem.mask is not None and c.block_q > c.block_kv
        past_the_end = 0 < self.problem.dims.T % c.block_q <= c.block_q - 64
        return self.group == 1 and not self.visit_table and c.compute_wgs > 1 and (shorter or past_the_end)

    @property
    def makes_descriptors_anew(self) -> bool:
        """Whether the descriptors of matmuls on queries and keys are computed in each step (see `registers.opaque`).

        Elsewhere it is no faster (evidence: library/descriptors-of-matmuls).
        """
        return self.wide or self.out_in_turns

    @property
    def out_in_turns(self) -> bool:
        """Whether the chunks of the output are stored in turns: shared memory has room for some of them."""
        return self.several_blocks and self.config.out_chunks > 0

    @property
    def out_slots(self) -> int:
        """Chunks of the output that have shared memory at a time."""
        chunks = self.tiles.out.copies
        return min(self.config.out_chunks, chunks) if self.out_in_turns else chunks

    @property
    def separate_out(self) -> bool:
        """Whether the output has shared memory of its own, or takes that of the queries."""
        q, out = self.tiles.q, self.tiles.out
        if self.wide:  # chunks are alike, and there may be more of those of queries than needed
            return self.several_blocks or (out.chunk, out.dtype) != (q.chunk, q.dtype) or out.copies > q.copies
        return self.several_blocks or out != q

    @property
    def out_over_q(self) -> bool:
        """Whether the output, whose tiles differ from those of the queries, takes their shared memory all the same."""
        fits = self.tiles.q.rows_of(self.tiles.out, 64) is not None
        return self.separate_out and not self.several_blocks and fits and not self.interpret
