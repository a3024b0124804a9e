"""`Segments`: packed documents."""

import dataclasses
from typing import Any

from pallas_fa.masks import tile_ranges
from pallas_fa.masks.base import Mask
from pallas_fa.operands import offsets


@dataclasses.dataclass(frozen=True)
class Segments(Mask):
    """q_ids[t] == kv_ids[s]: packed documents. Ids are compared for equality; no value is special.

    Shapes [*B, T] and [*B, S] (or [T] and [S], alike for the whole batch), int.
    """

    q_ids: Any
    kv_ids: Any

    def __post_init__(self):
        for name in ("q_ids", "kv_ids"):
            object.__setattr__(self, name, offsets.int_array(name, getattr(self, name)))

    def bind(self, dims, lengths) -> "Segments":
        q_ids, kv_ids = dims.spanning("q_ids", self.q_ids, "BT"), dims.spanning("kv_ids", self.kv_ids, "BS")
        for name, ids, other, own in (("q_ids", q_ids, 3, "query: [*B, T]"), ("kv_ids", kv_ids, 2, "key: [*B, S]")):
            if ids.shape[other] > 1:
                raise ValueError(f"{name}.shape={ids.shape} varies over both sequences. Give one id per {own}.")
        return Segments(q_ids, kv_ids)

    def allowed(self, b, n, t, s):
        return self.q_ids == self.kv_ids

    def kv_range(self, t_lo, t_hi):
        return tile_ranges.of_shared_ids(self.q_ids, 2, t_lo, t_hi, self.kv_ids, 3)

    def q_range(self, s_lo, s_hi):
        return tile_ranges.of_shared_ids(self.kv_ids, 3, s_lo, s_hi, self.q_ids, 2)

    def full_kv_range(self, t_lo, t_hi):
        return tile_ranges.of_one_id(self.q_ids, 2, t_lo, t_hi, self.kv_ids, 3)

    def full_q_range(self, s_lo, s_hi):
        return tile_ranges.of_one_id(self.kv_ids, 3, s_lo, s_hi, self.q_ids, 2)
