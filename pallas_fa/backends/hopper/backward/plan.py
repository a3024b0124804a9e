"""All that is static in one pass of the backward kernel: tiles, arrays, their gradients, shared memory."""

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
from pallas_fa.backends.hopper.config import BackwardConfig, backward_configs, named_or
from pallas_fa.backends.hopper.named_barriers import FIRST_FREE, NamedBarrier
from pallas_fa.backends.hopper.tiles import Tiles, alike, first_that_fits, rounded, scratch_bytes, swizzle
from pallas_fa.operands import ranges
from pallas_fa.problem import Problem

_F32 = np.dtype(np.float32)
FUSED = (("dk", "dv", "dq"),)


def passes(problem: Problem) -> tuple[tuple[str, ...], ...]:
    """Which gradients each pass over the logits gives.

    One pass takes five matmuls, but adds dQ up in no fixed order, and can't sum gradients of arrays over keys; two take
    seven, three take eight, which is what fits registers at head dims past 128.
    """
    if max(problem.H, problem.Hv) > 128:
        return ("dv",), ("dk",), ("dq",)
    leaves = jax.tree.leaves(problem.score)
    per_query = any(_is_per_query(x) and jnp.issubdtype(x.dtype, jnp.floating) for x in leaves)
    return (("dk", "dv"), ("dq",)) if per_query or problem.deterministic_gradients else FUSED


