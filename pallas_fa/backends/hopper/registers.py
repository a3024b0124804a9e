"""Keeping values out of registers across loops."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def anew(x: Any, interpret: bool) -> Any:
    """The int32 `x`, the same in a whole warp, as if it were not known before.

    The compilers move what a loop computes from invariants out of it: descriptors of all matmuls on a tile, where one
    addition would make each from the one before. In kernels that fill the registers those then spill. From `anew(i)`
    nothing can move: it is a shuffle within the warp, which stays where it is.
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
