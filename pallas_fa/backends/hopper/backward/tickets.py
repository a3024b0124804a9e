"""The block that a persistent CTA takes next: the first that no CTA has begun (evidence: backward/persistent-ctas).

A counter in device memory, 0 before the kernel, says how many blocks were taken beside the first of each CTA. The load warp
takes a block while the one before is computed. It passes the number on through device memory, since kernels fill shared
memory; whoever waits for the block's first operand may read it then.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_fa.backends.gpu.grid import AXIS

_SCALAR: Any = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
_SECTOR = 8  # numbers, that CTAs write to different ones


def shape(ctas: int) -> tuple[int, int]:
    """Returns that of the int32 array `memory`: the counter, and a row for each CTA."""
    return 1 + ctas, _SECTOR


def take(memory: Any, number: Any, ctas: int, interpret: bool) -> Any:
    """Returns the number of the next block for the CTA of the warp that calls, which has taken block `number`.

    JAX's interpreter has no atomic operations: there the blocks are dealt out in turn.
    """
    if interpret:
        return number + ctas

    def asm(_, ref):
        text = """{
            .reg .pred p;
            .reg .b32 taken;
            mov.u32 taken, %laneid;
            setp.eq.u32 p, taken, 0;
            @p atom.relaxed.gpu.global.add.u32 taken, [$1], 1;
            shfl.sync.idx.b32 $0, taken, 0, 31, 0xffffffff;
        }"""
        i32 = ir.IntegerType.get_signless(32)
        taken = llvm.inline_asm(i32, [mgpu.utils.memref_ptr(ref)], text, "=&r,l", has_side_effects=True)
        return mgpu.FragmentedArray.splat(taken, (), is_signed=True)

    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_SCALAR)(asm)
    return run(memory.at[0, pl.ds(0, 1)]) + ctas


def pass_on(memory: Any, slot: Any, number: Any, interpret: bool) -> None:
    """Writes `number` for this CTA. All lanes do, so whichever arrives at a barrier next has written it before."""
    place = _place(memory, slot)
    if interpret:
        place[0] = number
        return

    def asm(_, ref, number):
        operands = [mgpu.utils.memref_ptr(ref), number.registers[()]]
        llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, "st.global.b32 [$0], $1;", "l,r", has_side_effects=True)

    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT))(asm)
    run(place, number)


def passed_on(memory: Any, slot: Any, interpret: bool) -> Any:
    """Returns the number that was passed on, as what ptxas knows to be the same in a whole warp."""
    place = _place(memory, slot)
    if interpret:
        return place[0]

    def asm(_, ref):
        text = "{ .reg .b32 x; ld.global.b32 x, [$1]; redux.sync.or.b32 $0, x, 0xffffffff; }"
        i32 = ir.IntegerType.get_signless(32)
        number = llvm.inline_asm(i32, [mgpu.utils.memref_ptr(ref)], text, "=r,l", has_side_effects=True)
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=_SCALAR)(asm)
    return run(place)


def _place(memory, slot):
    return memory.at[1 + lax.axis_index(AXIS), pl.ds(slot, 1)]
