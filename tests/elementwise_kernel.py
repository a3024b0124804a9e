"""Small kernels of elementwise functions, on values in the register layout of a tile of logits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.grid import AXIS
from pallas_fa.backends.gpu.launch import launch

SHAPE = 64, 64
_TILE = plgpu.Layout.WGMMA
_KINDS = {
    "float32": lambda x: x.astype(jnp.float32) * 0.5,
    "int32": lambda x: x,
    "uint32": lambda x: x.astype(jnp.uint32),
    "bool": lambda x: x < 3,
}


# As the kernels for Hopper are lowered, and those of mma.sync: integers without a sign are a trap of the second.
SEMANTICS = {"warpgroup": plgpu.LoweringSemantics.Warpgroup, "lane": plgpu.LoweringSemantics.Lane}


def lower(*functions: Callable[..., Any]) -> None:
    """Lowers kernels of `functions` for CUDA; each gets a function `value(kind, dtype, seed)` to make operands with.

    Kinds: "tile", "row" (a value per key, broadcast), "column" (per query, broadcast), "scalar".
    """

    def body(out_gmem, smem):
        start = lax.axis_index(AXIS)

        def value(kind, dtype, seed=0):
            if kind == "scalar":
                x = start + seed
            elif kind == "tile":
                x = start + seed + plgpu.broadcasted_iota(jnp.int32, SHAPE, seed % 2, layout=_TILE)
            else:
                axis = 0 if kind == "row" else 1
                x = plgpu.broadcasted_iota(jnp.int32, SHAPE[:1], 0, layout=_TILE.reduce(axis)) + seed
                x = lax.broadcast_in_dim(x, SHAPE, (1 - axis,))
            return _KINDS[dtype](x) if dtype in _KINDS else lax.convert_element_type(x, dtype)

        total = value("tile", "float32")
        for fn in functions:
            for result in jax.tree.leaves(fn(value)):
                result = jnp.where(result, 1.0, 0.0) if result.dtype == jnp.bool_ else result.astype(jnp.float32)
                total = total + result
        smem[...] = total
        out_gmem[0] = jnp.float32(0)

    out = (jax.ShapeDtypeStruct((1,), jnp.float32),)
    scratch = {"smem": plgpu.SMEM(SHAPE, jnp.float32)}
    for semantics in SEMANTICS.values():
        kernel = lambda s=semantics: launch(body, out_type=out, ctas=2, warpgroups=1, scratch=scratch, semantics=s)
        jax.jit(kernel).trace().lower(lowering_platforms=("cuda",))


def run(fn: Callable[..., Any], *arrays: jax.Array, semantics: str = "warpgroup") -> jax.Array:
    """fn(*arrays), one array of float32 or int32, by a kernel: for a GPU. Arrays [rows, 64] of a multiple of 64 rows."""

    def body(*refs, smem, out_smem, ready):
        *inputs, out = refs
        rows = pl.ds(lax.axis_index(AXIS) * SHAPE[0], SHAPE[0])
        for x_gmem, x_smem in zip(inputs, smem, strict=True):
            plgpu.copy_gmem_to_smem(x_gmem.at[rows], x_smem, ready)
        plgpu.barrier_wait(ready)
        out_smem[...] = fn(*(plgpu.load(x_smem, layout=_TILE, optimized=False) for x_smem in smem))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out.at[rows])
        plgpu.wait_smem_to_gmem(0)

    tile = [jax.ShapeDtypeStruct(SHAPE, x.dtype) for x in arrays]
    dtype = jax.eval_shape(fn, *tile).dtype
    scratch = {
        "smem": [plgpu.SMEM(SHAPE, x.dtype) for x in arrays],
        "out_smem": plgpu.SMEM(SHAPE, dtype),
        "ready": plgpu.Barrier(num_arrivals=len(arrays)),
    }
    out = (jax.ShapeDtypeStruct(arrays[0].shape, dtype),)
    ctas = arrays[0].shape[0] // SHAPE[0]
    (result,) = launch(
        body, *arrays, out_type=out, ctas=ctas, warpgroups=1, scratch=scratch, semantics=SEMANTICS[semantics]
    )
    return result
