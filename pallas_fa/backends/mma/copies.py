"""Copies between device memory and shared memory, for GPUs of compute capability 8.0 and above.

Loads are `cp.async`, 16 bytes a thread, which runs on every such GPU. They cut rows and columns anywhere and write zeros
to what lies past the cut. So no operand is padded in device memory, and no padding, which may hold NaN, gets into a matmul.
Pallas has such copies for GPUs before Hopper only. Those do not cut, and take no tile of one head out of [B, T, N, H].

A thread's copies are in shared memory once it has waited for them (`wait`); all threads see them after the next barrier.
JAX's interpreter has TMA alone: there a copy is waited for where it starts.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from pallas_fa.backends.gpu.addresses import WARPGROUP, i32, plus_bytes, pointer_to, swizzled, thread_index
from pallas_fa.backends.gpu.shared_memory import swizzle

_VECTOR = 16  # bytes that a thread copies at once
_SPLAT = plgpu.Layout.WG_SPLAT


@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies by one warpgroup. `arrived`: the barrier at which they arrive in the interpreter, None on a GPU."""

    arrived: Any = None

    def tile(self, gmem: Any, smem: Any, width: int, rows: Any = None, columns: Any = None) -> None:
        """Starts copying a tile.

        Args:
          gmem: ref of [rows, columns] in device memory, columns contiguous, each row at a multiple of 16 bytes.
          smem: ref of [rows, at least as many columns], with the layout `swizzle(dtype, width)`; zeros go past the columns.
          width: bytes of a row that lie together in shared memory: 32, 64 or 128.
          rows, columns: how many there are from the start of the tile on, int32; None: all. Columns are cut at multiples of
            16 bytes.
        """
        if self.arrived is not None:
            self._interpreted(gmem, smem, rows, columns)
            return
        dtype = np.dtype(smem.dtype)
        whole = gmem.shape[1] * dtype.itemsize
        limits = [x for x in (rows, columns) if x is not None]

        def copy(_, source, target, *limits):
            limits = iter([x.registers[()] for x in limits])
            rows_left = next(limits) if rows is not None else None
            bytes_left = arith.muli(next(limits), i32(dtype.itemsize)) if columns is not None else None

            def vector(at):
                cuts = [(at.row, rows_left), (at.byte, bytes_left)]
                cuts += [(at.byte, i32(whole))] if at.end > whole else []
                kept = None
                for place, limit in cuts:
                    if limit is not None:
                        kept = _where_less(place, limit, i32(_VECTOR) if kept is None else kept)
                modifier = nvvm.LoadCacheModifierKind.CG
                nvvm.cp_async_shared_global(at.smem, at.gmem, _VECTOR, modifier, cp_size=kept)

            _for_vectors(source, target, dtype, width, vector)

        _inline(copy, (plgpu.RefType(), plgpu.RefType(swizzle(dtype, width))), gmem, smem, *limits)

    def row(self, gmem: Any, smem: Any, columns: Any = None) -> None:
        """Starts copying a row of at most 2048 bytes, at a multiple of 16 bytes; `columns` as of `tile`."""
        if self.arrived is not None:
            self._interpreted(gmem, smem, columns)
            return
        itemsize = np.dtype(gmem.dtype).itemsize
        vectors = gmem.shape[0] * itemsize // _VECTOR
        assert vectors <= WARPGROUP, "a row of at most 2048 bytes"

        def copy(_, source, target, *limit):
            thread = thread_index()
            offset = arith.muli(thread, i32(_VECTOR))
            kept = None
            if limit:
                kept = _where_less(offset, arith.muli(limit[0].registers[()], i32(itemsize)), i32(_VECTOR))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, thread, i32(vectors))):
                to, start = (plus_bytes(pointer_to(x), offset) for x in (target, source))
                nvvm.cp_async_shared_global(to, start, _VECTOR, nvvm.LoadCacheModifierKind.CG, cp_size=kept)

        limit = () if columns is None else (columns,)
        _inline(copy, (plgpu.RefType(), plgpu.RefType()), gmem, smem, *limit)

    def commit(self) -> None:
        """Makes a group of all copies that this thread has started since the last group."""
        if self.arrived is None:
            _instruction(nvvm.cp_async_commit_group)

    def wait(self, under_way: int = 0) -> None:
        """Commits, then waits for all groups of this thread but the last `under_way`."""
        self.commit()
        self.wait_for_committed(under_way)

    def wait_for_committed(self, under_way: int) -> None:
        """Waits for all groups of this thread but the last `under_way`; what is in no group yet stays so."""
        if self.arrived is None:
            _instruction(nvvm.cp_async_wait_group, under_way)

    def store(self, smem: Any, gmem: Any, width: int, rows: Any = None) -> None:
        """Stores a tile from shared memory; `width` and `rows` as of `tile`. Columns past those of `gmem` are dropped."""
        if self.arrived is not None:
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem, gmem)
            plgpu.wait_smem_to_gmem(0)
            return
        dtype = np.dtype(smem.dtype)
        whole = gmem.shape[1] * dtype.itemsize

        def store(_, target, source, *limit):
            four_words = ir.VectorType.get((_VECTOR // 4,), ir.IntegerType.get_signless(32))

            def vector(at):
                cuts = [(at.byte, i32(whole))] if at.end > whole else []
                cuts += [(at.row, limit[0].registers[()])] if limit else []
                is_there = [arith.cmpi(arith.CmpIPredicate.slt, *cut) for cut in cuts]
                with mgpu.when(functools.reduce(arith.andi, is_there)) if cuts else contextlib.nullcontext():
                    llvm.store(llvm.load(four_words, at.smem), at.gmem)

            _for_vectors(target, source, dtype, width, vector)

        limit = () if rows is None else (rows,)
        _inline(store, (plgpu.RefType(), plgpu.RefType(swizzle(dtype, width))), gmem, smem, *limit)

    def _interpreted(self, gmem, smem, *limits):
        """`limits`: of the dims of the tile, in order; None: no limit."""
        plgpu.copy_gmem_to_smem(gmem, smem, self.arrived)
        plgpu.barrier_wait(self.arrived)
        for axis, limit in enumerate(limits):
            if limit is not None:
                there = lax.broadcasted_iota(jnp.int32, smem.shape, axis) < limit
                smem[...] = jnp.where(there, smem[...], jnp.zeros((), smem.dtype))


def _instruction(op: Callable[..., Any], *args: Any) -> None:
    def body(_):
        op(*args)

    _inline(body, ())


def _inline(fn: Callable[..., None], refs: tuple[Any, ...], *args: Any) -> None:
    """Runs fn(context, *args): refs of the types `refs`, then int32 scalars."""
    count = len(refs)
    scalars = [jnp.asarray(x, jnp.int32) for x in args[count:]]
    run: Any = plgpu.inline_mgpu(arg_types=(*refs, *(_SPLAT,) * len(scalars)))(fn)
    run(*args[:count], *scalars)


@dataclasses.dataclass(frozen=True)
class _Vector:
    """16 bytes of a tile: both pointers, the row, the first byte in it, and a static end of the bytes of all threads."""

    gmem: Any
    smem: Any
    row: Any
    byte: Any
    end: int


def _for_vectors(gmem: Any, smem: Any, dtype: np.dtype, width: int, body: Callable[[_Vector], None]) -> None:
    """Calls body(vector) for all that a thread copies of a tile. Neighbours in a warp copy neighbouring bytes of a row.

    In shared memory lie tiles of [8, width bytes], those of 8 rows one after the other. In each, the bits of an address that
    say which 16 bytes of a row are XORed with the lowest ones that say which row.
    """
    strides, _ = ir.MemRefType(gmem.type).get_strides_and_offset()
    assert strides[1] == 1, "columns must be contiguous"
    row_bytes = strides[0] * dtype.itemsize
    row_tiles, column_tiles = ir.MemRefType(smem.type).shape[:2]
    rows, per_row = row_tiles * 8, width // _VECTOR
    at_once = WARPGROUP // per_row
    thread = thread_index()
    row, vector = arith.divui(thread, i32(per_row)), arith.remui(thread, i32(per_row))
    byte = arith.muli(vector, i32(_VECTOR))
    in_tile = swizzled(arith.addi(arith.muli(arith.remui(row, i32(8)), i32(width)), byte), width)
    smem_start = arith.addi(arith.muli(arith.divui(row, i32(8)), i32(column_tiles * 8 * width)), in_tile)
    smem_start = plus_bytes(pointer_to(smem), smem_start)
    i64 = ir.IntegerType.get_signless(64)
    wide_row = arith.muli(arith.extui(i64, row), mgpu.c(row_bytes, i64))
    gmem_start = plus_bytes(pointer_to(gmem), arith.addi(wide_row, arith.extui(i64, byte)))
    for first in range(0, rows, at_once):
        is_there = rows - first >= at_once or arith.cmpi(arith.CmpIPredicate.ult, row, i32(rows - first))
        with contextlib.nullcontext() if is_there is True else mgpu.when(is_there):
            for tile in range(column_tiles):
                source = plus_bytes(gmem_start, first * row_bytes + tile * width)
                target = plus_bytes(smem_start, (first // 8 * column_tiles + tile) * 8 * width)
                row_here, byte_here = arith.addi(row, i32(first)), arith.addi(byte, i32(tile * width))
                body(_Vector(source, target, row_here, byte_here, (tile + 1) * width))


def _where_less(a, b, x):
    return arith.select(arith.cmpi(arith.CmpIPredicate.slt, a, b), x, i32(0))
