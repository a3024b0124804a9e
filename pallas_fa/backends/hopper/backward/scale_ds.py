"""dS in the range of float16: a power of two times it, through the factor of dP that a CTA holds (see `float16_range`)."""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_fa.backends.gpu.layouts import TILE
from pallas_fa.backends.hopper.backward.warpgroup import Warpgroup, on_first_part


def scale_stationary(w: Warpgroup, factor: Any) -> None:
    """Scales the stationary factor of dP = dO V^T where dS might pass the largest number, which is rare."""

    @pl.when(factor < 1)
    def _():
        on_first_part(w, lambda: _scale_rows(w, factor))
        plgpu.commit_smem()
        if w.plan.column_parts > 1:
            w.barriers["wgs_meet"].wait()  # other warpgroups read these rows, too


def _scale_rows(w, factor):
    tiles = w.plan.tiles.stationary_pv
    for chunk in range(tiles.copies):
        for column in range(0, tiles.chunk, tiles.piece):
            piece = w.stationary_pv.at[chunk, w.rows, pl.ds(column, tiles.piece)]
            values = plgpu.load(piece, layout=TILE)
            piece[...] = times(values.astype(jnp.float32), factor).astype(values.dtype)


def times(x: Any, factor: Any) -> Any:
    """Returns x times a number or a scalar."""
    return x * (factor if isinstance(factor, float) else jnp.broadcast_to(factor, x.shape))
