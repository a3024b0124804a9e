"""What a backward kernel needs of each query row. XLA computes it in one pass over out and d_out."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa.masks.lengths import lengths_of
from pallas_fa.problem import Problem, Residuals
from pallas_fa.softmax import sinks, tile

_ROWS = 128  # the largest tile of queries
_LARGEST = float(jnp.finfo(jnp.float32).max)


class RowStatistics(NamedTuple):
    """What `row_statistics` returns. `d_sinks`: the gradient of the sinks; none where there are none."""

    neg_lse: Any
    neg_delta: Any
    d_sinks: tuple[Any, ...]


def row_sums(problem: Problem, x: Any, y: Any) -> Any:
    """Returns rowsum(x * y) of arrays of the shape of out, float32 [B, T, N] in the order of the problem's layout."""
    dims = "bthd" if problem.layout == "BTNH" else "bhtd"
    return jnp.einsum(f"{dims},{dims}->{dims[:3]}", x, y, preferred_element_type=jnp.float32)


def row_statistics(
    problem: Problem, residuals: Residuals, products: Any, d_lse: Any, lse_factor: float
) -> RowStatistics:
    """Returns lse * lse_factor, and -delta, where `lse_factor` < 0 and delta = products - d_lse.

    `products`: rowsum(out * d_out), in the order of `row_sums`, with the errors that dP = d_out V^T has: in a row with one
    key they are to cancel. With dropout, delta is divided by its scale: dS, and with it all gradients, are scaled at their
    ends.
    Both are float32 [B, N, T rounded up to a multiple of 128]. Rows without keys or a sink, padding, and rows past the
    end get -inf and 0. Their probabilities are then 0, and so are their gradients, whatever d_lse holds there.
    """
    operands, _, lse = residuals
    # XLA would compute the sums of some shapes in the pass that transposes them, ten times as slow as alone.
    products = lax.optimization_barrier(products)
    if problem.layout == "BNTH":
        products = jnp.swapaxes(products, 1, 2)
    zero_padding = lambda x: tile.zero_padding(x[..., None], lengths_of(operands.mask).q_lengths)[..., 0]
    # out is 0 in padded rows, but d_out may be NaN there. Their lse is that of the sink alone, which d_lse goes to.
    delta, in_length = zero_padding(products) - d_lse, zero_padding(jnp.ones_like(lse)) > 0
    # In the order of the kernels from here on: XLA makes one pass of what follows.
    lse, delta, in_length = (jnp.swapaxes(x, 1, 2) for x in (lse, delta, in_length))
    is_empty = lse == -jnp.inf
    neg_lse = jnp.where(is_empty, -jnp.inf, _finite(lse * lse_factor))
    neg_delta = jnp.where(is_empty, 0, -delta)
    d_sinks = ()
    if operands.sinks is not None:
        # XLA would compute all of them twice.
        lse, neg_lse, neg_delta = lax.optimization_barrier((lse, neg_lse, neg_delta))
        d_sinks = (sinks.gradient(operands.sinks, *(jnp.swapaxes(x, 1, 2) for x in (lse, -neg_delta))),)
    neg_lse, neg_delta = jnp.where(in_length, neg_lse, -jnp.inf), jnp.where(in_length, neg_delta, 0)
    if operands.dropout is not None:
        neg_delta = neg_delta / operands.dropout.scale
    missing = -problem.dims.T % _ROWS
    pad = lambda x, fill: jnp.pad(x, ((0, 0), (0, 0), (0, missing)), constant_values=fill)
    return RowStatistics(pad(neg_lse.astype(jnp.float32), -jnp.inf), pad(neg_delta, 0), d_sinks)


def _finite(x):
    """x, where infinity is the largest number: a row may have nothing but a sink, of any size."""
    return jnp.clip(x, -_LARGEST, _LARGEST)
