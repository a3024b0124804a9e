"""Keys and values of 8 bits in registers: where each number is, as lowered kernels load and convert them.

Against PTX's description of `mma.m16n8k16`: of its right operand [16, 8] a thread has the rows 2 (lane % 4) and the next in
one register, those 8 further down in another, all in column lane // 4.
"""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_fa.backends.gpu.addresses import WARPGROUP, i32, plus_bytes, pointer_to, thread_index
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.gpu.shared_memory import swizzle
from pallas_fa.backends.mma import narrow
from pallas_fa.backends.mma.copies import Copies
from tests.test_mma_copies import emulate

LANE = np.arange(WARPGROUP) % 32
# Within 16 columns, that at each place of the inner dim of Q K^T.
COLUMN = np.array([4 * (place % 8 // 2) + place % 2 + 2 * (place // 8) for place in range(16)])


def store_registers(array, layout, out):
    """Stores each register of `array`, of all threads one after the other."""

    def body(_, array, out):
        for number, register in enumerate(array.registers.flat):
            size = mgpu.utils.bitwidth(register.type) // 8
            words = mgpu.utils.bitcast(register, ir.IntegerType.get_signless(32)) if size == 4 else register
            at = arith.muli(arith.addi(thread_index(), i32(number * WARPGROUP)), i32(size))
            llvm.store(words, plus_bytes(pointer_to(out), at))

    plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))(body)(array, out)


def emulate_operand(load, x, width, wide, out):
    """Fills `out` with the registers of the right operand load(smem), for `x` in shared memory."""

    def body(x, out, smem):
        copies = Copies()
        copies.tile(x, smem, width)
        copies.wait()
        store_registers(load(smem), plgpu.Layout.MMA_RHS(wide), out)

    emulate(body, 1, x, out, plgpu.SMEM(x.shape, x.dtype, transforms=swizzle(x.dtype, width)))


def numbers(dtype, *shape):
    """Finite numbers, as different as there are."""
    bits = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return np.where(np.isfinite(bits.view(dtype).astype(np.float32)), bits, 1).astype(np.uint8).view(dtype)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("wide", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("columns", [64, 128, 192])
def test_keys(dtype, wide, columns):
    rows, first, width = 16, columns - 64, 64 if columns % 128 else 128
    x, out = numbers(dtype, rows, columns), np.zeros((4 * 2 * 2, WARPGROUP, 2), wide)
    emulate_operand(lambda smem: narrow.keys(smem, first, 64, width, np.dtype(wide)), x, width, wide, out)
    for number, (unit, tile, half) in enumerate(np.ndindex(4, 2, 2)):
        for i in range(2):
            column = first + 16 * unit + COLUMN[2 * (LANE % 4) + i + 8 * half]
            np.testing.assert_array_equal(out[number, :, i], x[8 * tile + LANE // 4, column].astype(wide))


@pytest.mark.parametrize("columns", [64, 128, 192])
def test_values(columns):
    dtype, wide, rows, first = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16, 32, 16
    width = 64 if columns % 128 else 128
    x, out = numbers(dtype, rows, columns), np.zeros((columns // 8 * 2, WARPGROUP, 2), wide)
    emulate_operand(lambda smem: narrow.values(smem, first, 16, width, np.dtype(wide)), x, width, wide, out)
    for number, (tile, half) in enumerate(np.ndindex(columns // 8, 2)):
        column = 16 * (tile // 2) + 2 * (LANE // 4) + tile % 2
        for i in range(2):
            row = first + 2 * (LANE % 4) + i + 8 * half
            np.testing.assert_array_equal(out[number, :, i], x[row, column].astype(wide))


@pytest.mark.parametrize("columns", [64, 128])
def test_queries(columns):
    x = np.arange(64 * columns, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(64, columns)
    out = np.zeros_like(x)

    def body(x, out, smem):
        copies = Copies()
        copies.tile(x, smem, 128)
        copies.wait()
        narrow.reorder_queries(smem, 128)
        out[...] = plgpu.load(smem, layout=plgpu.Layout.SMEM_GMEM_COPY((64, columns), jnp.bfloat16, 128))

    emulate(body, 1, x, out, plgpu.SMEM((64, columns), jnp.bfloat16, transforms=swizzle(jnp.bfloat16, 128)))
    want = x.reshape(64, -1, 16)[:, :, COLUMN].reshape(x.shape)
    np.testing.assert_array_equal(out.view(np.uint16), want.view(np.uint16))


def test_output():
    x = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    out = np.zeros((2 * 2 * 2, WARPGROUP, 2), np.float32)

    def body(x, out, smem):
        del smem
        store_registers(narrow.in_order(plgpu.load(x, layout=TILE, optimized=False)), narrow.FOUR_COLUMNS, out)

    emulate(body, 1, x, out, plgpu.SMEM((64, 32), jnp.float32))
    row = np.arange(WARPGROUP) // 32 * 16 + LANE // 4
    for number, (unit, half, pair) in enumerate(np.ndindex(2, 2, 2)):
        for i in range(2):
            column = 4 * (LANE % 4) + 2 * pair + i
            place = 16 * unit + 8 * (column % 2) + column // 2  # even columns in one tile of 8, odd ones in the next
            np.testing.assert_array_equal(out[number, :, i], x[row + 8 * half, place])
