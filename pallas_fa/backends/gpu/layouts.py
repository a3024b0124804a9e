"""How a warpgroup holds tiles in registers: as results of wgmma, which are those of mma.sync too."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

TILE = plgpu.Layout.WGMMA  # of a tile [rows, columns], rows a multiple of 64
PER_ROW, PER_COLUMN = TILE.reduce(1), TILE.reduce(0)


def indices(shape: tuple[int, int], axis: int, interpret: bool, shared: bool = True) -> Any:
    """Returns the index of each element of a tile along `axis`, int32.

    `shared`: in one register for all elements of equal index. In an iota of the whole tile LLVM computes each element's
    index on its own, and does not see which are equal (evidence: library/indices-of-a-tile).
    """
    if interpret:
        return lax.broadcasted_iota(jnp.int32, shape, axis)
    if not shared:
        return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)

    def iota(_):
        i32, of_axis = ir.IntegerType.get_signless(32), (PER_COLUMN if axis else PER_ROW).to_mgpu()
        along = mgpu.FragmentedArray.broadcasted_iota(i32, (shape[axis],), 0, of_axis, is_signed=True)
        return along.broadcast_in_dim(shape, (axis,), TILE.to_mgpu())

    run: Any = plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=TILE))(iota)
    return run()
