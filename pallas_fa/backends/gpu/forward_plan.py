"""What is static in any forward kernel, whatever instructions it uses."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_fa.backends.gpu import schedule, visit_lists
from pallas_fa.backends.gpu.arrays import KernelArrays
from pallas_fa.backends.gpu.dropout import in_memory as dropout_in_memory
from pallas_fa.backends.gpu.visit_lists import VisitList
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.problem import Operands, Problem


class OperandTiles[T](NamedTuple):
    """How the tiles of each operand lie in shared memory."""

    q: T
    k: T
    v: T
    out: T


@dataclasses.dataclass(frozen=True)
class ForwardCore:
    """The problem, the tiles, and what follows from both. `interpret`: for JAX's GPU interpret mode."""

    problem: Problem
    config: Any
    interpret: bool = False

    @functools.cached_property
    def arrays(self) -> KernelArrays:
        """The arrays of score and mask; rows have one value per key."""
        problem, mask = self.problem, self.problem.mask
        mask = jax.eval_shape(self.in_tiles, mask) if self.visit_lists else mask
        return KernelArrays.of(problem.score, mask, problem.dims)

    @property
    def visit_lists(self) -> bool:
        """Whether CTAs read from lists which key blocks they visit, since a block mask leaves gaps."""
        return self.problem.mask is not None and self.problem.mask.has_blocks

    def list_of(self, table_ref: Any, b: Any, n: Any, number: Any) -> VisitList:
        """Returns, in a kernel, the list of query block `number` at batch entry b and query head n."""
        dims, c = self.problem.dims, self.config
        form = visit_lists.Form.of(self.problem.mask, (dims.T, dims.S), (c.block_q, c.block_kv))
        return visit_lists.in_table(table_ref, b, n, number, form)

    def in_tiles(self, mask: Any) -> Any:
        """Returns what a CTA tests of a mask that has lists."""
        dims, c = self.problem.dims, self.config
        return mask.in_tiles((dims.T, dims.S), (c.block_q, c.block_kv))

    @functools.cached_property
    def scalar_visits(self) -> bool:
        """Whether CTAs compute which key blocks they visit from the arrays of the mask, which are scalars to them.

        Only for few queries: bounds of loops that are computed so take registers (evidence: decode/fewer-launches).
        """
        dims, mask, arrays = self.problem.dims, self.problem.mask, self.arrays
        if mask is None or not mask.scalar_ranges or dims.T > self.config.block_q or self.config.block_q > 64:
            return False
        return len(arrays) > arrays.in_score and all(x.kind == "scalar" for x in arrays.arrays[arrays.in_score :])

    @property
    def visit_table(self) -> bool:
        """Whether CTAs read from a table which key blocks they visit, since the mask has arrays."""
        return bool(jax.tree.leaves(self.problem.mask)) and not self.scalar_visits

    def table_of_visits(self, mask: Any) -> Any:
        """Returns which key blocks each query block visits, as `schedule.table` or `visit_lists.table` does.

        None where the mask has no arrays.
        """
        dims, c = self.problem.dims, self.config
        if mask is None or not self.visit_table:
            return None
        if self.visit_lists:
            return visit_lists.table(mask, (dims.T, dims.S), (c.block_q, c.block_kv), full_tails=(True, False))
        sizes = c.block_q, dims.T, dims.S, c.block_kv
        found = schedule.visits_of_blocks(mask.kv_range, mask.full_kv_range, *sizes)
        blocks = -(-dims.T // c.block_q)
        return schedule.table(found, blocks, blocks)

    def in_memory(self, operands: Operands, visits: Any) -> list[Any]:
        """Returns what the kernel reads beside q, k and v, in order.

        That is the arrays of score and mask, the visit table `visits` if it is not None, sinks [B|1, N], and dropout.
        """
        mask, sinks, dropout = operands.mask, operands.sinks, operands.dropout
        found = self.arrays.in_memory(operands.score, self.in_tiles(mask) if self.visit_lists else mask)
        if visits is not None:
            found.append(visits)
        if sinks is not None:
            found.append(sinks.reshape(sinks.shape[:2]).astype(jnp.float32))
        if dropout is not None:
            found.append(dropout_in_memory(dropout))
        return found

    @property
    def kv_blocks(self) -> int:
        """Key blocks of a sequence."""
        return -(-self.problem.dims.S // self.config.block_kv)

    @property
    def has_padding_keys(self) -> bool:
        """Whether a step may see keys past the end of the sequence."""
        return self.problem.dims.S % self.config.block_kv > 0

    @property
    def score_streams(self) -> bool:
        """Whether every step needs its rows and tiles of arrays. Scores apply everywhere, masks in boundary blocks."""
        return any(i < self.arrays.in_score for i in self.arrays.streamed)

    @property
    def dropout_scale(self) -> float:
        """What the sums of P V are multiplied by at the end for dropout."""
        return 1.0 if self.problem.dropout is None else self.problem.dropout.scale

    @property
    def subtract_max(self) -> bool:
        """Whether the softmax subtracts the maximum.

        A score with a bound, such as a soft cap, needs no maximum: exp(60) = 1e26, and sums of 10^7 of them, are float32
        and bfloat16 numbers as good as any (evidence: forward/soft-cap-without-maximum).
        """
        bound = None if self.problem.score is None else self.problem.score.bound
        return bound is None or bound > 60 or self.problem.dtype != jnp.bfloat16

    @property
    def zeroes_padding(self) -> bool:
        """Whether values past the key length must be zeroed: they may be NaN, and 0 * NaN is NaN."""
        return lengths_of(self.problem.mask).kv_lengths is not None
