"""What the backward makes of the cotangents of out and lse, before it looks at any logits."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_fa.backends.xla.matmuls import matmul_dtype
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.problem import Problem, Residuals
from pallas_fa.softmax import sinks, tile


class Cotangents(NamedTuple):
    """What a backward needs.

    Attributes:
      d_out: [B, T, N, Hv], zero in padding, in the dtype of the matmuls.
      delta: [B, T, N], the row sums of P dP, less d_lse; zero in padding and in empty rows.
      d_sinks: the gradient of the sinks; empty without sinks.
    """

    d_out: Any
    delta: Any
    d_sinks: tuple[Any, ...]

    @classmethod
    def of(cls, problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> "Cotangents":
        """Returns those of d_out, the cotangent of out, and d_lse, that of lse."""
        operands, out, lse = residuals
        lengths, acc_dtype = lengths_of(operands.mask), problem.acc_dtype
        d_out = tile.zero_padding(d_out, lengths.q_lengths)
        # The row sums of p * dp are those of out * dout, which need no pass over the logits. d_lse enters the same way.
        row_sums = jnp.sum(out.astype(acc_dtype) * d_out.astype(acc_dtype), axis=-1)
        d_sinks = () if operands.sinks is None else (sinks.gradient(operands.sinks, lse, row_sums - d_lse),)
        delta = row_sums - tile.zero_empty_rows(d_lse, lse)
        delta = tile.zero_padding(delta[..., None], lengths.q_lengths)[..., 0]
        return cls(d_out.astype(matmul_dtype(problem)), delta, d_sinks)
