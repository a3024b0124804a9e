"""Row statistics that the backward kernel starts its accumulators at. Fused by XLA into one pass over out and d_out."""

from typing import Any

import jax.numpy as jnp

from pallas_fa import masks
from pallas_fa.problem import Problem
from pallas_fa.softmax import tile

_ROWS = 128  # the largest tile of queries


def row_starts(
    problem: Problem, mask: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, lse_factor: float
) -> tuple[Any, Any]:
    """(lse * lse_factor, -delta), float32 [B, N, T rounded up to a multiple of 128]; `lse_factor` < 0.

    delta = rowsum(out * d_out) - d_lse. Rows that attend to nothing, padding, and rows past the end get -inf and 0, which
    make their probabilities 0, and their gradients too, whatever is in d_lse there.
    """
    lengths = masks.lengths_of(mask)
    # out is 0 in padded rows, but d_out may be NaN there.
    delta = jnp.einsum("bthd,bthd->bth", out, d_out, preferred_element_type=jnp.float32) - d_lse
    delta = tile.zero_padding(delta[..., None], lengths.q_lengths)[..., 0]
    is_empty = lse == -jnp.inf
    delta = jnp.where(is_empty, 0, delta)
    start = jnp.where(is_empty, -jnp.inf, lse * lse_factor)
    missing = -problem.dims.T % _ROWS
    pad = lambda x, fill: jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, missing)), constant_values=fill)
    return pad(start.astype(jnp.float32), -jnp.inf), pad(-delta, 0)
