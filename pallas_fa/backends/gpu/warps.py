"""What a warp of a warpgroup finds out and decides for itself, without the others."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_fa.backends.gpu.layouts import PER_ROW, TILE


def largest_of_thread(x: Any, interpret: bool) -> Any:
    """Returns for each row of a tile the largest element that a thread holds: the four threads of a row have their own."""
    if interpret:
        return x.max(axis=1)

    def largest(_, x):
        larger = lambda a, b: _asm(ir.F32Type.get(), "max.NaN.f32 $0, $1, $2;", "=f,f,f", a, b)
        # Of pairs of columns: [rows / 64, columns / 8, row or row + 8].
        tiles = x.registers.reshape(-1, x.shape[1] // 8, 2)
        found = mgpu.FragmentedArray.splat(_constant(0.0), (x.shape[0],), PER_ROW.to_mgpu())
        by_row = found.registers.reshape(-1, 2)
        for i, half in ((i, half) for i in range(len(by_row)) for half in range(2)):
            # Two chains, so that neighbours don't wait for each other.
            chains = ([_element(pair, lane) for pair in tiles[i, :, half]] for lane in range(2))
            top = functools.reduce(larger, (functools.reduce(larger, chain) for chain in chains))
            by_row[i, half] = vector.broadcast(by_row[i, half].type, top)
        return found

    rows: Any = plgpu.ShapeDtypeStruct(x.shape[:1], jnp.float32, layout=PER_ROW)
    run: Any = plgpu.inline_mgpu(arg_types=(TILE,), return_type=rows)(largest)
    return run(plgpu.layout_cast(x, TILE))  # a custom function may give one number for all elements


def any_above(x: Any, bound: float, interpret: bool) -> Any:
    """Returns whether a number of `x`, a row array or a tile, is above `bound`, or NaN, in this warp; a bool scalar."""
    if interpret:
        return jnp.any(~(x <= bound))

    def vote(_, x):
        numbers = (_element(several, i) for several in x.registers.flat for i in range(several.type.shape[0]))
        tests = [arith.cmpf(arith.CmpFPredicate.UGT, number, _constant(bound)) for number in numbers]
        mine = arith.extui(ir.IntegerType.get_signless(32), functools.reduce(arith.ori, tests))
        text = "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; }"
        found = _asm(ir.IntegerType.get_signless(32), text, "=r,r", mine, has_side_effects=True)
        return mgpu.FragmentedArray.splat(found, (), is_signed=True)

    answer: Any = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    run: Any = plgpu.inline_mgpu(arg_types=(PER_ROW if x.ndim == 1 else TILE,), return_type=answer)(vote)
    return run(x) != 0


def _asm(result, text, constraints, *operands, has_side_effects=False):
    return llvm.inline_asm(result, list(operands), text, constraints, has_side_effects=has_side_effects)


def _constant(x):
    return arith.constant(ir.F32Type.get(), ir.FloatAttr.get(ir.F32Type.get(), x))


def _element(x, i):
    return vector.extract(x, dynamic_position=[], static_position=[i])
