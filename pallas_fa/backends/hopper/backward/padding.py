"""Padding in the backward kernel: rows past a sequence length, which may hold NaN, become zeros in shared memory."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.gradient_tile import TilePlace
from pallas_fa.backends.gpu.layouts import TILE, indices
from pallas_fa.backends.hopper.backward.warpgroup import Slots, Warpgroup
from pallas_fa.backends.hopper.tiles import Tiles
from pallas_fa.masks.lengths import lengths_of


def zero_stationary(w: Warpgroup) -> None:
    """Zeroes keys past the key length, the longest of the query heads that share them."""
    group = w.plan.group
    per_head = lengths_of(w.plan.problem.mask).kv_lengths.shape[1] > 1
    lengths = [_lengths(w, w.block.head * group + g).kv_lengths for g in range(group if per_head else 1)]
    length = lengths[0]
    for other in lengths[1:]:
        length = jnp.maximum(length, other)
    start = w.block.start

    @pl.when(start + w.plan.config.block > length)
    def _():
        _zero_rows(w, w.stationary_qk, w.plan.tiles.stationary_qk, w.wg * 64, length - start)
        plgpu.commit_smem()
        w.barriers["wgs_meet"].wait()


def zero_streamed(w: Warpgroup, at: TilePlace, slots: Slots, *names: str) -> None:
    """Zeroes a tile's rows past the length of their sequence, of the streamed operands `names`: "qk" and "pv".

    Where elements are tested for padding, only those of operands of matmuls that sum over these rows.
    """
    plan, c = w.plan, w.plan.config
    if not plan.padding.streamed or not (at.is_boundary or plan.padding.by_rows):
        return
    lengths = _lengths(w, at.n)
    length = lengths.q_lengths if plan.kind.keys_stationary else lengths.kv_lengths
    operands = [
        (
            getattr(w, f"streamed_{name}").at[getattr(slots, name)],
            getattr(plan.tiles, f"streamed_{name}"),
            plan.padding.by_rows or getattr(plan.kind, f"accumulates_{name}"),
        )
        for name in names
    ]

    @pl.when(at.streamed + c.width > length)
    def _():
        for smem, tiles, is_summed in operands:
            for part in range(c.width // 64 if is_summed else 0):  # the warpgroups alternate
                mine = w.wg == part % c.compute_wgs
                zero = lambda smem=smem, tiles=tiles, part=part: _zero_rows(
                    w, smem, tiles, part * 64, length - at.streamed
                )
                pl.when(mine)(zero) if c.compute_wgs > 1 else zero()
        plgpu.commit_smem()
        w.barriers["wgs_meet"].wait()


def zero_keys(w: Warpgroup, x: Any, n: Any) -> Any:
    """Returns x, [this warpgroup's keys, ..], with zeros in the rows of keys past the key length of query head n."""
    length = _lengths(w, n).kv_lengths
    length = w.plan.stationary if length is None else length
    return _with_zeros(w, x, w.start, length)


def _lengths(w, n):
    _, mask = w.plan.arrays.with_scalars(w.scalars(n))
    return lengths_of(mask)


def _zero_rows(w: Warpgroup, smem: Any, tiles: Tiles, first: Any, length: Any) -> None:
    """Zeroes rows at and past `length` among the 64 rows from row `first` of a tile."""
    for chunk in range(tiles.copies):
        for column in range(0, tiles.chunk, tiles.piece):
            piece = smem.at[chunk, pl.ds(first, 64), pl.ds(column, tiles.piece)]
            piece[...] = _with_zeros(w, plgpu.load(piece, layout=TILE), first, length)


def _with_zeros(w: Warpgroup, x: Any, first: Any, length: Any) -> Any:
    """Returns the tile x, whose rows are the positions from `first` on, with zeros in those at and past `length`."""
    past = first + indices(x.shape, 0, w.plan.interpret) - length
    if x.dtype.itemsize > 2:
        return jnp.where(past < 0, x, jnp.zeros((), x.dtype))
    # Two neighbours of a row are one register: their bits take one instruction, a selection takes them apart.
    bits = lax.bitcast_convert_type(x, jnp.int16) & (past >> 31).astype(jnp.int16)
    return lax.bitcast_convert_type(bits, x.dtype)
