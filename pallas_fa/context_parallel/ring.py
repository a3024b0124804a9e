"""`Ring`: the devices along a mesh axis, and the blocks of a sequence that each holds."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa import masks
from pallas_fa.attention import Attention
from pallas_fa.backends.choice import choose
from pallas_fa.context_parallel import placement
from pallas_fa.operands import intervals
from pallas_fa.operands.part import Part
from pallas_fa.problem import Operands, Problem, Residuals


@dataclasses.dataclass(frozen=True)
class Ring:
    """All that is static in ring attention.

    Attributes:
      problem: the sizes of one device's shards, with the mask and score of the whole problem; these are bound to arrays with
        the rows of one device and all columns.
      implementation: what callers of `ring_attention` pass; computes each hop.
      axis_name: the mesh axis.
      size: the number of devices along it.
      placement: the order of the sequence on the devices.
    """

    problem: Problem
    implementation: Any
    axis_name: Any
    size: int
    placement: placement.Placement

    def split(self, x: Any, axis: int) -> tuple[Any, ...]:
        """Splits a shard into its blocks."""
        return tuple(jnp.split(x, placement.blocks_of(self.placement), axis))

    def rotate(self, tree: Any, hops: int = 1) -> Any:
        """Returns the arrays of `tree` that the device `hops` places before this one holds."""
        if hops % self.size == 0:
            return tree
        pairs = [(i, (i + hops) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), tree)

    def attend(self, problem: Problem, operands: Operands) -> tuple[Any, Any]:
        """Returns (out, lse) of one hop, or of one pair of blocks."""
        return Attention(problem, choose(problem, self.implementation)).forward(operands)

    def gradients(self, problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        """Returns the gradients of one hop, or of one pair of blocks.

        Args:
          problem: that of `attend`; its sizes, mask and score may be those of other operands.
          residuals: the operands of the hop, with out and lse of the whole rows.
          d_out: cotangent of out.
          d_lse: cotangent of lse.
        """
        problem = dataclasses.replace(problem.with_operands(residuals.operands), part_of_keys=True)
        return Attention(problem, choose(problem, self.implementation)).backward(residuals, d_out, d_lse)

    @property
    def part_size(self) -> tuple[int, int, int, int]:
        """(B, N, T, S) of a pair of blocks."""
        dims, blocks = self.problem.dims, placement.blocks_of(self.placement)
        return dims.B, dims.N, dims.T // blocks, dims.S // blocks

    def starts(self, device: Any, block: int) -> tuple[Any, ...]:
        """Returns the global positions at which the blocks of `device` start; a block has `block` positions."""
        return placement.starts(self.placement, device, self.size, block)

    @functools.cached_property
    def hops(self) -> int:
        """The number of hops after which no device needs more keys; all hops where that depends on arrays."""
        mask, _ = without_sharded_segments(self.problem.mask)
        if mask is None or jax.tree.leaves(mask):
            return self.size
        T, S = self.part_size[2:]

        @functools.cache
        def needed(shift):  # a mask without arrays depends on the distance between the blocks only
            with jax.ensure_compile_time_eval():
                return bool(any_allowed(mask.moved(Part((0, 0, shift, 0), self.part_size)), T, S))

        def needed_by(device, hop):
            holder = (device - hop) % self.size
            return any(needed(t - s) for t in self.starts(device, T) for s in self.starts(holder, S))

        hops = self.size
        while hops > 1 and not any(needed_by(device, hops - 1) for device in range(self.size)):
            hops -= 1
        return hops


@dataclasses.dataclass(frozen=True)
class _ShardedSegments(masks.Segments):
    """Segments whose ids are one device's shards."""


def with_sharded_segments(mask: Any, segments: masks.Segments) -> masks.Mask:
    """Joins a bound `mask`, or None, to bound `segments` whose ids are this device's shards, and travel with the keys."""
    parts = [mask, _ShardedSegments(segments.q_ids, segments.kv_ids)]
    return masks.And(tuple(part for part in parts if part is not None))


def without_sharded_segments(mask: Any) -> tuple[Any, Any]:
    """Returns the mask without its sharded segments, and these segments; each may be None."""
    if not isinstance(mask, masks.And) or not isinstance(mask.parts[-1], _ShardedSegments):
        return mask, None
    *others, segments = mask.parts
    return (others[0] if others else None), segments


def any_allowed(mask: masks.Mask, T: int, S: int) -> Any:
    """Returns whether a mask of T queries and S keys may allow any pair of them; conservative."""
    lo, hi = mask.kv_range(np.array([0], np.int32), np.array([T], np.int32))
    allowed = intervals.maximum(lo, 0) < intervals.minimum(hi, S)
    return allowed.any() if hasattr(allowed, "any") else allowed
