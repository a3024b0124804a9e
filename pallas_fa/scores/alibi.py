"""`Alibi`: attention with linear biases (Press et al., arXiv 2108.12409)."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.part import Part
from pallas_fa.scores.base import Score, float_array


@dataclasses.dataclass(frozen=True)
class Alibi(Score):
    """Subtracts slope * |t + offset - s| (ALiBi, Press et al., arXiv 2108.12409).

    Attributes:
      slopes: float, [N] or [*B, N].
      offset: an int, or an int array [*B], for decoding into a cache.
      align: "top_left" counts from the starts of the sequences. "bottom_right" gives the last query and the last key
        distance 0: it adds S - T to the offset, or the difference of the sequence lengths, if these are given.
    """

    slopes: Any
    offset: Any = 0
    align: offsets.Align = "top_left"

    def __post_init__(self):
        offsets.check_align("Alibi", self.align)
        object.__setattr__(self, "slopes", float_array("slopes", self.slopes))
        object.__setattr__(self, "offset", offsets.check("offset", self.offset))

    def bind(self, dims: Dims, lengths: Any) -> "Alibi":
        slopes = dims.spanning("slopes", self.slopes, "BN")  # takes [N], too
        return Alibi(slopes, offsets.bind_aligned(self.offset, self.align, dims, lengths))

    def counted_from_start(self, dims: Dims) -> str | None:
        return "Alibi" if offsets.counts_from_start(self.align, self.offset) else None

    def at_end(self) -> "Alibi":
        offsets.check_at_end("Alibi", self.align, self.offset)
        return dataclasses.replace(self, align="bottom_right")

    def moved(self, part: Part) -> "Alibi":
        return Alibi(self.slopes, self.offset + part.shift)

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return x - self.slopes * jnp.abs(t + self.offset - s).astype(x.dtype)
