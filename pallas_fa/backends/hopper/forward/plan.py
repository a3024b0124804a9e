"""What is static in one forward kernel: its tiles, its arrays, its shared memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa import masks
from pallas_fa.backends.gpu import schedule
from pallas_fa.backends.gpu.arrays import KernelArray
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.config import ForwardConfig, forward_configs, named_or
from pallas_fa.backends.hopper.named_barriers import FIRST_FREE, NamedBarrier
from pallas_fa.backends.hopper.tiles import Tiles, alike, first_that_fits, rounded, scratch_bytes
from pallas_fa.problem import Problem

SUM_COLUMNS = 8  # row sums are kept as partial sums over 8 columns, and added up once at the end


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """All that is static in one kernel. `arrays` describes the leaves of (score, mask), of structure `tree`."""

    problem: Problem
    config: ForwardConfig
    arrays: tuple[KernelArray, ...]
    tree: Any
    q: Tiles
    k: Tiles
    v: Tiles
    out: Tiles
    visit_table: bool
    interpret: bool

    @classmethod
    def of(cls, problem: Problem, gpu: Gpu, interpret: bool = False) -> "ForwardPlan":
        """The plan of a call, with the tiles that it names, or the first of the table that fit shared memory."""
        score, mask = problem.score, problem.mask
        T, S = problem.dims.T, problem.dims.S
        shapes = (T, problem.H), (S, problem.H), (S, problem.Hv), (T, problem.Hv)
        q, k, v, out = (Tiles(*shape, problem.dtype, interpret) for shape in shapes)
        q, k = alike(q, k)  # the factors of q k^T meet chunk by chunk,
        v, out = alike(v, out)  # and the chunks of p v are those of v
        leaves, tree = jax.tree.flatten((score, mask))
        arrays = tuple(map(KernelArray.of, leaves))
        visit_table = bool(jax.tree.leaves(mask))
        heads, is_alike = problem.dims.B * problem.dims.N, _is_alike(problem, score, mask)
        packed = bool(masks.parts_of(mask, masks.Segments))
        table = forward_configs(q.padded_dim, v.padded_dim, T, heads, is_alike, visit_table, packed, gpu)
        configs = named_or(problem.config, "forward", table)
        plans = [cls(problem, c, arrays, tree, q, k, v, out, visit_table, interpret) for c in configs]
        return first_that_fits(plans, gpu)

    @property
    def blocks(self) -> int:
        """Blocks of queries of one head."""
        return -(-self.problem.dims.T // self.config.block_q)

    @property
    def pairs(self) -> int:
        """Pairs of blocks of queries that a block of threads does, each starting under the end of the one before; or 0."""
        return self.config.pairs if self.blocks > 1 else 0

    @property
    def shares(self) -> int:
        """Into how many parts, each for one block of threads, the blocks of queries of one head are shared out."""
        return -(-self.blocks // max(1, 2 * self.pairs))

    @property
    def section(self) -> int:
        """Heads whose blocks run side by side."""
        if self.problem.mask is None:
            return 1
        return schedule.section(self.problem.dims.B * self.problem.dims.N, self.config.head_section)

    @property
    def takes_turns(self) -> bool:
        """Whether a warpgroup issues its matmuls only once the one before has: one's softmax runs under the other's."""
        return self.config.takes_turns and self.config.compute_wgs > 1

    @property
    def skips_steps(self) -> bool:
        """Whether a warpgroup passes over steps in which only other queries of the block see keys.

        Only where a warpgroup sees fewer tiles than the block: blocks longer than tiles, or past the end.
        """
        c = self.config
        shorter = self.problem.mask is not None and c.block_q > c.block_kv
        return (
            not self.visit_table
            and c.compute_wgs > 1
            and (shorter or 0 < self.problem.dims.T % c.block_q <= c.block_q - 64)
        )

    @property
    def absent_rows(self) -> int:
        """Rows, whole warpgroups, that the first block of queries lacks, as blocks are counted from the end.

        Under most masks later queries see more keys: a block that lacks some costs least where the fewest are seen.
        """
        if self.problem.mask is None or not self.skips_steps:
            return 0
        return -rounded(self.problem.dims.T, 64) % self.config.block_q

    @property
    def separate_out(self) -> bool:
        """Whether the output has shared memory of its own, or goes where the queries were."""
        return self.pairs > 0 or self.out != self.q

    @property
    def arrays_always(self) -> bool:
        """Whether every tile needs its rows and tiles of arrays: scores apply everywhere, masks where they cut."""
        return any(a.kind in ("row", "tile") for a in self.arrays[: len(jax.tree.leaves(self.problem.score))])

    @property
    def shifts(self) -> bool:
        """Whether the softmax subtracts the maximum.

        A score with a bound, such as a soft cap, needs no maximum: exp(60) = 1e26, and sums of 10^7 of them, are float32
        and bfloat16 numbers as good as any.
        """
        bound = None if self.problem.score is None else self.problem.score.bound
        return bound is None or bound > 60 or self.problem.dtype != jnp.bfloat16

    @property
    def streamed(self) -> tuple[int, ...]:
        """Which arrays change from tile to tile of keys."""
        return tuple(i for i, a in enumerate(self.arrays) if a.kind in ("row", "tile"))

    @property
    def columns(self) -> tuple[int, ...]:
        """Which arrays have one value per query."""
        return tuple(i for i, a in enumerate(self.arrays) if a.kind == "column")

    @property
    def zeroes_padding(self) -> bool:
        """Whether values past the key length must be zeroed: there may be NaN, and 0 * NaN is NaN."""
        return masks.lengths_of(self.problem.mask).kv_lengths is not None

    def shared_memory(self) -> int:
        """Bytes of shared memory that a block needs, barriers left out."""
        return scratch_bytes(dataclasses.replace(self, interpret=False).scratch())

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        c = self.config
        ring = functools.partial(plgpu.Barrier, num_barriers=c.stages)
        scratch: dict[str, Any] = dict(
            q_smem=self.q.scratch(c.compute_wgs, rows=64),
            k_smem=self.k.scratch(c.stages, rows=c.block_kv),
            v_smem=self.v.scratch(c.stages, rows=c.block_kv),
            lse_smem=plgpu.SMEM((c.compute_wgs, 64), jnp.float32),
            q_ready=plgpu.Barrier(num_arrivals=c.compute_wgs * (self.q.chunks + len(self.columns))),
            k_ready=ring(num_arrivals=self.k.chunks),
            v_ready=ring(num_arrivals=self.v.chunks),
            k_free=ring(num_arrivals=c.compute_wgs),
            v_free=ring(num_arrivals=c.compute_wgs),
        )
        if c.pin_softmax:
            scratch["pin_smem"] = plgpu.SMEM((c.compute_wgs, 64, SUM_COLUMNS), jnp.float32)
        if self.separate_out:
            scratch["out_smem"] = self.out.scratch(c.compute_wgs, rows=64)
        if self.pairs:
            scratch["q_free"] = plgpu.Barrier(num_arrivals=c.compute_wgs)
        if self.takes_turns and self.interpret:
            scratch["turns_mbarrier"] = plgpu.Barrier(num_arrivals=1, num_barriers=c.compute_wgs)
        if self.zeroes_padding:
            scratch["v_loaded"] = plgpu.Barrier(num_arrivals=self.v.chunks)
        for i in self.columns + self.streamed:
            scratch[f"array{i}_smem"] = self.arrays[i].scratch(c.stages, c.compute_wgs, 64, c.block_kv)
        if self.streamed:
            tiles = sum(c.compute_wgs if self.arrays[i].kind == "tile" else 1 for i in self.streamed)
            scratch["arrays_ready"] = ring(num_arrivals=tiles)
            scratch["arrays_free"] = ring(num_arrivals=c.compute_wgs)
        return scratch

    def turns(self, scratch: dict[str, Any]) -> NamedBarrier:
        """On barrier i, warpgroup i waits until the one before it has issued its matmuls."""
        return NamedBarrier(FIRST_FREE, 128, 128, scratch.get("turns_mbarrier"))


def _is_alike(problem, score, mask):
    """Whether all queries visit the same keys, as under no mask or a padding mask, and there is no score."""
    if score is not None or mask is None:
        return score is None
    if not jax.tree.leaves(mask):
        return False
    starts = np.arange(0, problem.dims.T, 64)
    ask = lambda mask: (mask.kv_range(starts, starts + 64), mask.full_kv_range(starts, starts + 64))
    return all(x.shape[-1:] in ((), (1,)) for x in jax.tree.leaves(jax.eval_shape(ask, mask)))
