"""What registers hold, and from where on, whatever compilers would rather do."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_fa.backends.gpu.layouts import TILE


def opaque(x: Any, interpret: bool) -> Any:
    """Returns `x`, an int32 that is the same in a whole warp, through an operation that compilers can't see through.

    Compilers move what a loop computes from invariants in front of the loop. Here that is the descriptors of all matmuls
    on a tile, although one addition would make each from the one before. In kernels that fill the registers they spill.
    What depends on `opaque(x)` stays in the loop: the operation is a shuffle within the warp, which can't move.
    """
    if interpret:
        return x

    def shuffle(_, x):
        i32 = ir.IntegerType.get_signless(32)
        text = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
        result = llvm.inline_asm(i32, [x.registers[()]], text, "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(result, (), is_signed=True)

    scalar: Any = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,), return_type=scalar)(shuffle)
    return run(jnp.asarray(x, jnp.int32))


def zeros(shape: tuple[int, int], layout: Any) -> Any:
    """Returns float32 zeros that ptxas knows as such, whatever LLVM does.

    LLVM shares one register for all constants that are 0, loop counters among them. ptxas then copies it to each register
    of an accumulator that starts at 0, where it would have a matmul ignore them.
    """

    def move(_):
        f32 = ir.F32Type.get()
        zero = llvm.inline_asm(f32, [], "mov.b32 $0, 0;", "=r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(zero, shape, layout.to_mgpu())

    run: Any = plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=layout))(move)
    return run()


def rounded(x: Any, dtype: Any, interpret: bool) -> Any:
    """Returns a float32 tile in 16 bits, in half as many registers from here on: compilers would round where it is used."""
    if interpret:
        return x.astype(dtype)
    short = dict(bfloat16="bf16", float16="f16")[jnp.dtype(dtype).name]

    def convert(_, x):
        i32 = ir.IntegerType.get_signless(32)
        pair = ir.VectorType.get((2,), dict(bf16=ir.BF16Type, f16=ir.F16Type)[short].get())
        registers = x.registers.copy()
        for at, register in np.ndenumerate(x.registers):
            second, first = (vector.extract(register, dynamic_position=[], static_position=[i]) for i in (1, 0))
            text = f"cvt.rn.{short}x2.f32 $0, $1, $2;"
            word = llvm.inline_asm(i32, [second, first], text, "=r,f,f", has_side_effects=True)
            registers[at] = vector.bitcast(pair, vector.from_elements(ir.VectorType.get((1,), i32), [word]))
        return mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None)

    result: Any = plgpu.ShapeDtypeStruct(x.shape, dtype, layout=TILE)
    run: Any = plgpu.inline_mgpu(arg_types=(TILE,), return_type=result)(convert)
    return run(x)
