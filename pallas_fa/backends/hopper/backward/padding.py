"""Padding in the backward kernel: rows past a sequence length, which may hold NaN, become zeros in shared memory."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.gradient_tile import TilePlace
from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.hopper.backward.warpgroup import Slots, Warpgroup
from pallas_fa.backends.hopper.tiles import Tiles
from pallas_fa.masks.lengths import lengths_of


def zero_stationary(w: Warpgroup) -> None:
    """Zeroes keys past the key length, the longest of the query heads that share them."""
    group = w.plan.problem.group
    per_head = lengths_of(w.plan.problem.mask).kv_lengths.shape[1] > 1
    lengths = [_lengths(w, w.block.head * group + g).kv_lengths for g in range(group if per_head else 1)]
    length = lengths[0]
    for other in lengths[1:]:
        length = jnp.maximum(length, other)
    start = w.block.start

    @pl.when(start + w.plan.config.block > length)
    def _():
        _zero_rows(w.stationary_qk, w.plan.tiles.stationary_qk, w.wg * 64, length - start)
        plgpu.commit_smem()
        w.barriers["wgs_meet"].wait()


def zero_streamed(w: Warpgroup, at: TilePlace, slots: Slots) -> None:
    """Zeroes a tile's rows past the length of their sequence, of operands of matmuls that sum over these rows."""
    plan, c = w.plan, w.plan.config
    lengths = _lengths(w, at.n)
    length = lengths.q_lengths if plan.kind.keys_stationary else lengths.kv_lengths
    operands = (
        (w.streamed_qk.at[slots.qk], plan.tiles.streamed_qk, plan.kind.accumulates_qk),
        (w.streamed_pv.at[slots.pv], plan.tiles.streamed_pv, plan.kind.accumulates_pv),
    )

    @pl.when(at.streamed + c.width > length)
    def _():
        for smem, tiles, is_summed in operands:
            for part in range(c.width // 64 if is_summed else 0):  # the warpgroups alternate
                mine = w.wg == part % c.compute_wgs
                zero = lambda smem=smem, tiles=tiles, part=part: _zero_rows(
                    smem, tiles, part * 64, length - at.streamed
                )
                pl.when(mine)(zero) if c.compute_wgs > 1 else zero()
        plgpu.commit_smem()
        w.barriers["wgs_meet"].wait()


def _lengths(w, n):
    _, mask = w.plan.arrays.with_scalars(w.scalars(n))
    return lengths_of(mask)


def _zero_rows(smem: Any, tiles: Tiles, first: Any, length: Any) -> None:
    """Zeroes rows at and past `length` among the 64 rows from row `first` of a tile."""
    for chunk in range(tiles.copies):
        for column in range(0, tiles.chunk, tiles.piece):
            piece = smem.at[chunk, pl.ds(first, 64), pl.ds(column, tiles.piece)]
            row = first + plgpu.broadcasted_iota(jnp.int32, (64, tiles.piece), 0, layout=TILE)
            values = plgpu.load(piece, layout=TILE)
            piece[...] = jnp.where(row < length, values, jnp.zeros((), values.dtype))
