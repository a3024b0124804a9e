"""`Dense`: a bool array as a mask."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.masks import tile_ranges
from pallas_fa.masks.base import Mask
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import Range
from pallas_fa.operands.pytree import is_array


@dataclasses.dataclass(frozen=True)
class Dense(Mask):
    """Allows where `array`, bool and broadcastable to [*B, N, T, S], is True; its broadcast dims are never materialised."""

    array: Any

    def __post_init__(self):
        if not is_array(self.array) or self.array.dtype != jnp.bool_:
            kind = self.array.dtype if is_array(self.array) else type(self.array).__name__
            raise TypeError(
                f"Dense takes a bool array, got {kind}. True means 'may attend': for a 0/1 mask pass `array != 0`; for"
                " an additive mask use pallas_fa.scores.Bias or `bias=`."
            )

    def bind(self, dims: Dims, lengths: Any) -> "Dense":
        return Dense(dims.broadcastable("mask", self.array))

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        return self.array

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return tile_ranges.hull(*self._reduce(jnp.any, 2, t_lo, t_hi))

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return tile_ranges.hull(*self._reduce(jnp.any, 3, s_lo, s_hi))

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return tile_ranges.first_run(*self._reduce(jnp.all, 2, t_lo, t_hi))

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return tile_ranges.first_run(*self._reduce(jnp.all, 3, s_lo, s_hi))

    def _reduce(self, reduce, axis, lo, hi):
        """Reduces the array over each tile [lo, hi) of `axis` and each block of the other axis; returns `reduce_blocks`."""
        return tile_ranges.reduce_blocks(tile_ranges.reduce_tiles(self.array, axis, lo, hi, reduce), 5 - axis, reduce)
