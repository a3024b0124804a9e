"""What a backward kernel needs of each query row. XLA computes it in one pass over out and d_out."""

from typing import Any

import jax.numpy as jnp

from pallas_fa.masks.lengths import lengths_of
from pallas_fa.problem import Problem
from pallas_fa.softmax import tile

_ROWS = 128  # the largest tile of queries


def row_statistics(
    problem: Problem, mask: Any, out: Any, lse: Any, d_out: Any, d_lse: Any, lse_factor: float
) -> tuple[Any, Any]:
    """Returns (lse * lse_factor, -delta), where `lse_factor` < 0 and delta = rowsum(out * d_out) - d_lse.

    Both are float32 [B, N, T rounded up to a multiple of 128]. Rows that attend to nothing, padding, and rows past the
    end get -inf and 0. Their probabilities are then 0, and so are their gradients, whatever d_lse holds there.
    """
    lengths = lengths_of(mask)
    # out is 0 in padded rows, but d_out may be NaN there.
    delta = jnp.einsum("bthd,bthd->bth", out, d_out, preferred_element_type=jnp.float32) - d_lse
    delta = tile.zero_padding(delta[..., None], lengths.q_lengths)[..., 0]
    is_empty = lse == -jnp.inf
    delta = jnp.where(is_empty, 0, delta)
    neg_lse = jnp.where(is_empty, -jnp.inf, lse * lse_factor)
    missing = -problem.dims.T % _ROWS
    pad = lambda x, fill: jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, missing)), constant_values=fill)
    return pad(neg_lse.astype(jnp.float32), -jnp.inf), pad(-delta, 0)
