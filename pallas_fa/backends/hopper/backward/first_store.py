"""Sums in device memory over blocks of threads, which start at whatever was there: nothing needs to be zeroed before.

Whoever is first to have something for a tile of the sums stores it, and the others add to that. Each tile has a counter,
0 before the kernel: the first to add to it has claimed the tile, and says in it when the tile is stored; the others wait
for that, for a block that runs. No circle of blocks waits for itself, whichever run at the same time: where one warp of a
block claims, it publishes a tile before it asks for the next, so a block that waits is waited for by nobody. Where two
warps take turns, one may wait while what the other has claimed is still computed; so there all blocks go through the
tiles in the same order, and a block that is waited for can itself only wait for an earlier tile.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

_STORED = 1 << 30  # what the counter of a stored tile has reached; there are fewer blocks


def claim(counter: Any, interpret: bool) -> Any:
    """Called by one warp: whether it is to store the tile; if not, returns once the tile may be added to by TMA.

    `counter`: ref of one int32 in device memory. In JAX's interpreter, which has no atomic operations, each block has
    tiles and counters of its own.
    """
    if interpret:
        counter[0] = 1
        return True

    def asm(_, ref):
        text = f"""{{
            .reg .pred p;
            .reg .b32 seen;
            mov.u32 seen, %laneid;
            setp.eq.u32 p, seen, 0;
            @p atom.acquire.gpu.global.add.u32 seen, [$1], 1;
            shfl.sync.idx.b32 seen, seen, 0, 31, 0xffffffff;
            mov.u32 $0, seen;
            setp.eq.u32 p, seen, 0;
            @p bra claimed;
            wait:
            setp.ge.u32 p, seen, {_STORED};
            @p bra stored;
            ld.acquire.gpu.global.u32 seen, [$1];
            bra wait;
            stored:
            bar.warp.sync 0xffffffff;
            fence.proxy.async.global;
            claimed:
        }}"""
        i32 = ir.IntegerType.get_signless(32)
        before = llvm.inline_asm(i32, [mgpu.utils.memref_ptr(ref)], text, "=&r,l", has_side_effects=True)
        return mgpu.FragmentedArray.splat(before, (), is_signed=True)

    scalar: Any = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=scalar)(asm)
    return run(counter) == 0


def publish(counter: Any, interpret: bool) -> None:
    """Called by the warp that claimed the tile, once it has issued the stores: waits for them, and lets the others add."""
    plgpu.wait_smem_to_gmem(0)
    if interpret:
        return

    def asm(_, ref):
        text = f"""{{
            .reg .pred p;
            .reg .b32 lane;
            fence.proxy.async.global;
            bar.warp.sync 0xffffffff;
            mov.u32 lane, %laneid;
            setp.eq.u32 p, lane, 0;
            @p red.release.gpu.global.add.u32 [$0], {_STORED};
        }}"""
        pointer = mgpu.utils.memref_ptr(ref)
        llvm.inline_asm(ir.Type.parse("!llvm.void"), [pointer], text, "l", has_side_effects=True)

    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))(asm)
    run(counter)
