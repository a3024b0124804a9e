"""What JAX's interpreter does not have, copies by cp.async and additions to device memory: the addresses, as lowered kernels
compute them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.arrays import KernelArray
from pallas_fa.backends.gpu.grid import AXIS
from pallas_fa.backends.gpu.launch import launch
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.gpu.shared_memory import swizzle
from pallas_fa.backends.mma import arrays
from pallas_fa.backends.mma.backward.dq import DqSums
from pallas_fa.backends.mma.copies import Copies
from pallas_fa.backends.mma.tiles import Tiles
from pallas_fa.operands.dims import Dims
from tests import emulated
from tests.kernel_snapshots import kernels


def emulate(body, ctas, x, out, smem, **more):
    """Runs body(x, out, smem) in each CTA; `out` is filled in place. Returns what each leaves in shared memory.

    `more`: shared memory behind `smem`, by the names of body's other parameters.
    """
    scratch = {"smem": smem} | more

    def run(x):
        lane = plgpu.LoweringSemantics.Lane
        out_type = (jax.ShapeDtypeStruct(out.shape, out.dtype),)
        return launch(body, x, out_type=out_type, ctas=ctas, warpgroups=1, scratch=scratch, semantics=lane)

    (text,) = kernels(run, jax.ShapeDtypeStruct(x.shape, x.dtype))
    shared = sum(int(np.prod(x.shape)) * np.dtype(x.dtype).itemsize for x in scratch.values())
    return emulated.run(text, ctas, [x, out], shared)


def counted(*shape, dtype=jnp.bfloat16):
    """An array of different bits, none of them 0 in all bytes."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.random.default_rng(0).integers(1, 256, size, np.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize(("columns", "dtype", "width"), [(64, "bfloat16", 128), (128, "bfloat16", 128), (64, "int8", 64),
                                                         (32, "int8", 32), (64, "float32", 128)])  # fmt: skip
def test_a_tile_lies_in_shared_memory_as_pallas_reads_it(columns, dtype, width):
    rows, dtype = 64, jnp.dtype(dtype)
    x, out = counted(128, columns, dtype=dtype), np.zeros((128, columns), dtype)

    def body(x, out, smem):
        copies, here = Copies(), pl.ds(lax.axis_index(AXIS) * rows, rows)
        copies.tile(x.at[here], smem, width)
        copies.wait()
        out[here] = plgpu.load(smem, layout=plgpu.Layout.SMEM_GMEM_COPY((rows, columns), dtype, width))

    emulate(body, 2, x, out, plgpu.SMEM((rows, columns), dtype, transforms=swizzle(dtype, width)))
    np.testing.assert_array_equal(out.view(np.uint8), x.view(np.uint8))


