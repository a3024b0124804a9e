"""Numbers of rows that repeat, as where the rows of a tile are the query heads of a key head, query after query."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from pallas_fa.backends.gpu.layouts import PER_ROW


def load_repeated(period: Any, rows: int, interpret: bool) -> Any:
    """Returns [rows] in the layout of row statistics: number i % P in row i.

    Args:
      period: ref of float32 [P] in device memory.
      rows: how many.
    """
    count = period.shape[0]
    if interpret:
        return jnp.tile(period[...], -(-rows // count))[:rows]

    def load(_, ref):
        f32 = ir.F32Type.get()
        index = ir.IndexType.get()
        size = arith.constant(index, ir.IntegerAttr.get(index, count))
        nothing = mgpu.FragmentedArray.splat(llvm.mlir_undef(f32), (rows,), PER_ROW.to_mgpu())
        return nothing.foreach(lambda _, i: memref.load(ref, [arith.remui(i[0], size)]), create_array=True)

    numbers: Any = plgpu.ShapeDtypeStruct((rows,), jnp.float32, layout=PER_ROW)
    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=numbers)(load)
    return run(period)
