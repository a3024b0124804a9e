"""`RelativeBias`: a bias that depends on the distance between query and key alone."""

import dataclasses
import inspect
from typing import Any

import jax.numpy as jnp

from pallas_fa.operands import offsets
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import is_array
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
      align: as in `masks.Causal`, how t is counted. "bottom_right" is for functions, whose offsets then are those from the
        position of each query, for decoding into a cache. An array has the offsets of one call.
    """

    strip: Any
    align: offsets.Align = "top_left"

    def __post_init__(self):
        offsets.check_align("RelativeBias", self.align)
        if self._is_function:
            _check_signature(self.strip)
        else:
            object.__setattr__(self, "strip", float_array("strip", self.strip))
            if self.align != "top_left":
                raise ValueError(
                    f"strip of shape {tuple(self.strip.shape)} with align={self.align!r}: an array has one value for each"
                    " offset of one call, so that there is nothing to align. Pass a function of the offsets, such as"
                    " lambda offset: table[offset + longest]."
                )

    @property
    def _is_function(self):
        return callable(self.strip) and not is_array(self.strip)  # a variable of Flax nnx is both

    def bind(self, dims: Dims, lengths: Any) -> "RelativeBias":
        if not self._is_function:
            return RelativeBias(dims.diagonal("strip", self.strip))
        start = offsets.bind_aligned(0, self.align, dims, lengths)  # of query 0
        if not is_array(start):
            return RelativeBias(dims.diagonal("strip", self._at(1 - dims.T - start, dims.S - start)))
        # Sequences start at different positions: each reads its part of the values of all offsets that there may be.
        every = Dims(dims.batch, dims.T + dims.S, dims.T + dims.S, dims.N)
        values = every.diagonal("strip", self._at(1 - every.T, every.S))
        index = jnp.arange(dims.T + dims.S - 1, dtype=jnp.int32)[None, None] + dims.S - start[..., 0]
        leading = jnp.broadcast_shapes(values.shape[:2], index.shape[:2])
        values, index = (jnp.broadcast_to(x, (*leading, x.shape[2])) for x in (values, index))
        return RelativeBias(jnp.take_along_axis(values, index, axis=2, mode="clip"))

    def _at(self, first: Any, end: Any) -> Any:
        """Returns the values at the offsets first <= s - t < end."""
        offset = jnp.arange(first, end, dtype=jnp.int32)
        try:
            values = self.strip(offset)
        except (TypeError, ValueError) as e:
            reason = (str(e).splitlines() or [type(e).__name__])[0]
            raise (ValueError if isinstance(e, ValueError) else TypeError)(
                f"strip={self.strip!r} failed: {reason.rstrip('.')}. It is called with the offsets s - t, int32"
                f" {list(offset.shape)}. Where it closes over arrays on explicit mesh axes, call it before attention, and"
                " pass the values: RelativeBias(strip(jnp.arange(1 - T, S)))."
            ) from e
        return float_array("strip(offsets)", values)

    def counted_from_start(self, dims: Dims) -> str | None:
        return "RelativeBias" if self._is_function and self.align == "top_left" else None

    def at_end(self) -> "RelativeBias":
        return RelativeBias(self.strip, "bottom_right") if self._is_function else self

    def apply(self, x: Any, b: Any, n: Any, t: Any, s: Any) -> Any:
        return x + self.strip


def _check_signature(strip):
    """Raises TypeError unless the function `strip` takes one argument; where it has no signature, its call will tell."""
    try:
        signature = inspect.signature(strip)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None)
    except TypeError as e:
        raise TypeError(
            f"strip={strip!r} has the signature {signature}, but is called with one argument ({e}): the offsets s - t, int32"
            " [T + S - 1]. Pass a function of these, such as lambda offset: table[offset + longest]; for one of each logit"
            " and its positions use scores.Custom(fn)."
        ) from None
