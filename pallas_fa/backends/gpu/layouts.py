"""How a warpgroup holds tiles in registers: as results of wgmma, which are those of mma.sync too."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

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


def lane_columns(shape: tuple[int, int], interpret: bool) -> tuple[Any, Any]:
    """Returns (first, rest), int32 tiles whose sum is the column of each element.

    `first` is the same in all registers of a thread, `rest` a constant in each of them.
    """
    if interpret:
        column = lax.broadcasted_iota(jnp.int32, shape, 1)
        return jnp.zeros_like(column), column

    def make(_):
        i32, layout = ir.IntegerType.get_signless(32), PER_COLUMN.to_mgpu()
        along = mgpu.FragmentedArray.broadcasted_iota(i32, (shape[1],), 0, layout, is_signed=True)
        pair = along.registers.flat[0].type  # of neighbours in a row
        lane = vector.extract(
            along.registers.flat[0], dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([0])
        )
        firsts, rest = np.empty_like(along.registers), np.empty_like(along.registers)
        for i, (number, *_) in enumerate(np.ndindex(rest.shape)):
            firsts.flat[i] = vector.broadcast(pair, lane)
            values = np.array([8 * number, 8 * number + 1], np.int32)
            rest.flat[i] = arith.constant(pair, ir.DenseElementsAttr.get(values, type=pair))
        array = lambda x: mgpu.FragmentedArray(_registers=x, _layout=layout, _is_signed=True)
        return tuple(array(x).broadcast_in_dim(shape, (1,), TILE.to_mgpu()) for x in (firsts, rest))

    tile: Any = plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=TILE)
    run: Any = plgpu.inline_mgpu(return_type=(tile, tile))(make)
    return run()
