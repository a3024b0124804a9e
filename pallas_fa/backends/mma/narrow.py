"""Keys and values of 8 bits as right operands of matmuls of 16 bits, converted in registers.

`ldmatrix` brings each thread four bytes of one row, or two of each of two rows. An instruction of `mma.sync` asks for other
elements than that, but a matmul sums over its inner dim in any order, and gives its columns in the order of its right
operand. So within each 16 columns of the head dim `keys` are in the order in which they come, which must be that of the
queries (`reorder_queries`), and what `values` are multiplied to has its columns in another one (`in_order`).

The conversions are instructions of compute capability 8.9 and above, and exact.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from pallas_fa.backends.gpu.addresses import WARPGROUP, SwizzledRow, i32, plus_bytes, pointer_to, swizzled, thread_index
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.gpu.narrow_keys import UNIT
from pallas_fa.backends.gpu.narrow_words import converted
from pallas_fa.backends.gpu.shared_memory import swizzle

FOUR_COLUMNS = plgpu.Layout.TILED(  # as TILE, but for the columns: four threads have four each of 16
    mgpu.fragmented_array.Tiling(((64, 16), (16, 16), (8, 16), (4,), (2,))),
    warp_dims=(-8,),
    lane_dims=(-4, -3),
    vector_dim=-1,
)


def reorder_queries(ref: Any, width: int) -> None:
    """Brings the columns of queries [rows, dim] of 16 bits in shared memory into the order in which `keys` have theirs.

    Each 16 columns are 32 bytes, which one thread reads and writes: the even pairs, then the odd ones. `width`: bytes of a
    row that lie together.
    """
    rows, units = ref.shape[0], ref.shape[1] // UNIT
    assert rows * units % WARPGROUP == 0, "as many units for each thread"

    def body(_, smem):
        words = ir.VectorType.get((4,), ir.IntegerType.get_signless(32))
        for first in range(0, rows * units, WARPGROUP):
            number = arith.addi(thread_index(), i32(first))
            row, unit = arith.divui(number, i32(units)), arith.remui(number, i32(units))
            of_row = SwizzledRow(smem, arith.divui(row, i32(8)), arith.remui(row, i32(8)), width)
            byte = arith.muli(unit, i32(2 * UNIT))
            places = [of_row.place(arith.addi(byte, i32(half))) for half in (0, UNIT)]
            low, high = (llvm.load(words, place) for place in places)
            for place, pairs in zip(places, ([0, 2, 4, 6], [1, 3, 5, 7]), strict=True):
                llvm.store(vector.shuffle(low, high, pairs), place)

    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzle(ref.dtype, width)),))(body)
    run(ref)


def in_order(out: Any) -> Any:
    """Returns products with `values` [rows, columns], a tile, with their columns in the order of memory.

    A thread has the four columns from 4 i on of each 16, the even ones in one register and the odd ones in another.
    """

    def body(_, x):
        target, tiles = FOUR_COLUMNS.to_mgpu(), x.registers.reshape(-1, 2)
        registers = np.empty((len(tiles) // 2, 2, 2), object)  # the 16 columns, the upper or lower rows, the pair
        for unit, half, pair in np.ndindex(registers.shape):
            even, odd = tiles[2 * unit, half], tiles[2 * unit + 1, half]
            registers[unit, half, pair] = vector.shuffle(even, odd, [pair, 2 + pair])
        registers = registers.reshape(target.registers_shape(x.shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    of: Any = plgpu.ShapeDtypeStruct(out.shape, out.dtype, layout=FOUR_COLUMNS)
    run: Any = plgpu.inline_mgpu(arg_types=(TILE,), return_type=of)(body)
    return run(out)


def keys(ref: Any, first: int, columns: int, width: int, dtype: np.dtype) -> Any:
    """Returns columns `first`, ... of keys [rows, dim] in shared memory as a right operand [columns, rows] of `dtype`.

    `width`: bytes of a row that lie together in shared memory.
    """
    rows, convert = ref.shape[0], functools.partial(_converted, source=ref.dtype, dtype=dtype)

    def load(_, smem):
        registers = np.empty((columns // UNIT, rows // 8, 2), object)
        matrices = _Matrices(smem, width, transposed=False)
        for unit in range(0, columns // UNIT, 2):
            for tile in range(0, rows // 8, 2):
                found = matrices.load(tile, (first // UNIT) + unit, rows_first=False)
                for i, register in enumerate(found):
                    registers[unit + i % 2, tile + i // 2] = convert(register)
        return registers

    return _operand(load, ref, (columns, rows), width, dtype)


def values(ref: Any, first: int, rows: int, width: int, dtype: np.dtype) -> Any:
    """Returns rows `first`, ... of values [all rows, dim] in shared memory as a right operand [rows, dim] of `dtype`."""
    columns = ref.shape[1]
    convert = functools.partial(_converted, source=ref.dtype, dtype=dtype, interleaved=True)

    def load(_, smem):
        registers = np.empty((rows // 16, columns // 8, 2), object)
        matrices = _Matrices(smem, width, transposed=True)
        for row in range(0, rows, 16):
            for unit in range(0, columns // UNIT, 2):
                found = matrices.load((first + row) // 8, unit, rows_first=True)
                for i, register in enumerate(found):
                    half, column = i % 2, 2 * (unit + i // 2)
                    registers[row // 16, column : column + 2, half] = convert(register)
        return registers

    return _operand(load, ref, (rows, columns), width, dtype)


def _operand(load, ref, shape, width, dtype):
    layout = plgpu.Layout.MMA_RHS(dtype)

    def operand(context, smem):
        target = layout.to_mgpu()
        registers = load(context, smem).reshape(target.registers_shape(shape))
        return mgpu.FragmentedArray(_registers=registers, _layout=target, _is_signed=None)

    of: Any = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout)
    run: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(swizzle(ref.dtype, width)),), return_type=of)(operand)
    return run(ref)


class _Matrices:
    """8 x 8 matrices of 16 bits in a tile of shared memory, which this warp loads four at a time.

    The tile lies as `copies.Copies` leaves it: pieces of [8, width bytes], whose 16 bytes of a row are XORed with the row.
    """

    def __init__(self, smem: Any, width: int, transposed: bool):
        self.start, self.width, self.transposed = pointer_to(smem), width, transposed
        self.pieces = ir.MemRefType(smem.type).shape[1]  # along a row
        lane = arith.andi(thread_index(), i32(31))
        bit = lambda i: arith.andi(arith.shrui(lane, i32(i)), i32(1))
        self.low, self.high = bit(3), bit(4)  # of the number of the matrix whose row this lane addresses
        self.row = swizzled(arith.muli(arith.andi(lane, i32(7)), i32(width)), width)

    def load(self, tile: int, unit: int, rows_first: bool) -> list[Any]:
        """Returns a register of each of four matrices.

        They are those of row tiles `tile` and `tile` + 1 and of units `unit` and `unit` + 1; with `rows_first` the two row
        tiles of a unit follow each other, else the two units of a row tile.
        """
        of_tile, of_unit = (self.low, self.high) if rows_first else (self.high, self.low)
        piece, byte = divmod(unit * UNIT, self.width)
        at = arith.xori(arith.xori(self.row, arith.muli(of_unit, i32(UNIT))), i32(byte))
        at = arith.addi(at, arith.muli(of_tile, i32(self.pieces * 8 * self.width)))
        at = arith.addi(at, i32((tile * self.pieces + piece) * 8 * self.width))
        found = nvvm.ldmatrix(
            plus_bytes(self.start, at),
            layout=nvvm.MMALayout.col if self.transposed else nvvm.MMALayout.row,
            num=4,
            shape=ir.Attribute.parse("#nvvm.ld_st_matrix_shape<m=8, n=8>"),
            elt_type=nvvm.LdStMatrixEltType.B16,
        )
        return [llvm.extractvalue(ir.IntegerType.get_signless(32), found, [i]) for i in range(4)]


def _converted(register, source, dtype, interleaved=False):
    """Returns four bytes as two registers of `dtype`: the first two and the others, or the even ones and the odd ones."""
    pair = ir.VectorType.get((2,), ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get())
    return [mgpu.utils.bitcast(word, pair) for word in converted(register, source, dtype, interleaved)]
