"""Numbers of 8 bits in a register, converted to 16 bits by instructions of compute capability 8.9 and above; exact."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

from pallas_fa.backends.gpu.narrow_keys import PTX_NAMES


def converted(word: Any, source: np.dtype, dtype: np.dtype, interleaved: bool = False) -> list[Any]:
    """Returns four bytes as two words of two numbers of `dtype`: the first two and the others, or the even and the odd ones.

    Words are int32 in the terms of MLIR.
    """
    name, to_bfloat16 = PTX_NAMES[np.dtype(source).name], dtype == jnp.bfloat16
    lines = [".reg .b16 a, b, c, d; .reg .b32 x; .reg .f32 lo, hi;"]
    lines += ["prmt.b32 x, $2, 0, 0x3120;" if interleaved else "mov.b32 x, $2;", "mov.b32 {a, b}, x;"]
    for half, result in (("a", "$0"), ("b", "$1")):
        lines += [f"cvt.rn.f16x2.{name}x2 {'x' if to_bfloat16 else result}, {half};"]
        if to_bfloat16:
            lines += [
                "mov.b32 {c, d}, x;",
                "cvt.f32.f16 lo, c; cvt.f32.f16 hi, d;",
                f"cvt.rn.bf16x2.f32 {result}, hi, lo;",
            ]
    i32 = ir.IntegerType.get_signless(32)
    two = llvm.StructType.get_literal([i32, i32])
    found = llvm.inline_asm(two, [word], "{" + " ".join(lines) + "}", "=&r,=&r,r", has_side_effects=False)
    return [llvm.extractvalue(i32, found, [i]) for i in range(2)]
