"""`RelativeBias`: a bias that depends on the distance between query and key alone."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from pallas_fa.operands.dims import Dims
from pallas_fa.scores.base import Score, float_array


@dataclasses.dataclass(frozen=True)
class RelativeBias(Score):
    """Adds strip[..., s - t + (T - 1)], with a gradient, in O(T + S) memory.

    For the relative position biases of T5 (Raffel et al., arXiv 1910.10683; look the buckets up outside), KERPLE (Chi et
    al., arXiv 2205.09921), or learned offsets.

    Attributes:
      strip: float, broadcastable to [*B, N, T + S - 1]; entry i of the last dim is for s - t = i - (T - 1), so the first is
        for the last query and key 0. Or a function of the offsets s - t, int32 [T + S - 1] from -(T - 1) to S - 1, that
        returns such an array; it is called once for each call of attention, outside the kernels. What it closes over gets
        gradients. In `ring_attention`, T and S are the lengths of the whole sequences.
    """

    strip: Any

    def __post_init__(self):
        if not callable(self.strip):
            object.__setattr__(self, "strip", float_array("strip", self.strip))

    def bind(self, dims: Dims, lengths: Any) -> "RelativeBias":
        strip = self.strip
        if callable(strip):
            strip = float_array("strip(offsets)", strip(jnp.arange(1 - dims.T, dims.S, dtype=jnp.int32)))
        return RelativeBias(dims.diagonal("strip", strip))

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return x + self.strip
