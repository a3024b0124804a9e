"""`Ring`: the devices along a mesh axis, and what each holds of a sequence."""

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
    """What is static. `problem` has the sizes of one device's shards, and the mask and score of the whole problem.

    `mask` and `score` are bound to arrays with the rows of one device and all columns.
    """

    problem: Problem
    implementation: Any
    axis_name: Any
    size: int
    placement: placement.Placement

    def split(self, x: Any, axis: int) -> tuple[Any, ...]:
        """The blocks of a shard."""
        return tuple(jnp.split(x, placement.blocks_of(self.placement), axis))

    def rotate(self, tree: Any, hops: int = 1) -> Any:
        """The arrays of `tree` from the device that is `hops` places before this one."""
        if hops % self.size == 0:
            return tree
        pairs = [(i, (i + hops) % self.size) for i in range(self.size)]
        return jax.tree.map(lambda x: lax.ppermute(x, self.axis_name, pairs), tree)

    def attend(self, problem: Problem, operands: Operands) -> tuple[Any, Any]:
        """(out, lse) of the keys of one hop, or of some of them."""
        return Attention(problem, choose(problem, self.implementation)).forward(operands)

    def gradients(self, problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> tuple[Any, ...]:
        """Those of `attend`, of whole rows' results; `problem` may be that of other operands."""
        problem = problem.with_operands(residuals.operands)
        return Attention(problem, choose(problem, self.implementation)).backward(residuals, d_out, d_lse)

    @property
    def part_size(self) -> tuple[int, int, int, int]:
        """(B, N, T, S) of a pair of blocks."""
        dims, blocks = self.problem.dims, placement.blocks_of(self.placement)
        return dims.B, dims.N, dims.T // blocks, dims.S // blocks

    def starts(self, device: Any, block: int) -> tuple[Any, ...]:
        """The positions in the whole sequence at which the blocks of `device` start."""
        return placement.starts(self.placement, device, self.size, block)

    @functools.cached_property
    def hops(self) -> int:
        """How many hops it takes until no device needs any more keys: all where that depends on arrays."""
        mask, _ = without_sharded_segments(self.problem.mask)
        if mask is None or jax.tree.leaves(mask):
            return self.size
        T, S = self.part_size[2:]

        @functools.cache
        def needed(shift):  # without arrays, only the distance between the blocks matters
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
    """Segments whose ids are shards, of the queries and of the keys that a device holds."""


def with_sharded_segments(mask: Any, segments: masks.Segments) -> masks.Mask:
    """A bound `mask` or None, and bound `segments` whose ids are this device's; those of the keys travel with these."""
    parts = [mask, _ShardedSegments(segments.q_ids, segments.kv_ids)]
    return masks.And(tuple(part for part in parts if part is not None))


def without_sharded_segments(mask: Any) -> tuple[Any, Any]:
    """(the mask without its sharded segments, these segments); each None where there is none."""
    if not isinstance(mask, masks.And) or not isinstance(mask.parts[-1], _ShardedSegments):
        return mask, None
    *others, segments = mask.parts
    return (others[0] if others else None), segments


def any_allowed(mask: masks.Mask, T: int, S: int) -> Any:
    """Whether a mask of T queries and S keys lets any attend; conservative."""
    lo, hi = mask.kv_range(np.array([0]), np.array([T]))
    found = intervals.maximum(lo, 0) < intervals.minimum(hi, S)
    return found.any() if hasattr(found, "any") else found