@pytest.mark.parametrize(
    ("T", "dim", "rows", "block"),
    [(37, 72, 16, 16), (64, 64, 32, 32), (70, 40, 64, 64), (100, 136, 32, 64), (3, 8, 64, 64), (64, 72, 64, 128)],
)
@pytest.mark.parametrize("layout", ["BTNH", "BNTH"])
def test_tiles_are_cut_at_the_end_of_a_sequence_and_of_a_head(T, dim, rows, block, layout):
    shape = (2, T, 3, dim) if layout == "BTNH" else (2, 3, T, dim)
    x, out = counted(*shape), counted(*shape)
    before, tiles = out.copy(), Tiles(T, dim, np.dtype(jnp.bfloat16), layout, False, block)

    def body(x, out, smem):
        copies, first = Copies(), lax.axis_index(AXIS) * rows
        tiles.load(copies, x, 1, first, 2, smem.at[1])
        copies.wait()
        tiles.store(copies, smem.at[1], out, 1, first, 2)

    ctas = -(-T // block) * (block // rows)
    left = emulate(body, ctas, x, out, tiles.scratch(2, rows=rows))
    head = (1, slice(None), 2) if layout == "BTNH" else (1, 2)
    before[head] = x[head]
    np.testing.assert_array_equal(out.view(np.uint8), before.view(np.uint8))
    for cta, smem in enumerate(left):  # the rest is zeros
        there = max(0, min(rows, T - cta * rows)) * dim * 2
        unused, used = smem.reshape(2, -1)
        assert (unused == 0xAA).all() and np.count_nonzero(used) == there


def test_rows_past_a_length_are_zeros():
    x, tiles = counted(1, 64, 1, 64), Tiles(64, 64, np.dtype(jnp.bfloat16), "BTNH", False, 32)

    def body(x, out, smem):
        copies = Copies()
        tiles.load(copies, x, 0, lax.axis_index(AXIS) * 32, 0, smem, length=jnp.int32(45))
        copies.wait()

    left = emulate(body, 2, x, np.zeros((1, 8), jnp.bfloat16), tiles.scratch(rows=32))
    assert [np.count_nonzero(smem) for smem in left] == [32 * 128, 13 * 128]


@pytest.mark.parametrize("limit", [None, 40])
def test_a_row_of_values(limit):
    x = counted(3, 128, dtype=jnp.float32)

    def body(x, out, smem):
        copies, first = Copies(), lax.axis_index(AXIS) * 64
        copies.row(x.at[1, pl.ds(first, 64)], smem, None if limit is None else limit + first * 0)
        copies.wait()

    left = emulate(body, 2, x, np.zeros((1, 8), jnp.float32), plgpu.SMEM((64,), jnp.float32))
    for cta, smem in enumerate(left):
        expected = x[1, cta * 64 : cta * 64 + 64].copy()
        expected[64 if limit is None else limit :] = 0
        np.testing.assert_array_equal(smem, expected.view(np.uint8))


@pytest.mark.parametrize(
    "shape", [(1, 1, 1, 128), (1, 1, 64, 128), (1, 1, 64 + 128 - 1)], ids=["row", "tile", "diagonals"]
)
def test_parts_of_arrays_past_the_end_are_zeros(shape):
    array = KernelArray.of(jax.ShapeDtypeStruct(shape, jnp.float32), 64)
    x = counted(*jax.eval_shape(array.in_memory, jax.ShapeDtypeStruct(shape, jnp.float32)).shape, dtype=jnp.float32)

    def body(x, out, smem):
        copies = Copies()
        arrays.load(copies, array, x.at[0, 0], 0, lax.axis_index(AXIS) * 64, smem, wgs=None)
        copies.wait()

    left = emulate(body, 3, x, np.zeros((1, 8), jnp.float32), array.scratch(rows=64, columns=64))
    assert [np.count_nonzero(smem) for smem in left] == [left[0].size, left[0].size, 0]


@pytest.mark.parametrize("layout, columns", [("BTNH", 128), ("BNTH", 64)])
def test_tiles_of_dq_are_added_where_they_are_read(layout, columns):
    """Two tiles of dQ^T, [128 columns, 32 queries], in pieces; of them 60 queries of 120 columns there are."""
    sums = DqSums(Dims((2,), 60, 64, 3), layout, 120, 128, 64, key_blocks=1, interpret=False)
    tiles, memory = counted(2, 128, 32, dtype=jnp.int8).astype(np.float32), np.zeros(sums.shape, np.float32)

    def body(tiles, memory, out, smem):
        tile = lax.axis_index(AXIS)
        for column in range(0, 128, columns):
            x = plgpu.load(tiles.at[tile, pl.ds(column, columns)], layout=TILE, optimized=False)
            sums.add(memory, x, 1, 2, 0, tile * 32, column)

    def run(*inputs):
        lane, out_type = plgpu.LoweringSemantics.Lane, (jax.ShapeDtypeStruct((8,), jnp.float32),)
        scratch = {"smem": plgpu.SMEM((8,), jnp.float32)}
        return launch(body, *inputs, out_type=out_type, ctas=2, warpgroups=1, scratch=scratch, semantics=lane)

    (text,) = kernels(run, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (tiles, memory)))
    emulated.run(text, 2, [tiles, memory, np.zeros(8, np.float32)], 32)
    found = np.asarray(sums.total(jnp.asarray(memory), 2.0, jnp.float32))
    expected = np.zeros(found.shape, np.float32)
    head = (1, slice(None), 2) if layout == "BTNH" else (1, 2)
    expected[head] = 2 * tiles.swapaxes(1, 2).reshape(64, 128)[:60, :120]
    np.testing.assert_array_equal(found, expected)