def _is_per_query(x):
    return x.shape[2] > 1 and x.shape[3] == 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """One pass, which gives the gradients `gives`.

    A block of threads holds a block of one sequence, its own, and goes through tiles of the other. It holds keys, for
    dK and dV, or queries, for dQ alone. A logit matmul takes `own_a` and `other_a` (K and Q, or Q and K), that of the
    probabilities' gradients `own_b` and `other_b` (V and dO, or dO and V). Logits are held as [own, other], and `arrays`
    describes the leaves of (score, mask), of structure `tree`, accordingly: their "rows" have one value per position of
    the other sequence, their "columns" one per position of the own. `differentiated`: the arrays whose gradients this
    pass gives.
    """

    problem: Problem
    gives: tuple[str, ...]
    config: BackwardConfig
    arrays: tuple[KernelArray, ...]
    differentiated: tuple[int, ...]
    tree: Any
    own_a: Tiles
    own_b: Tiles
    other_a: Tiles
    other_b: Tiles
    gpu: Gpu
    interpret: bool

    @classmethod
    def candidates(cls, problem: Problem, gives: tuple[str, ...], gpu: Gpu, interpret: bool = False) -> list["Plan"]:
        """A plan for each configuration that may do; the best comes first."""
        T, S = problem.dims.T, problem.dims.S
        shapes = (T, problem.H), (S, problem.H), (S, problem.Hv), (T, problem.Hv)
        q, k, v, d_out = (Tiles(*shape, problem.dtype, interpret) for shape in shapes)
        q, k = alike(q, k)  # the factors of a matmul come in the same chunks
        v, d_out = alike(v, d_out)
        by_keys = gives != ("dq",)
        sides = (k, v, q, d_out) if by_keys else (q, d_out, k, v)
        leaves, tree = jax.tree.flatten((problem.score, problem.mask))
        arrays = tuple(KernelArray.of(_turned(x) if by_keys else x) for x in leaves)
        in_score = enumerate(jax.tree.leaves(problem.score))
        floats = [i for i, x in in_score if gives != ("dv",) and jnp.issubdtype(x.dtype, jnp.floating)]
        differentiated = [i for i in floats if _is_per_query(leaves[i]) != by_keys]
        table = backward_configs(
            gives,
            q.padded_dim,
            v.padded_dim,
            S,
            group=problem.group,
            alike=problem.mask is None,
            from_table=bool(jax.tree.leaves(problem.mask)),
        )
        configs = named_or(problem.config, "backward", table)
        plans = (cls(problem, gives, c, arrays, tuple(differentiated), tree, *sides, gpu, interpret) for c in configs)
        return [plan for plan in plans if plan.can_share_dq]

    @classmethod
    def of(cls, problem: Problem, gives: tuple[str, ...], gpu: Gpu, interpret: bool = False) -> "Plan":
        """The best plan that fits shared memory."""
        return first_that_fits(cls.candidates(problem, gives, gpu, interpret), gpu)

    @property
    def by_keys(self) -> bool:
        """Whether blocks hold keys."""
        return self.gives != ("dq",)

    @property
    def fused(self) -> bool:
        return self.by_keys and "dq" in self.gives

    @property
    def first_stores(self) -> bool:
        """Whether sums of dQ start at what the first block stores."""
        return self.fused and self.config.first_store

    @property
    def stored(self) -> tuple[str, ...]:
        """The gradients that are stored; dQ of the fused pass is added up instead."""
        return tuple(name for name in self.gives if not (self.fused and name == "dq"))

    @property
    def gives_a(self) -> bool:
        """Whether the gradient of `own_a`, dS times `other_a`, is summed up in registers."""
        return self.gives != ("dv",)

    @property
    def gives_b(self) -> bool:
        """Whether that of `own_b`, P^T times `other_b`, is."""
        return "dv" in self.gives

    @property
    def scored(self) -> bool:
        """Whether logits are scaled and scored in registers, and not by where their accumulator starts."""
        return self.problem.score is not None or self.problem.scale <= 0

    @property
    def blocks(self) -> int:
        """Blocks of one head."""
        return -(-self.own_a.length // self.config.block)

    @property
    def heads(self) -> int:
        """Own heads of one batch entry."""
        return self.problem.K if self.by_keys else self.problem.dims.N

    # ---- which tiles a block visits, in which order ----

    @functools.cached_property
    def known_visits(self) -> schedule.Visits | None:
        """The visits of whole blocks as lines, where they are that and known while tracing; else a table is read."""
        is_known = not jax.tree.leaves(self.problem.mask)
        return schedule.as_lines(self.visits(self.problem.mask, 1), self.blocks) if is_known else None

    @property
    def shares(self) -> int:
        """How many parts of a block have visits of their own: its warpgroups, where one can sit out what others visit.

        Measured at head dim 128: a window gains 4%, documents too, and plain causal blocks, whose visits are known, lose 5%.
        """
        c = self.config
        # Zeroing a tile takes all warpgroups. A tile as wide as the block is rarely another's alone.
        can_differ = self.problem.mask is not None and c.width < c.block and not self.zeroes_other
        return c.compute_wgs if can_differ and self.known_visits is None else 1

    def visits(self, mask: Any, parts: int) -> schedule.Visits:
        """The visits of each of `parts` parts of all blocks."""
        whole_only = self.by_keys or self.scored  # past the end are no keys; a score could make NaN there
        if mask is None:
            ask = ask_full = lambda lo, hi: (0, ranges.FAR)
        else:
            ask, ask_full = (mask.q_range, mask.full_q_range) if self.by_keys else (mask.kv_range, mask.full_kv_range)
        size, width = self.other_a.length, self.config.width
        if self.by_keys and not self.scored:
            # Statistics of queries past the end make their probabilities 0, whatever the mask; a score could make NaN.
            size = self.other_tiles * width
        part, own = self.config.block // parts, self.own_a.length
        return schedule.visits_of_blocks(ask, ask_full, part, own, size, width, whole_only, at_least=0)

    @property
    def other_tiles(self) -> int:
        """Tiles of the other sequence."""
        return -(-self.other_a.length // self.config.width)

    @property
    def section(self) -> int:
        """Heads whose blocks run side by side."""
        if self.problem.mask is None:
            return 1
        heads = self.problem.dims.B * self.heads
        return schedule.section(heads, self._heads_at_once if self.by_tile else self.config.head_section)

    @property
    def _heads_at_once(self) -> int:
        """Heads whose blocks fill the GPU once."""
        return max(1, self.gpu.multiprocessors // self.blocks)

    @functools.cached_property
    def by_tile(self) -> bool:
        """Whether blocks go through the query heads of a tile before the next tile (see `backward_work.for_steps`).

        What depends on the head alone would have to be loaded in each step. Sections must fill the GPU once, not twice.
        """
        depends = self.summed or self.of_kind("scalar")
        heads, at_once = self.problem.dims.B * self.heads, self._heads_at_once
        fill = at_once > 1 and (heads <= at_once or heads % at_once == 0)
        of_group = self.fused and self.problem.group > 1 and self.problem.mask is not None
        return self.config.by_tile and of_group and fill and not depends and self.known_visits is not None

    @property
    def stagger(self) -> int:
        """How many tiles further on each block starts than the one before; from the last tile on it goes on at the first."""
        applies = self.fused and self.problem.mask is None and not self.of_kind("tile")  # a full bias lost 2%
        return self.config.stagger if applies else 0

    @property
    def store_warps(self) -> int:
        """Warps that store tiles of dQ; `first_store` says why one where blocks differ in the order of tiles."""
        return 1 if self.by_tile or self.stagger else self.config.store_warps

    # ---- the share of each warpgroup in dQ of the fused pass ----

    @property
    def dq_by_rows(self) -> bool:
        """Whether the warpgroups share dQ by rows; else by columns."""
        return self.config.width == self.config.block

    @property
    def can_share_dq(self) -> bool:
        c = self.config
        return not self.fused or self.dq_by_rows or (c.width == 64 and self.own_a.padded_dim == c.block)

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that one warpgroup computes, of 64 rows."""
        return self.own_a.padded_dim if self.dq_by_rows else self.own_a.padded_dim // self.config.compute_wgs

    # ---- padding ----

    @property
    def has_padding(self) -> bool:
        """Whether there may be NaN behind the mask."""
        lengths = masks.lengths_of(self.problem.mask)
        return lengths.q_lengths is not None or lengths.kv_lengths is not None

    @property
    def zeroes_own(self) -> bool:
        """Whether own positions past their length must be zeroed: dQ = dS K spreads a NaN, since 0 * NaN is NaN."""
        return self.fused and masks.lengths_of(self.problem.mask).kv_lengths is not None

    @property
    def zeroes_other(self) -> bool:
        """Whether the other sequence's must."""
        lengths = masks.lengths_of(self.problem.mask)
        return (lengths.q_lengths if self.by_keys else lengths.kv_lengths) is not None

    # ---- arrays ----

    def of_kind(self, *kinds: str) -> tuple[int, ...]:
        """Which arrays are of one of these kinds."""
        return tuple(i for i, a in enumerate(self.arrays) if a.kind in kinds)

    @property
    def float_arrays(self) -> tuple[int, ...]:
        """The score's arrays that get gradients, of this pass or another."""
        leaves = jax.tree.leaves(self.problem.score)
        return tuple(i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating))

    @property
    def summed(self) -> tuple[int, ...]:
        """Arrays whose gradients are summed in registers: one value per own position."""
        return tuple(i for i in self.differentiated if self.arrays[i].kind != "tile")

    @property
    def added(self) -> tuple[int, ...]:
        """Arrays whose gradients are added up in device memory, tile by tile."""
        return tuple(i for i in self.differentiated if self.arrays[i].kind == "tile")

    def in_memory(self, leaves: list[Any]) -> list[Any]:
        """The arrays as this pass takes them."""
        return [a.in_memory(_turned(x) if self.by_keys else x) for a, x in zip(self.arrays, leaves, strict=True)]

    # ---- device memory ----

    def dq_shape(self) -> tuple[int, ...]:
        """Of the float32 sums of dQ; rows are padded as TMA demands. The interpreter keeps the part of every block."""
        dims = self.problem.dims
        shape = dims.B, rounded(dims.T, 8), dims.N, self.own_a.padded_dim
        return (self.blocks, *shape) if self.interpret else shape

    def dq_claims_shape(self) -> tuple[int, ...]:
        """Of the counters of the tiles of these sums (see `first_store`)."""
        dims = self.problem.dims
        shape = dims.B, dims.N, self.other_tiles
        return (self.blocks, *shape) if self.interpret else shape

    def added_shape(self, i: int) -> tuple[int, ...]:
        """Of the float32 sums of the gradient of array i."""
        dims, array, c = self.problem.dims, self.arrays[i], self.config
        lead = (dims.B, dims.N) if self.interpret else (dims.B if array.batched else 1, dims.N if array.per_head else 1)
        return *lead, self.blocks * c.block, rounded(self.other_a.length, c.width)

    def summed_shape(self) -> tuple[int, ...]:
        """Of the float32 gradient of an array, one value per own position."""
        return self.problem.dims.B, self.problem.dims.N, self.blocks * self.config.block

    # ---- shared memory ----

    def shared_memory(self) -> int:
        """Bytes of shared memory that a block needs, barriers left out."""
        return scratch_bytes(dataclasses.replace(self, interpret=False).scratch())

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        c, dtype = self.config, self.problem.dtype
        stages_a, stages_b = c.stages
        streamed = len(self.of_kind("row", "column")) + len(self.of_kind("tile")) * c.compute_wgs
        statistics = (stages_a, stages_b) if self.by_keys else (1, 1)
        positions = c.width if self.by_keys else c.block
        own_statistic = 0 if self.by_keys else 1
        other_statistic = 1 - own_statistic
        scratch = dict(
            own_a_smem=self.own_a.scratch(rows=c.block),
            other_a_smem=self.other_a.scratch(stages_a, rows=c.width),
            other_b_smem=self.other_b.scratch(stages_b, rows=c.width),
            start_smem=plgpu.SMEM((statistics[0], positions), _F32),
            own_a_ready=plgpu.Barrier(num_arrivals=self.own_a.chunks + own_statistic),
            other_a_ready=plgpu.Barrier(
                num_arrivals=self.other_a.chunks + other_statistic + streamed, num_barriers=stages_a
            ),
            other_b_ready=plgpu.Barrier(
                num_arrivals=self.other_b.chunks + (other_statistic if self.gives_a else 0), num_barriers=stages_b
            ),
        )
        if self.gives_a or self.own_b != self.own_a:
            # Without dS, it only takes dV on its way out.
            scratch["own_b_smem"] = self.own_b.scratch(rows=c.block)
        if self.gives_a:
            scratch["own_b_ready"] = plgpu.Barrier(num_arrivals=self.own_b.chunks + own_statistic)
            scratch["delta_smem"] = plgpu.SMEM((statistics[1], positions), _F32)
        if self.fused:
            shape = c.ds_stages, c.block, c.width
            scratch["ds_smem"] = plgpu.SMEM(shape, dtype, transforms=swizzle(dtype, 128))
            shape = c.compute_wgs, 64, self.dq_columns
            scratch["dq_smem"] = plgpu.SMEM(shape, _F32, transforms=swizzle(_F32, 128))
        for i, array in enumerate(self.arrays):
            if array.kind == "tile":
                scratch[f"array{i}_smem"] = array.scratch(stages_a, c.compute_wgs, 64, c.width)
            elif array.kind != "scalar":
                size = c.width if array.kind == "row" else c.block
                scratch[f"array{i}_smem"] = plgpu.SMEM((stages_a, size), array.stored_dtype)
        for i in self.summed:
            scratch[f"gradient{i}_smem"] = plgpu.SMEM((c.compute_wgs, 64), _F32)
        for i in self.added:
            shape = c.compute_wgs, 64, c.width
            scratch[f"gradient{i}_smem"] = plgpu.SMEM(shape, _F32, transforms=swizzle(_F32, 128))
        if self.interpret:
            for name, tiles in (("a", self.own_a), ("b", self.own_b)):
                scratch[f"d_{name}_stand_in"] = plgpu.SMEM((c.compute_wgs, tiles.chunks, 64, tiles.chunk), _F32)
            for name, (_, count, arrivals) in self._barriers().items():
                scratch[f"{name}_mbarrier"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)
        return scratch

    def _barriers(self):
        """Names -> (barrier, how many of them, warps or warpgroups that arrive on each)."""
        c, warpgroup, warp = self.config, 128, 32
        wgs = c.compute_wgs
        counts = dict(  # (how many, who arrives, their threads, threads that wait)
            wgs_meet=(1, wgs, warpgroup * wgs, 0),
            other_a_free=(c.stages[0], wgs, warpgroup * wgs, warp),
            other_b_free=(c.stages[1], wgs, warpgroup * wgs, warp),
        )
        if self.fused:
            counts |= dict(dq_ready=(self.store_warps * wgs, 1, warpgroup, warp), dq_free=(wgs, 1, warp, warpgroup))
        first, barriers = FIRST_FREE, {}
        for name, (count, arrivals, arriving, waiting) in counts.items():
            barriers[name] = NamedBarrier(first, arriving, waiting, meeting=name == "wgs_meet"), count, arrivals
            first += count
        return barriers

    def barriers(self, scratch: dict[str, Any]) -> dict[str, NamedBarrier]:
        """The barriers between warpgroups, by name."""
        return {
            name: dataclasses.replace(barrier, mbarrier=scratch.get(f"{name}_mbarrier"))
            for name, (barrier, _, _) in self._barriers().items()
        }


def _turned(x: Any) -> Any:
    """An array [B, N, T, S] with its last two axes exchanged."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((*x.shape[:2], x.shape[3], x.shape[2]), x.dtype)
    return jnp.swapaxes(x, 2, 3)
