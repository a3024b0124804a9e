"""All that is static in the backward kernel: tiles, arrays, their gradients, shared memory."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa import masks
from pallas_fa.mosaic_gpu.accumulators import TensorCore
from pallas_fa.mosaic_gpu.arrays import KernelArray
from pallas_fa.mosaic_gpu.config import BackwardConfig, backward_configs
from pallas_fa.mosaic_gpu.tiles import Tiles, swizzle
from pallas_fa.problem import Problem

SHARED_MEMORY = 227 * 1024 - 1024  # of a block on compute capability 9.0, less what barriers and alignment take


@dataclasses.dataclass(frozen=True)
class Plan:
    """`arrays` describes the leaves of (score, mask), of structure `tree`, with their last two axes exchanged.

    The kernel holds logits as [key, query], so that an array's "rows" have one value per query, its "columns" one per
    key. `differentiated`: which of the arrays get gradients.
    """

    problem: Problem
    config: BackwardConfig
    arrays: tuple[KernelArray, ...]
    differentiated: tuple[int, ...]
    tree: Any
    q: Tiles
    k: Tiles
    v: Tiles
    d_out: Tiles
    visit_table: bool
    interpret: bool

    @classmethod
    def candidates(cls, problem: Problem, interpret: bool) -> list["Plan"]:
        """A plan for each configuration that may do; the best comes first."""
        T, S = problem.dims.T, problem.dims.S
        shapes = (T, problem.H), (S, problem.H), (S, problem.Hv), (T, problem.Hv)
        q, k, v, d_out = (Tiles(*shape, problem.dtype, interpret) for shape in shapes)
        # The two factors of a matmul come in the same chunks.
        if q.chunk != k.chunk:
            q, k = (dataclasses.replace(x, in_chunks=True) for x in (q, k))
        if v.chunk != d_out.chunk:
            v, d_out = (dataclasses.replace(x, in_chunks=True) for x in (v, d_out))
        leaves, tree = jax.tree.flatten((problem.score, problem.mask))
        transposed = [jax.ShapeDtypeStruct((*x.shape[:2], x.shape[3], x.shape[2]), x.dtype) for x in leaves]
        arrays = tuple(map(KernelArray.of, transposed))
        in_score = range(len(jax.tree.leaves(problem.score)))
        differentiated = tuple(i for i in in_score if jnp.issubdtype(leaves[i].dtype, jnp.floating))
        table = bool(jax.tree.leaves(problem.mask))
        named = isinstance(problem.config, BackwardConfig)
        configs = (problem.config,) if named else backward_configs(q.padded_dim, v.padded_dim)
        plans = (cls(problem, c, arrays, differentiated, tree, q, k, v, d_out, table, interpret) for c in configs)
        return [plan for plan in plans if plan.splits_dq]

    @property
    def tensor_core(self) -> TensorCore:
        return TensorCore(self.interpret)

    @property
    def scored(self) -> bool:
        """Whether logits are scaled and scored in registers, and not by where their accumulator starts."""
        return self.problem.score is not None or self.problem.scale <= 0

    @property
    def blocks(self) -> int:
        """Blocks of keys of one head."""
        return -(-self.problem.dims.S // self.config.block_kv)

    @property
    def dq_rows(self) -> int:
        """Rows of dQ that one warpgroup computes."""
        return 64

    @property
    def by_rows(self) -> bool:
        """Whether the warpgroups share dQ by rows; else by columns."""
        return self.config.block_q == 64 * self.config.compute_wgs

    @property
    def splits_dq(self) -> bool:
        """Whether the warpgroups can share the work of dQ."""
        return self.by_rows or (self.config.block_q == 64 and self.k.padded_dim == 64 * self.config.compute_wgs)

    @property
    def dq_columns(self) -> int:
        """Columns of dQ that one warpgroup computes."""
        return self.k.padded_dim if self.by_rows else self.k.padded_dim // self.config.compute_wgs

    @property
    def zeroes_queries(self) -> bool:
        """Whether queries past their length must be zeroed: there may be NaN, and 0 * NaN is NaN."""
        return masks.lengths_of(self.problem.mask).q_lengths is not None

    @property
    def zeroes_keys(self) -> bool:
        return masks.lengths_of(self.problem.mask).kv_lengths is not None

    def of_kind(self, *kinds: str, differentiated: bool = False) -> tuple[int, ...]:
        """Which arrays are of one of these kinds."""
        found = self.differentiated if differentiated else range(len(self.arrays))
        return tuple(i for i in found if self.arrays[i].kind in kinds)

    @property
    def summed(self) -> tuple[int, ...]:
        """Arrays whose gradients are summed over queries in registers: one value per key."""
        return self.of_kind("scalar", "column", differentiated=True)

    @property
    def added(self) -> tuple[int, ...]:
        """Arrays whose gradients are added up in device memory."""
        return self.of_kind("row", "tile", differentiated=True)

    # ---- device memory ----

    def padded(self, size: int, multiple: int) -> int:
        return -(-size // multiple) * multiple

    def dq_shape(self) -> tuple[int, ...]:
        """Of the float32 dQ; rows are padded as TMA demands. The interpreter keeps the parts of all blocks of keys."""
        dims = self.problem.dims
        shape = dims.B, self.padded(dims.T, 8), dims.N, self.k.padded_dim
        return (self.blocks, *shape) if self.interpret else shape

    def added_shape(self, i: int) -> tuple[int, ...]:
        """Of the float32 gradient of array i."""
        dims, array = self.problem.dims, self.arrays[i]
        lead = (dims.B, dims.N) if self.interpret else (dims.B if array.batched else 1, dims.N if array.per_head else 1)
        queries = self.padded(dims.T, self.config.block_q)
        if array.kind == "row":
            return (self.blocks * self.config.compute_wgs, *lead, queries) if self.interpret else (*lead, queries)
        return *lead, self.padded(dims.S, self.config.block_kv), queries

    def summed_shape(self) -> tuple[int, ...]:
        """Of the float32 gradients of one array, one value per key."""
        return self.problem.dims.B, self.problem.dims.N, self.blocks * self.config.block_kv

    # ---- shared memory ----

    def shared_memory(self) -> int:
        """Bytes of shared memory that a block needs, barriers left out."""
        c, size = self.config, self.problem.dtype.itemsize
        dim, value_dim = self.k.padded_dim, self.v.padded_dim
        operands = (c.block_kv + c.stages * c.block_q) * (dim + value_dim) * size
        logits = c.ds_stages * c.block_kv * c.block_q * size
        dq = c.compute_wgs * self.dq_rows * self.dq_columns * 4
        statistics = 2 * c.stages * c.block_q * 4
        columns = {"row": 0, "column": c.block_kv, "tile": c.block_q * c.block_kv, "scalar": 0}
        arrays = sum(
            c.stages * a.stored_dtype.itemsize * (c.block_q if a.kind == "row" else columns[a.kind]) for a in self.arrays
        )
        per_wg = {"row": c.block_q, "column": 64, "scalar": 64, "tile": 64 * c.block_q}
        gradients = sum(4 * c.compute_wgs * per_wg[self.arrays[i].kind] for i in self.differentiated)
        return operands + logits + dq + statistics + arrays + gradients

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers, by name."""
        c, f32 = self.config, np.dtype(np.float32)
        ring = functools.partial(plgpu.Barrier, num_barriers=c.stages)
        copies = {"row": 1, "column": 1, "tile": c.compute_wgs, "scalar": 0}
        core = self.tensor_core
        scratch = dict(
            k_smem=self.k.scratch(rows=c.block_kv),
            v_smem=self.v.scratch(rows=c.block_kv),
            q_smem=self.q.scratch(c.stages, rows=c.block_q),
            do_smem=self.d_out.scratch(c.stages, rows=c.block_q),
            start_smem=plgpu.SMEM((c.stages, c.block_q), f32),
            delta_smem=plgpu.SMEM((c.stages, c.block_q), f32),
            ds_smem=plgpu.SMEM(
                (c.ds_stages, c.block_kv, c.block_q), self.problem.dtype, transforms=swizzle(self.problem.dtype, 128)
            ),
            dq_smem=plgpu.SMEM((c.compute_wgs, self.dq_rows, self.dq_columns), f32, transforms=swizzle(f32, 128)),
            dk_stand_in=core.stand_in(c.compute_wgs, self.k.chunks, 64, self.k.chunk),
            dv_stand_in=core.stand_in(c.compute_wgs, self.v.chunks, 64, self.v.chunk),
            k_ready=plgpu.Barrier(num_arrivals=self.k.chunks),
            v_ready=plgpu.Barrier(num_arrivals=self.v.chunks),
            q_ready=ring(num_arrivals=self.q.chunks + 1 + sum(copies[a.kind] for a in self.arrays)),
            do_ready=ring(num_arrivals=self.d_out.chunks + 1),
            q_free=ring(num_arrivals=c.compute_wgs),
            do_free=ring(num_arrivals=c.compute_wgs),
            wgs_meet=plgpu.Barrier(num_arrivals=c.compute_wgs),
            dq_ready=plgpu.Barrier(num_barriers=c.compute_wgs),
            dq_free=plgpu.Barrier(num_barriers=c.compute_wgs),
        )
        for i, array in enumerate(self.arrays):
            if array.kind == "tile":
                scratch[f"array{i}_smem"] = array.scratch(c.stages, c.compute_wgs, 64, c.block_q)
            elif array.kind != "scalar":
                size = c.block_q if array.kind == "row" else c.block_kv
                scratch[f"array{i}_smem"] = plgpu.SMEM((c.stages, size), array.stored_dtype)
        shapes = {"row": (c.block_q,), "column": (64,), "scalar": (64,), "tile": (64, c.block_q)}
        for i in self.differentiated:
            kind = self.arrays[i].kind
            layout = swizzle(f32, 128) if kind == "tile" else ()
            scratch[f"gradient{i}_smem"] = plgpu.SMEM((c.compute_wgs, *shapes[kind]), f32, transforms=layout)
        return scratch
