"""Keys and values of 8 bits: the load warpgroup converts tiles that TMA fills to those that the tensor cores read.

These multiply numbers of one type, and queries keep theirs (evidence: decode/narrow-keys).
"""

from itertools import batched
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_fa.backends.gpu.addresses import SwizzledRow, i32, thread_index
from pallas_fa.backends.gpu.narrow_keys import UNIT
from pallas_fa.backends.gpu.narrow_words import converted
from pallas_fa.backends.gpu.shared_memory import swizzle

_GROUP = 8  # rows of a piece of swizzled memory
_UNITS = 4  # of UNIT columns, which four threads take of a row
_AT_A_TIME = 4  # units that a thread has loaded before it converts them


def convert(source: Any, target: Any, first: int, source_width: int, target_width: int, interpret: bool) -> None:
    """Writes columns `first`, ... of `source` [rows, dim], of 8 bits, to `target` [rows, columns], of 16.

    All threads of a warpgroup take part. The widths are those of swizzled pieces of a row, in bytes.
    """
    rows, columns = target.shape
    if interpret:
        target[...] = source[:, first : first + columns].astype(jnp.float32).astype(target.dtype)
        return

    def body(_, source_smem, target_smem):
        words = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
        lane, warp = arith.andi(thread_index(), i32(31)), arith.divui(thread_index(), i32(32))
        unit = arith.andi(lane, i32(_UNITS - 1))
        # Eight threads access memory at a time: of two rows that differ by 5, in whose swizzles no bank comes twice.
        row = arith.xori(arith.shrui(lane, i32(3)), arith.muli(arith.andi(arith.shrui(lane, i32(2)), i32(1)), i32(5)))
        read = SwizzledRow(source_smem, warp, row, source_width)
        written = SwizzledRow(target_smem, warp, row, target_width)
        places = []  # of what is read, and of its two halves once they are converted
        for start in range(0, columns, UNIT * _UNITS):
            byte = arith.addi(arith.muli(unit, i32(UNIT)), i32(start))
            halves = [arith.addi(arith.muli(byte, i32(2)), i32(half * UNIT)) for half in range(2)]
            whole, halves = read.place(arith.addi(byte, i32(first))), [written.place(x) for x in halves]
            for group in range(0, rows // _GROUP, 4):  # one for each warp
                places.append((read.later(whole, group), [written.later(x, group) for x in halves]))
        for some in batched(places, _AT_A_TIME):
            for found, halves in [(llvm.load(words, place), halves) for place, halves in some]:
                numbers = []
                for i in range(4):
                    word = vector.extract(found, dynamic_position=[], static_position=[i])
                    numbers += converted(word, source.dtype, target.dtype)
                for place, half in zip(halves, batched(numbers, 4), strict=True):
                    llvm.store(vector.from_elements(words, list(half)), place)

    layouts = (swizzle(ref.dtype, width) for ref, width in ((source, source_width), (target, target_width)))
    run: Any = plgpu.inline_mgpu(arg_types=tuple(map(plgpu.RefType, layouts)))(body)
    run(source, target)
