"""`Segments`: packed documents."""

import dataclasses
from typing import Any

from pallas_fa.masks import tile_ranges
from pallas_fa.masks.base import Mask
from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import Range


@dataclasses.dataclass(frozen=True)
class Segments(Mask):
    """Allows q_ids[t] == kv_ids[s], as for packed documents. No id is special.

    Attributes:
      q_ids: int [*B, T], or [T] for the whole batch.
      kv_ids: int [*B, S], or [S] for the whole batch.
    """

    q_ids: Any
    kv_ids: Any

    def __post_init__(self):
        for name in ("q_ids", "kv_ids"):
            object.__setattr__(self, name, offsets.int_array(name, getattr(self, name)))

    def bind(self, dims: Dims, lengths: Any) -> "Segments":
        q_ids, kv_ids = dims.spanning("q_ids", self.q_ids, "BT"), dims.spanning("kv_ids", self.kv_ids, "BS")
        for name, ids, axis, remedy in (("q_ids", q_ids, 3, "query: [*B, T]"), ("kv_ids", kv_ids, 2, "key: [*B, S]")):
            if ids.shape[axis] > 1:
                raise ValueError(f"{name}.shape={ids.shape} varies over both sequences. Give one id per {remedy}.")
        return Segments(q_ids, kv_ids)

    def allowed(self, b: Any, n: Any, t: Any, s: Any) -> Any:
        return self.q_ids == self.kv_ids

    def kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return tile_ranges.range_of_shared_ids(self.q_ids, 2, t_lo, t_hi, self.kv_ids, 3)

    def q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return tile_ranges.range_of_shared_ids(self.kv_ids, 3, s_lo, s_hi, self.q_ids, 2)

    def full_kv_range(self, t_lo: Any, t_hi: Any) -> Range:
        return tile_ranges.range_of_one_id(self.q_ids, 2, t_lo, t_hi, self.kv_ids, 3)

    def full_q_range(self, s_lo: Any, s_hi: Any) -> Range:
        return tile_ranges.range_of_one_id(self.kv_ids, 3, s_lo, s_hi, self.q_ids, 2)
