"""Gradients of float16 inputs where dS passes 65504, the largest float16 number; bfloat16 has the range of float32.

dS = P (dP - delta) is rounded to the dtype of the inputs, as an operand of dQ = dS K and dK = dS^T Q. Gradients are linear
in their cotangents. So a power of two that keeps dS in range multiplies these, and divides the gradients. It is 1 where dS
is in range, and the gradients are bit for bit what they would be without it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from pallas_fa.masks.lengths import lengths_of
from pallas_fa.operands.layout import transpose
from pallas_fa.problem import Problem, Residuals
from pallas_fa.softmax import tile

_LARGEST = 2.0**12  # that a score's derivative may multiply by 16


def in_float16_range(backward: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Wraps backward(problem, residuals, d_out, d_lse, ...), whose dS may be of any size in the dtype of the inputs."""

    @functools.wraps(backward)
    def run(
        problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any, *args: Any, **options: Any
    ) -> tuple[Any, ...]:
        if problem.dtype != jnp.float16:
            return backward(problem, residuals, d_out, d_lse, *args, **options)
        exponent = _exponent(problem, residuals, d_out, d_lse)
        times = lambda x, exponent: jnp.ldexp(x.astype(jnp.float32), exponent).astype(x.dtype)
        gradients = backward(problem, residuals, times(d_out, -exponent), times(d_lse, -exponent), *args, **options)
        return tuple(times(x, exponent) for x in gradients)

    return run


def _exponent(problem, residuals, d_out, d_lse):
    """The least integer >= 0 such that no element of 2^-exponent dS, before a score, is larger than `_LARGEST`."""
    lengths = lengths_of(residuals.operands.mask)
    d_out, v = (transpose(problem.layout, x) for x in (d_out, residuals.operands.v))
    d_out, v = tile.zero_padding(d_out, lengths.q_lengths), tile.zero_padding(v, lengths.kv_lengths)
    d_lse = tile.zero_padding(d_lse[..., None], lengths.q_lengths)[..., 0]
    d_lse = jnp.where(residuals.lse == -jnp.inf, 0, d_lse)  # empty rows, where it may be anything
    # |dP| <= |dO| |V|, and delta is an average of dP, less d_lse.
    longest = lambda x: jnp.sqrt(jnp.max(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1), initial=0))
    bound = 2 * longest(d_out) * longest(v) + jnp.max(jnp.abs(d_lse), initial=0)
    exponent = jnp.frexp(jnp.where(jnp.isfinite(bound), bound / _LARGEST, 0))[1]
    return jnp.maximum(exponent, 0)
