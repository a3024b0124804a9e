"""Scores and masks on the tiles of logits of a warpgroup, with arrays from their rings."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.gpu.logits import Place, logits
from pallas_fa.backends.gpu.steps import Steps
from pallas_fa.backends.hopper.forward import work
from pallas_fa.backends.hopper.forward.plan import ForwardPlan


class Visited(NamedTuple):
    """Where a block mask says what a step visits: the key block, and the words of the mask's arrays, by number."""

    key_block: Any
    words: dict[int, Any]


class Logits:
    """Brings the products of queries and keys to logits, for the 64 queries from `t0` on of warpgroup `wg`."""

    def __init__(
        self, plan: ForwardPlan, block: work.QueryBlock, steps: Steps, wg: Any, t0: Any, gmem: Any, scratch: Any
    ):
        self.plan, self.block, self.steps, self.wg, self.t0 = plan, block, steps, wg, t0
        self.gmem, self.scratch = gmem, scratch

    def visited(self, i: Any) -> "Visited | None":
        """Returns what step i reads from device memory, which is to be asked for before the wait for its keys."""
        if not self.plan.visit_lists:
            return None
        key_block, block = self.steps.key_block(i), self.block
        return Visited(key_block, self.plan.arrays.words(self.gmem.arrays, block.b, block.n, block.number, key_block))

    def apply(self, x: Any, i: Any, is_boundary: bool, visited: "Visited | None") -> tuple[Any, float]:
        """Returns (y, factor > 0) whose product are the logits of step i, after score and mask; -inf where masked.

        `x`: the products of queries and keys, unscaled.
        """
        at = Place(self.block.b, self.block.n, self.t0, self.first_key(i, visited))
        return logits(self.plan, x, at, is_boundary, lambda: self._arrays(x.shape, i, is_boundary, visited))

    def first_key(self, i: Any, visited: "Visited | None") -> Any:
        """Returns the first key of step i."""
        key_block = visited.key_block if visited else self.steps.key_block(i)
        return self.block.s0 + key_block * self.plan.config.block_kv

    def array_slot(self, i: Any) -> Any:
        """Returns the slot of the rings of arrays that step i uses."""
        step = self.block.arrays_done + work.array_steps(self.plan, self.steps, i)
        return lax.rem(jnp.asarray(step, jnp.int32), self.plan.config.stages)

    def scalars(self) -> dict[int, Any]:
        """Returns the arrays without positions, by number."""
        return self.plan.arrays.scalars(self.gmem.arrays, self.block.b, self.block.n)

    def _arrays(self, shape, i, is_boundary, visited):
        """(score, mask) with their arrays for step i: scalars, or broadcast to the tile; None where not loaded."""
        plan, scratch = self.plan, self.scratch
        uses_streamed = plan.arrays.streamed and (plan.score_streams or is_boundary)
        slot = self.array_slot(i) if uses_streamed else None
        if slot is not None:
            plgpu.barrier_wait(scratch["arrays_ready"].at[slot])
        scalars = self.scalars()
        loaded = [self._array(a, scalars, slot, shape, visited) for a in range(len(plan.arrays))]
        if slot is not None:
            plgpu.commit_smem()  # read by ordinary loads: order them before the next TMA write
            plgpu.barrier_arrive(scratch["arrays_free"].at[slot])
        return plan.arrays.unflatten(loaded)

    def _array(self, a, scalars, slot, shape, visited):
        array = self.plan.arrays[a]
        if array.kind == "scalar":
            return scalars[a]
        if array.kind == "word":
            return visited.words[a]
        smem = self.scratch[f"array{a}_smem"]
        if array.kind == "column":
            return array.load(smem.at[self.wg], shape, TILE)
        if slot is None:
            return None
        return array.load(smem.at[slot] if array.kind == "row" else smem.at[slot, self.wg], shape, TILE)
