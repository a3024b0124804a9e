"""What is static in one pass of the backward kernel: its tiles, its arrays, how CTAs share the work."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_fa.backends.gpu.backward_plan import BackwardCore, has_per_query_gradients
from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.gradient_pass import ByRole, GradientPass
from pallas_fa.backends.gpu.streamed_visits import StreamedVisits
from pallas_fa.backends.hopper import products
from pallas_fa.backends.hopper.backward.dq import DqSums
from pallas_fa.backends.hopper.backward.order import Order
from pallas_fa.backends.hopper.config import BackwardConfig
from pallas_fa.backends.hopper.tiles import Tiles, in_same_chunks
from pallas_fa.masks.lengths import Lengths, lengths_of, without_lengths
from pallas_fa.problem import Problem

SUM_COLUMNS = 64  # of a tile's gradients of arrays that are staged at once, to be added up
_IN_FIXED_ORDER = GradientPass(("dk", "dv")), GradientPass(("dq",))


def passes(problem: Problem) -> tuple[GradientPass, ...]:
    """Returns the passes over the logits that give all gradients, whatever arrays mask and score have.

    One pass takes five matmuls, but it adds dQ up in no fixed order and can't sum gradients of arrays over keys. Two take
    seven. Three take eight, which is what fits registers at any head dim (evidence: backward/one-fused-kernel).
    """
    if max(problem.H, problem.Hv) > 128:
        return GradientPass(("dv",)), GradientPass(("dk",)), GradientPass(("dq",))
    if has_per_query_gradients(problem) or problem.deterministic_gradients:
        return _IN_FIXED_ORDER
    return (GradientPass(("dk", "dv", "dq")),)


def fewer_passes(problem: Problem) -> tuple[tuple[GradientPass, ...], ...]:
    """Returns passes to try before these past a head dim of 128, the fastest first: some fit registers or memory at times.

    One pass takes five matmuls (evidence: backward/one-pass-at-192), two take six (evidence: backward/two-passes-at-192):
    they add dQ up as the single pass up to 128 does, in no fixed order. Two in a fixed order take seven (evidence:
    backward/by-gradient).
    """
    if max(problem.H, problem.Hv) <= 128:
        return ()
    leaves_registers = problem.H <= 192 and problem.Hv <= 128
    if not leaves_registers or has_per_query_gradients(problem) or problem.deterministic_gradients:
        return (_IN_FIXED_ORDER,)
    return (GradientPass(("dk", "dv", "dq")),), (GradientPass(("dv",)), GradientPass(("dk", "dq"))), _IN_FIXED_ORDER


class Padding(NamedTuple):
    """What the kernel does about positions past a sequence length, where operands may hold NaN.

    `stationary`, `streamed`: zeroes rows of operands of matmuls that sum over their positions, since 0 * NaN is NaN.

    `by_rows`: tests no elements for padding, which takes zeros in whole rows alone. Queries past the length have P = 0 by
    their statistics, once their operands' rows are zeros. Keys past it have rows of their own of the gradients, which are
    zeroed at the end (`gradients`), and of dS, which are zeroed because dQ sums over them (`ds`).
    `behind_mask`: else P and dS are zeroed element by element, in boundary tiles; there may be NaN.
    """

    behind_mask: bool = False
    stationary: bool = False
    streamed: bool = False
    by_rows: bool = False
    gradients: bool = False
    ds: bool = False


@dataclasses.dataclass(frozen=True)
class BackwardPlan(BackwardCore):
    """All that is static in one pass. `shares_draws`: whether threads share calls of the generator (`dropout_shared`)."""

    config: BackwardConfig
    shares_draws: bool = False

    @property
    def turns_arrays(self) -> bool:
        """Yes: by ldmatrix and stmatrix."""
        return True

    @functools.cached_property
    def tiles(self) -> ByRole:
        """How the tiles of the operands lie in shared memory."""
        problem, (T, S) = self.problem, (self.problem.dims.T, self.problem.dims.S)
        shapes = (T, problem.H), (S, problem.H), (S, problem.Hv), (T, problem.Hv)
        dtype, parts = products.operand_dtype(problem), products.parts_of(problem)
        options: dict[str, Any] = dict(parts=parts)
        if self.chunked:
            options |= dict(in_chunks=True, multiple=64 * self.config.compute_wgs)
        q, k, v, d_out = (Tiles(*shape, dtype, problem.layout, self.interpret, **options) for shape in shapes)
        if self.kind.fused and self.config.width != self.config.block:  # the warpgroups share dQ by columns
            q, k = (dataclasses.replace(x, sharers=self.config.compute_wgs) for x in (q, k))
        q, k = in_same_chunks(q, k)  # the factors of a matmul come in the same chunks
        v, d_out = in_same_chunks(v, d_out)
        return self.kind.by_role(q, k, v, d_out)

    @property
    def statistics_last(self) -> bool:
        """Whether accumulators start at 0 and row statistics are added to what the matmuls give: in all passes or in none.

        Passes share the statistics, and the one that streams keys tests elements for padding.
        """
        is_alone = len(self.kind.gives) == 3
        tests_padding = self.padding.behind_mask if is_alone else self.padding != Padding()
        return self.config.statistics_last and not self.chunked and not tests_padding

    @property
    def p_before_dp(self) -> bool:
        """Whether P is rounded before dP is computed, so that logits need not be kept (see `BackwardConfig`).

        Where dS is the rounded P times dP in every element.
        """
        from_p_alone = not (self.scored or self.padding.behind_mask or self.problem.dropout is not None)
        return self.config.p_before_dp and len(self.kind.gives) == 3 and from_p_alone and not self.splits

    @property
    def makes_descriptors_anew(self) -> bool:
        """Whether the descriptors of matmuls on streamed tiles are computed in each step (see `registers.opaque`).

        Only where that is faster (evidence: library/descriptors-of-matmuls).
        """
        problem = self.problem
        is_narrow = max(problem.H, problem.Hv) <= 64 and not self.splits
        return is_narrow and len(self.kind.gives) == 3 and self.config.stages == (2, 2)

    @property
    def by_gradient(self) -> bool:
        """Whether one compute warpgroup adds to dV and the other to dK (see `by_gradient`).

        Where dS is a factor that is known with P, times dP, and nothing else needs dS.
        """
        is_product = self.problem.dropout is None and not self.score_gradients.floats
        applies = self.kind.gives == ("dk", "dv") and not self.padding.behind_mask and not self.splits
        fits = max(self.problem.H, self.problem.Hv) <= 256
        return self.config.by_gradient and applies and is_product and fits

    @property
    def dk_waits_for_logits(self) -> bool:
        """Whether, with `by_gradient`, the matmul for dK waits for the next step's logits.

        Their queries need a slot beside those of this step. Where padding is zeroed, the warpgroups meet before each step.
        """
        return self.by_gradient and self.config.stages[0] > 1 and not self.padding.streamed

    @property
    def ping_pong(self) -> bool:
        """Whether warpgroups issue the matmuls of their logits alternately, in the pass for dQ.

        There they meet only to zero padding, before a turn.
        """
        return self.config.ping_pong and self.config.compute_wgs > 1 and self.kind.gives == ("dq",) and not self.chunked

    @property
    def fits_registers(self) -> bool:
        """Whether a warpgroup has registers for the gradients that the pass accumulates, beside tiles of logits."""
        return (
            self.p_before_dp
            or self.by_gradient
            or len(self.kind.stored) == 1
            or max(self.problem.H, self.problem.Hv) <= 128
        )

    @property
    def scales_ds(self) -> bool:
        """Whether dS may pass the largest number of its dtype, and is scaled (see `float16_range.DsScale`)."""
        return self.problem.dtype == jnp.float16 and self.kind.accumulates_qk

    @property
    def delta_first(self) -> bool:
        """Whether the accumulator of dP starts at -delta."""
        return not self.statistics_last and self.problem.dropout is None

    @property
    def lse_factor(self) -> float:
        """What lse is multiplied by for the kernel (see `probabilities`)."""
        if self.scored:
            return -LOG2E if self.in_base_2 else -1.0
        return -LOG2E if self.statistics_last else -1 / self.problem.scale

    @property
    def in_base_2(self) -> bool:
        """Whether logits become those of base 2 before they are shifted: of bounded scores the product keeps its digits."""
        bound = None if self.problem.score is None else self.problem.score.bound
        return bound is not None and bound <= 100

    @property
    def several_blocks(self) -> bool:
        """Whether a CTA may process several stationary blocks, one after the other."""
        return self.order.persistent

    @property
    def chunked(self) -> bool:
        """Whether one streamed operand passes through a ring of chunks (see `chunks`)."""
        return self.config.chunk_slots > 0

    @property
    def in_ring(self) -> str:
        """Which one that is: it has no part in the gradient."""
        return "pv" if self.kind.accumulates_qk else "qk"

    @property
    def slots(self) -> tuple[int, int]:
        """Slots of the rings of `streamed_qk` and `streamed_pv`."""
        c, ring = self.config, self.in_ring
        qk, pv = (
            c.chunk_slots if self.chunked and ring == name else stages
            for name, stages in zip(("qk", "pv"), c.stages, strict=True)
        )
        return qk, pv

    @property
    def column_parts(self) -> int:
        """Warpgroups that share the columns of a gradient."""
        return 1 if self.by_gradient else self.config.compute_wgs // self.config.row_groups

    @property
    def splits(self) -> bool:
        """Whether operands are split into parts, so that the gradients' tiles differ from those of the operands."""
        return self.tiles.stationary_qk.parts > 1

    def gradient_tiles(self, name: str) -> Tiles:
        """Returns the tiles of the gradient of stationary operand `name`; they take the operand's shared memory."""
        tiles = getattr(self.tiles, name)
        return dataclasses.replace(tiles, dtype=self.problem.dtype, parts=1, column_parts=self.column_parts)

    @functools.cached_property
    def padding(self) -> Padding:
        """What is done about padding."""
        lengths, kind = lengths_of(self.problem.mask), self.kind
        has_q, has_kv = lengths.q_lengths is not None, lengths.kv_lengths is not None
        if not has_q and not has_kv:
            return Padding()
        zeroed = dict(stationary=kind.fused and has_kv, streamed=has_q if kind.keys_stationary else has_kv)
        if not self._has_padding_by_rows:
            return Padding(behind_mask=True, **zeroed)
        ragged = self.stationary % self.config.block > 0
        return Padding(by_rows=True, gradients=has_kv, ds=kind.fused and (has_kv or ragged), **zeroed)

    @property
    def _has_padding_by_rows(self):
        """Whether zeros in whole rows do for padding (see `Padding`).

        Not where a score makes logits of it, where the query heads of a key head differ in their keys, where products read
        operands before their rows are zeroed, and in lists of tiles, which know one mask only.
        """
        mask, key_lengths = self.problem.mask, lengths_of(self.problem.mask).kv_lengths
        listed = mask is not None and mask.has_blocks
        differ = key_lengths is not None and key_lengths.shape[1] > 1 and self.problem.group > 1
        return self.kind.keys_stationary and not (self.scored or differ or self.chunked or listed)

    def tested(self, mask: Any) -> Any:
        return without_lengths(mask) if self.padding.by_rows else mask

    @functools.cached_property
    def visits(self) -> StreamedVisits:
        """Which tiles each CTA visits."""
        c = self.config
        # Zeroing a tile takes all warpgroups. A tile as wide as the block is rarely one warpgroup's alone.
        can_skip = c.width < c.block and not self.padding.streamed
        return StreamedVisits(
            self.problem.mask,
            self.kind,
            self.scored,
            stationary=self.stationary,
            streamed=self.streamed,
            block=c.block,
            tile=c.width,
            warpgroups=c.compute_wgs if can_skip else 1,
            every_tile=self._visits_every_tile,
            padding_by_rows=self.padding.by_rows,
        )

    @property
    def _visits_every_tile(self):
        """Whether a CTA that holds all keys of a head visits all tiles of queries: dQ needs no zeros before.

        Only where few of them are in vain: those of sequences without keys, or a single tile.
        """
        mask, c = self.problem.mask, self.config
        if not self.kind.fused or c.width != c.block or self.stationary > c.block or mask is None or mask.has_blocks:
            return False
        return self.streamed <= c.width or (isinstance(mask, Lengths) and mask.q_lengths is None)

    @property
    def visits_all(self) -> bool:
        """Whether each warpgroup visits every tile, as is known while tracing."""
        if self.problem.mask is not None:
            return self.visits.every_tile
        known = self.visits.known
        return known is not None and (known.first.at(0), known.last.at(0)) == (0, self.visits.tiles)

    @functools.cached_property
    def order(self) -> Order:
        """The order in which CTAs visit heads and tiles."""
        pieces = self.config, self.arrays, self.score_gradients, self.visits
        return Order(self.problem, self.heads, self.kind, *pieces, self.gpu)

    @property
    def array_tiles(self) -> tuple[int, ...]:
        """The numbers of the arrays whose tiles are loaded step by step, into a ring of their own."""
        return self.arrays.of_kind("tile")

    @property
    def array_slots(self) -> int:
        """Slots of that ring. One for biases, beside which memory is short: it is free again before P is computed.

        Evidence: backward/bias-gradient.
        """
        is_byte = all(self.arrays[i].stored_dtype.itemsize == 1 for i in self.array_tiles)
        return 2 if is_byte and not self.chunked else 1

    def added_shape(self, i: int) -> tuple[int, ...]:
        """Returns the shape of the gradient of array i, or of its float32 sums."""
        if not self.order.is_stored(i):
            return super().added_shape(i)
        dims, array = self.problem.dims, self.arrays[i]
        return dims.B, dims.N, dims.T, array.row_bytes // array.stored_dtype.itemsize

    def added_dtype(self, i: int) -> Any:
        """Returns their dtype."""
        return self.arrays[i].stored_dtype if self.order.is_stored(i) else jnp.dtype(jnp.float32)

    def added_place(self, i: int, at: Any, rows: int) -> tuple[Any, ...]:
        """Returns where so many rows of a tile at `at` lie in them: all of its columns, or `SUM_COLUMNS` of a sum."""
        *lead, of_rows, of_columns = super().added_place(i, at, rows)
        if self.order.is_stored(i):
            return *lead, of_columns, of_rows
        return *lead, of_rows, pl.ds(of_columns.start, SUM_COLUMNS)

    def array_gradient(self, i: int, d: Any, x: Any) -> Any:
        """Returns the gradient of array i, which is `x`, from what the kernel gave."""
        return d[..., : x.shape[3]] if self.order.is_stored(i) else super().array_gradient(i, d, x)

    @property
    def array_results(self) -> tuple[int, ...]:
        """The numbers of the arrays whose gradients, or their sums, are results of the kernel: it stores every tile."""
        stored = lambda i: self.order.is_stored(i) and self.visits_all
        return tuple(i for i in self.score_gradients.added if stored(i) or i in self.order.ordered_sums)

    def claims_shape(self, i: int) -> tuple[int, ...]:
        """Returns the shape of the counters of the tiles of the sums of array i (see `first_store`)."""
        return *self.added_shape(i)[:2], self.visits.blocks, self.visits.tiles

    @functools.cached_property
    def dq(self) -> DqSums | None:
        """How dQ is added up; None where it is not."""
        if not self.kind.fused:
            return None
        padded_dim, warps = self.tiles.stationary_qk.padded_dim, self.order.store_warps
        sizes = self.problem.dims, self.problem.layout, padded_dim, self.visits.blocks, self.visits.tiles
        tile = dataclasses.replace(self.tiles.streamed_qk, dtype=self.problem.dtype, parts=1)
        known = self.visits.known
        known_to_cover = known is not None and (known.first.at(0), known.last.at(0)) == (0, self.visits.tiles)
        covers = known_to_cover or self.visits.every_tile
        return DqSums(self.config, *sizes, warps, not self.visits.listed, self.interpret, tile, covers)
