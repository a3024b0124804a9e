"""PTX on one int32 in device or shared memory; where texts say `.space`, it is replaced by the name of which."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm


def number_by(text: str, word: Any) -> Any:
    """Returns the int32, the same in a whole warp, that PTX `text` writes to $0; $1 is the address of `word`, a ref [1]."""

    def asm(_, ref):
        i32, operands = ir.IntegerType.get_signless(32), [mgpu.utils.memref_ptr(ref)]
        number = llvm.inline_asm(i32, operands, _with_space(text, ref), "=&r,l", has_side_effects=True)
        return mgpu.FragmentedArray.splat(number, (), is_signed=True)

    scalar: Any = plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT)
    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=scalar)(asm)
    return run(word)


def run_on(text: str, word: Any, *numbers: Any) -> None:
    """Runs PTX `text`. $0 is the address of `word`, a ref [1]; $1 and so on are the int32 `numbers`."""

    def asm(_, ref, *numbers):
        operands = [mgpu.utils.memref_ptr(ref), *(number.registers[()] for number in numbers)]
        constraints = ",".join(["l", *("r" for _ in numbers)])
        nothing = ir.Type.parse("!llvm.void")
        llvm.inline_asm(nothing, operands, _with_space(text, ref), constraints, has_side_effects=True)

    arg_types = (plgpu.RefType(), *(plgpu.Layout.WG_SPLAT for _ in numbers))
    run: Any = plgpu.inline_mgpu(arg_types=arg_types)(asm)
    run(word, *numbers)


def _with_space(text, ref):
    return text.replace(".space", ".shared" if mgpu.utils.is_smem_ref(ref) else ".global")
