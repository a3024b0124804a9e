"""`Dense`: a bool array as a mask."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.masks import tile_ranges
from pallas_fa.masks.base import Mask
from pallas_fa.operands.pytree import is_array


@dataclasses.dataclass(frozen=True)
class Dense(Mask):
    """`array` itself, bool, broadcastable to [*B, N, T, S]; its broadcast dims are never materialised."""

    array: Any

    def __post_init__(self):
        if not is_array(self.array) or self.array.dtype != jnp.bool_:
            kind = getattr(self.array, "dtype", type(self.array).__name__)
            raise TypeError(
                f"Dense takes a bool array, got {kind}. True means 'may attend': for a 0/1 mask pass `array != 0`; for"
                " an additive mask use pallas_fa.scores.Bias or `bias=`."
            )

    def bind(self, dims, lengths):
        return Dense(dims.broadcastable("mask", self.array))

    def allowed(self, b, n, t, s):
        return self.array

    def kv_range(self, t_lo, t_hi):
        return tile_ranges.hull(
            *tile_ranges.blocks(tile_ranges.reduce_tiles(self.array, 2, t_lo, t_hi, jnp.any), 3, jnp.any)
        )

    def q_range(self, s_lo, s_hi):
        return tile_ranges.hull(
            *tile_ranges.blocks(tile_ranges.reduce_tiles(self.array, 3, s_lo, s_hi, jnp.any), 2, jnp.any)
        )

    def full_kv_range(self, t_lo, t_hi):
        return tile_ranges.first_run(
            *tile_ranges.blocks(tile_ranges.reduce_tiles(self.array, 2, t_lo, t_hi, jnp.all), 3, jnp.all)
        )

    def full_q_range(self, s_lo, s_hi):
        return tile_ranges.first_run(
            *tile_ranges.blocks(tile_ranges.reduce_tiles(self.array, 3, s_lo, s_hi, jnp.all), 2, jnp.all)
        )

    def _tiles(self, axis, lo, hi, other, reduce):
        """`reduce` of each pair of a tile [lo, hi) of `axis` and a block of the other axis, and the size of a block."""
        return tile_ranges.blocks(tile_ranges.reduce_tiles(self.array, axis, lo, hi, reduce), other, reduce)
