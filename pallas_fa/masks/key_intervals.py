"""`KeyIntervals`: each query attends to one interval of keys."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_fa.masks import tile_ranges
from pallas_fa.masks.base import Mask
from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import UNBOUNDED, Range
from pallas_fa.operands.part import Part


@dataclasses.dataclass(frozen=True)
class KeyIntervals(Mask):
    """Allows starts[t] <= s < ends[t].

    `from_cu_seqlens` makes one of packed documents.

    Attributes:
      starts: int [*B, T], or [T] for the whole batch; or [*B, N, T, 1] for intervals per head.
      ends: likewise; a query whose end is not past its start attends to nothing.
    """

    starts: Any
    ends: Any

    def __post_init__(self):
        for name in ("starts", "ends"):
            object.__setattr__(self, name, offsets.int_array(name, getattr(self, name)))

    def bind(self, dims: Dims, lengths: Any) -> "KeyIntervals":
        starts, ends = (dims.spanning(name, getattr(self, name), "BT") for name in ("starts", "ends"))
        for name, x in (("starts", starts), ("ends", ends)):
            if x.shape[3] > 1:
                raise ValueError(f"{name}.shape={x.shape} varies over the keys. Give one value per query: [*B, T].")
        starts, ends = (jnp.clip(offsets.as_int32(x), 0, dims.S) for x in (starts, ends))
        return KeyIntervals(starts, jnp.maximum(starts, ends))

    def moved(self, part: Part) -> "KeyIntervals":
        first = part.start[3]
        return KeyIntervals(self.starts - first, self.ends - first)

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        # One comparison for both bounds: before the start, the difference wraps around to a large number.
        return (s - self.starts).astype(jnp.uint32) < (self.ends - self.starts).astype(jnp.uint32)

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        some = self.starts < self.ends  # an empty interval must not widen the range
        starts, ends = jnp.where(some, self.starts, UNBOUNDED), jnp.where(some, self.ends, -UNBOUNDED)
        return self._of_tiles(starts, t_lo, t_hi, jnp.min), self._of_tiles(ends, t_lo, t_hi, jnp.max)

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return self._of_tiles(self.starts, t_lo, t_hi, jnp.max), self._of_tiles(self.ends, t_lo, t_hi, jnp.min)

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        starts, ends = jnp.where(self.starts < self.ends, self.starts, UNBOUNDED), self.ends
        (starts, block), (ends, _) = (
            tile_ranges.reduce_blocks(x, 2, f) for x, f in ((starts, jnp.min), (ends, jnp.max))
        )
        return tile_ranges.hull((starts < _of_columns(s_hi)) & (ends > _of_columns(s_lo)), block)

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        (starts, block), (ends, _) = (
            tile_ranges.reduce_blocks(x, 2, f) for x, f in ((self.starts, jnp.max), (self.ends, jnp.min))
        )
        return tile_ranges.first_run((starts <= _of_columns(s_lo)) & (ends >= _of_columns(s_hi)), block)

    @staticmethod
    def _of_tiles(x, lo, hi, reduce):
        return tile_ranges.reduce_tiles(x, 2, lo, hi, reduce)[..., 0]


def _of_columns(bounds):
    """[tiles] -> [1, 1, tiles, 1]"""
    return np.atleast_1d(bounds)[None, None, :, None]
