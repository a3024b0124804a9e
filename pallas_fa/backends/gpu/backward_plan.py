"""What is static in any pass of a backward kernel, whatever instructions it uses."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.dropout import in_memory as dropout_in_memory
from pallas_fa.backends.gpu.gradient_pass import ByRole, GradientPass
from pallas_fa.backends.gpu.score_gradients import ScoreGradients
from pallas_fa.backends.gpu.skewed import ROWS
from pallas_fa.backends.gpu.streamed_visits import StreamedVisits
from pallas_fa.operands import diagonals
from pallas_fa.problem import Operands, Problem
from pallas_fa.scores.base import float_arrays


def has_per_query_gradients(problem: Problem) -> bool:
    """Whether an array of the score has one value per query and a gradient, a sum over keys."""
    is_per_query = lambda x: not diagonals.spans(x) and x.shape[2] > 1 and x.shape[3] == 1
    return any(map(is_per_query, float_arrays(problem.score)))


def is_scored(problem: Problem) -> bool:
    """Whether logits are scaled and scored in registers, and not by where their accumulator starts."""
    return problem.score is not None or problem.scale <= 0


@dataclasses.dataclass(frozen=True)
class BackwardCore:
    """The problem, the pass, its tiles, and what follows from these. `interpret`: for JAX's GPU interpret mode.

    `config` has the positions of a stationary block (`block`), those that a warpgroup holds (`rows`), those of the
    streamed tile of a warpgroup (`width`): all of `tile`, or a part of them, and `head_parts`.
    """

    problem: Problem
    kind: GradientPass
    config: Any
    gpu: Gpu
    interpret: bool = False

    @property
    def stationary(self) -> int:
        """The length of the sequence that CTAs hold blocks of."""
        return self.problem.dims.S if self.kind.keys_stationary else self.problem.dims.T

    @property
    def streamed(self) -> int:
        """The length of the other sequence."""
        return self.problem.dims.T if self.kind.keys_stationary else self.problem.dims.S

    @property
    def tile(self) -> int:
        """Positions of a streamed tile of a CTA."""
        return self.config.width

    @property
    def head_parts(self) -> int:
        """Parts of the query heads of a key head, each with CTAs of its own (see `gpu.head_parts`).

        A device's share of a call may have fewer of these heads than the call for which the tiles were named.
        """
        return math.gcd(self.config.head_parts, self.problem.group) if self.kind.keys_stationary else 1

    @property
    def has_head_parts(self) -> bool:
        """Whether these are several."""
        return self.head_parts > 1

    @property
    def heads(self) -> int:
        """Stationary heads of one batch entry; a key head is one for each part of its query heads."""
        return self.problem.K * self.head_parts if self.kind.keys_stationary else self.problem.dims.N

    @property
    def group(self) -> int:
        """Query heads of a stationary head."""
        return self.problem.dims.N // self.heads

    def head_in_memory(self, head: Any) -> Any:
        """Returns, in a kernel, which head of the stationary operands a stationary head has."""
        return lax.div(head, jnp.int32(self.head_parts)) if self.has_head_parts else head

    @property
    def flops_of_step(self) -> float:
        """Those of the matmuls of a CTA's step."""
        kind, problem = self.kind, self.problem
        qk, pv = 1 + kind.accumulates_qk + ("dq" in kind.gives), kind.accumulates_qk + kind.accumulates_pv
        return 2 * self.config.block * self.tile * (qk * problem.H + pv * problem.Hv)

    @property
    def turns_arrays(self) -> bool:
        """Whether the kernel transposes tiles of arrays of 16-bit elements as it loads them."""
        return False

    @property
    def visits(self) -> StreamedVisits:
        """Which tiles each CTA visits."""
        raise NotImplementedError

    @property
    def tiles(self) -> ByRole:
        """How the tiles of the operands lie in shared memory."""
        raise NotImplementedError

    @functools.cached_property
    def arrays(self) -> KernelArrays:
        """The arrays of score and mask; rows have one value per streamed position, columns one per stationary position."""
        problem, mask = self.problem, self.problem.mask
        mask = jax.eval_shape(self.visits.in_tiles, mask) if self.visits.listed else mask
        by_keys, can_turn = self.kind.keys_stationary, self.turns_arrays
        return KernelArrays.of(problem.score, mask, problem.dims, transposed=by_keys, can_turn=can_turn)

    @functools.cached_property
    def score_gradients(self) -> ScoreGradients:
        """The arrays whose gradients this pass gives."""
        return ScoreGradients.of(self.problem.score, self.arrays, self.kind)

    @property
    def scored(self) -> bool:
        """See `is_scored`."""
        return is_scored(self.problem)

    @property
    def dropout_scale(self) -> float | None:
        """What gradients are multiplied by at their ends, where there is dropout."""
        return None if self.problem.dropout is None else self.problem.dropout.scale

    @property
    def qk_scale(self) -> float:
        """What the sums of dQ and dK are multiplied by."""
        return self.problem.scale * (self.dropout_scale or 1.0)

    @property
    def why_not_deterministic(self) -> str | None:
        """None if this pass sums in a fixed order or need not, else the reason."""
        unordered = self.score_gradients.has_unordered_sums(self.arrays, self.problem.dims)
        if not (self.problem.deterministic_gradients and unordered):
            return None
        return (
            "the backward kernel adds up gradients of arrays [.., T, S] that are broadcast over batch entries or heads,"
            " and of a RelativeBias, in no fixed order, so it can't do them with deterministic_gradients=True"
        )

    def tested(self, mask: Any) -> Any:
        """Returns the part of `mask` that is tested element by element in boundary tiles; None for nothing."""
        return mask

    def in_memory(self, operands: Operands) -> list[Any]:
        """Returns what the kernel reads beside its matmuls' operands and row statistics, in order.

        That is the arrays of score and mask, the visit table unless it is known while tracing, and dropout.
        """
        mask, dropout = operands.mask, operands.dropout
        found = self.arrays.in_memory(operands.score, self.visits.in_tiles(mask) if self.visits.listed else mask)
        if self.visits.known is None and not self.visits.from_lengths:
            found.append(self.visits.table(mask))
        if dropout is not None:
            found.append(dropout_in_memory(dropout))
        return found

    def gradients(self, operands: Operands, results: Sequence[Any], added: Sequence[Any]) -> dict[Any, Any]:
        """Returns the gradients by name, and those of the score's arrays by number among its float arrays.

        `results`: the gradients that CTAs store, then those that they sum up. `added`: those summed in device memory.
        """
        scores, count = self.score_gradients, len(self.kind.stored)
        found: dict[Any, Any] = dict(zip(self.kind.stored, results, strict=False))
        by_array = dict(zip(scores.summed, results[count:], strict=True)) | dict(zip(scores.added, added, strict=True))
        for number, (i, x) in enumerate(zip(scores.floats, float_arrays(operands.score), strict=True)):
            if i in by_array:
                found[number] = self.array_gradient(i, by_array[i], x)
        return found

    def added_shape(self, i: int) -> tuple[int, ...]:
        """Returns the shape of the float32 sums of the gradient of array i, [.., stationary, streamed] or its skewed form.

        JAX's interpreter can't add: there each head, and all 64 rows in the skewed form, have sums of their own.
        """
        dims, array, visits = self.problem.dims, self.arrays[i], self.visits
        lead = (dims.B, dims.N) if self.interpret else (dims.B if array.batched else 1, dims.N if array.per_head else 1)
        rows = visits.blocks * visits.block
        if array.skewed is None:
            return *lead, rows, visits.tiles * visits.tile
        return *lead, *((rows // ROWS,) if self.interpret else ()), ROWS, array.skewed.width

    def added_place(self, i: int, at: Any, rows: int) -> tuple[Any, ...]:
        """Returns where so many rows of a tile at `at`, a `TilePlace`, lie in these sums."""
        array = self.arrays[i]
        lead = (at.b, at.n) if self.interpret else array.index(at.b, at.n)
        own = (at.stationary // ROWS,) if self.interpret and array.skewed else ()
        of_tile = pl.ds(at.stationary, rows), pl.ds(at.streamed, self.config.width)
        return *lead, *own, *(array.place(*of_tile) if array.skewed else of_tile)

    def summed_shape(self) -> tuple[int, ...]:
        """Returns the shape of the float32 gradient of an array, one value per stationary position."""
        return self.problem.dims.B, self.problem.dims.N, self.visits.blocks * self.visits.block

    def array_gradient(self, i: int, d: Any, x: Any) -> Any:
        """Returns the gradient of array i, which is `x`, from what the kernel gave: summed over its broadcast dims."""
        array = self.arrays[i]
        if array.skewed:
            d = array.skewed.gradient(d.sum(axis=2) if self.interpret else d)
            d = jnp.flip(d, 2) if self.kind.keys_stationary else d
        else:
            d = (
                d[:, :, : self.stationary, : self.streamed]
                if array.kind == "tile"
                else d[:, :, : self.stationary, None]
            )
            d = jnp.swapaxes(d, 2, 3) if self.kind.keys_stationary else d
        d = d if self.dropout_scale is None else d * self.dropout_scale
        summed = tuple(axis for axis in range(d.ndim) if x.shape[axis] == 1 and d.shape[axis] > 1)
        return d.sum(axis=summed, keepdims=True).astype(x.dtype)
