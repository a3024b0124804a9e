"""`Segments`: packed documents."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_fa.masks import tile_ranges
from pallas_fa.masks.base import Mask
from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.intervals import Range

_NUMBER_THEM = "Number the documents: np.unique(ids, return_inverse=True)[1], of the ids of queries and keys together."


def check_ids(**ids: Any) -> None:
    """Raises unless the int arrays `ids`, those of queries and of keys, by name, can be compared as they are."""
    for name, x in ids.items():
        offsets.check_fits(name, x, _NUMBER_THEM)
    dtypes = [jax.dtypes.canonicalize_dtype(x.dtype) for x in ids.values()]
    if dtypes[0] == dtypes[1]:
        return
    common = jnp.promote_types(*dtypes)
    if not all(np.can_cast(dtype, common) and jnp.issubdtype(common, jnp.integer) for dtype in dtypes):
        given = " and ".join(f"{name}.dtype={dtype}" for name, dtype in zip(ids, dtypes, strict=True))
        raise ValueError(
            f"{given} have no integer dtype in common, so that different ids could be taken for one. Convert both to one"
            " dtype, such as int32."
        )


@dataclasses.dataclass(frozen=True)
class Segments(Mask):
    """Allows q_ids[t] == kv_ids[s], as for packed documents. No id is special.

    Attributes:
      q_ids: int [*B, T], or [T] for the whole batch.
      kv_ids: int [*B, S], or [S] for the whole batch.

    Raises ValueError where JAX's integers cannot hold the ids (those of traced arrays are not known).
    """

    q_ids: Any
    kv_ids: Any

    def __post_init__(self):
        for name in ("q_ids", "kv_ids"):
            object.__setattr__(self, name, offsets.int_array(name, getattr(self, name)))
        check_ids(q_ids=self.q_ids, kv_ids=self.kv_ids)

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
