"""What is static in one pass of the backward kernel: its tiles, its arrays, how CTAs share the work."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.backward_pass import Pass
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.score_gradients import ScoreGradients
from pallas_fa.backends.gpu.skewed import ROWS
from pallas_fa.backends.gpu.streamed_visits import StreamedVisits
from pallas_fa.backends.hopper import products
from pallas_fa.backends.hopper.backward.dq import DqSums
from pallas_fa.backends.hopper.backward.order import Order
from pallas_fa.backends.hopper.config import BackwardConfig
from pallas_fa.backends.hopper.tiles import Tiles, in_same_chunks
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.operands import diagonals
from pallas_fa.problem import Problem


def passes(problem: Problem) -> tuple[Pass, ...]:
    """Returns the passes over the logits that give all gradients.

    One pass takes five matmuls, but it adds dQ up in no fixed order and can't sum gradients of arrays over keys. Two take
    seven. Three take eight, which is what fits registers at head dims past 128 (evidence: backward/one-fused-kernel).
    """
    if max(problem.H, problem.Hv) > 128:
        return Pass(("dv",)), Pass(("dk",)), Pass(("dq",))
    leaves = jax.tree.leaves(problem.score)
    is_per_query = lambda x: not diagonals.spans(x) and x.shape[2] > 1 and x.shape[3] == 1
    per_query = any(is_per_query(x) and jnp.issubdtype(x.dtype, jnp.floating) for x in leaves)
    if per_query or problem.deterministic_gradients:
        return Pass(("dk", "dv")), Pass(("dq",))
    return (Pass(("dk", "dv", "dq")),)


class OperandTiles(NamedTuple):
    """How the tiles of each operand lie in shared memory, by role (see `Pass`)."""

    stationary_qk: Tiles
    stationary_pv: Tiles
    streamed_qk: Tiles
    streamed_pv: Tiles


class Padding(NamedTuple):
    """Where there may be NaN past a sequence length.

    `behind_mask`: behind the mask. `stationary`, `streamed`: in operands of matmuls that sum over their positions, whose
    rows past the length must be zeroed, since 0 * NaN is NaN.
    """

    behind_mask: bool
    stationary: bool
    streamed: bool


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """All that is static in one pass."""

    problem: Problem
    kind: Pass
    config: BackwardConfig
    gpu: Gpu
    interpret: bool = False

    @functools.cached_property
    def tiles(self) -> OperandTiles:
        """The tiles of the operands."""
        problem, (T, S) = self.problem, (self.problem.dims.T, self.problem.dims.S)
        shapes = (T, problem.H), (S, problem.H), (S, problem.Hv), (T, problem.Hv)
        dtype, parts = products.operand_dtype(problem), products.parts_of(problem)
        q, k, v, d_out = (Tiles(*shape, dtype, problem.layout, self.interpret, parts=parts) for shape in shapes)
        q, k = in_same_chunks(q, k)  # the factors of a matmul come in the same chunks
        v, d_out = in_same_chunks(v, d_out)
        return OperandTiles(k, v, q, d_out) if self.kind.keys_stationary else OperandTiles(q, d_out, k, v)

    @property
    def splits(self) -> bool:
        """Whether operands are split into parts, so that the gradients' tiles differ from those of the operands."""
        return self.tiles.stationary_qk.parts > 1

    def gradient_tiles(self, name: str) -> Tiles:
        """Returns the tiles of the gradient of stationary operand `name`; they take the operand's shared memory."""
        return dataclasses.replace(getattr(self.tiles, name), dtype=self.problem.dtype, parts=1)

    @functools.cached_property
    def arrays(self) -> KernelArrays:
        """The arrays of score and mask; rows have one value per streamed position, columns one per stationary position."""
        problem, mask = self.problem, self.problem.mask
        mask = jax.eval_shape(self.visits.in_tiles, mask) if self.visits.listed else mask
        return KernelArrays.of(problem.score, mask, problem.dims, transposed=self.kind.keys_stationary)

    @functools.cached_property
    def score_gradients(self) -> ScoreGradients:
        """The arrays whose gradients this pass gives."""
        return ScoreGradients.of(self.problem.score, self.arrays, self.kind)

    @property
    def scored(self) -> bool:
        """Whether logits are scaled and scored in registers, and not by where their accumulator starts."""
        return self.problem.score is not None or self.problem.scale <= 0

    @property
    def dropout_scale(self) -> float | None:
        """What gradients are multiplied by at their ends, where there is dropout."""
        return None if self.problem.dropout is None else self.problem.dropout.scale

    @property
    def qk_scale(self) -> float:
        """What the sums of dQ and dK are multiplied by."""
        return self.problem.scale * (self.dropout_scale or 1.0)

    @functools.cached_property
    def padding(self) -> Padding:
        """Where there may be NaN."""
        lengths = lengths_of(self.problem.mask)
        has_q, has_kv = lengths.q_lengths is not None, lengths.kv_lengths is not None
        streamed = has_q if self.kind.keys_stationary else has_kv
        return Padding(has_q or has_kv, stationary=self.kind.fused and has_kv, streamed=streamed)

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
            stationary=self.tiles.stationary_qk.length,
            streamed=self.tiles.streamed_qk.length,
            block=c.block,
            tile=c.width,
            warpgroups=c.compute_wgs if can_skip else 1,
        )

    @functools.cached_property
    def order(self) -> Order:
        """The order in which CTAs visit heads and tiles."""
        pieces = self.config, self.arrays, self.score_gradients, self.visits
        return Order(self.problem, self.kind, *pieces, self.gpu)

    @functools.cached_property
    def dq(self) -> DqSums | None:
        """How dQ is added up; None where it is not."""
        if not self.kind.fused:
            return None
        padded_dim, warps = self.tiles.stationary_qk.padded_dim, self.order.store_warps
        sizes = self.problem.dims, self.problem.layout, padded_dim, self.visits.blocks, self.visits.tiles
        return DqSums(self.config, *sizes, warps, self.interpret)

    def added_shape(self, i: int) -> tuple[int, ...]:
        """Returns the shape of the float32 sums of the gradient of array i, [.., stationary, streamed] or its skewed form.

        JAX's interpreter can't add: there each head, and each warpgroup's rows in the skewed form, have sums of their own.
        """
        dims, array, visits = self.problem.dims, self.arrays[i], self.visits
        lead = (dims.B, dims.N) if self.interpret else (dims.B if array.batched else 1, dims.N if array.per_head else 1)
        rows = visits.blocks * visits.block
        if array.skewed is None:
            return *lead, rows, visits.tiles * visits.tile
        return *lead, *((rows // ROWS,) if self.interpret else ()), ROWS, array.skewed.width

    def added_place(self, i: int, at: Any) -> tuple[Any, ...]:
        """Returns where a warpgroup's tile at `at`, a `TilePlace`, lies in these sums."""
        array = self.arrays[i]
        lead = (at.b, at.n) if self.interpret else array.index(at.b, at.n)
        own = (at.stationary // ROWS,) if self.interpret and array.skewed else ()
        return *lead, *own, *array.place(pl.ds(at.stationary, 64), pl.ds(at.streamed, self.config.width))

    def summed_shape(self) -> tuple[int, ...]:
        """Returns the shape of the float32 gradient of an array, one value per stationary position."""
        return self.problem.dims.B, self.problem.dims.N, self.visits.blocks * self.visits.block
