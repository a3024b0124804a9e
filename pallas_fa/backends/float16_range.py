"""Gradients of float16 inputs where dS passes 65504, the largest float16 number; bfloat16 has the range of float32.

dS = P (dP - delta) is rounded to the dtype of the inputs, as an operand of dQ = dS K and dK = dS^T Q. Gradients are linear
in their cotangents. So a power of two that keeps dS in range multiplies these, and divides the gradients. It is 1 where a
bound of dS is in range, and the gradients are bit for bit what they would be without it.

`in_float16_range` does so around a backward, in passes over arrays. The kernels for Hopper take a `DsScale` instead: they
scale the factor of dP = dO V^T that a CTA holds, and gradients where they are multiplied by the scale of the logits anyway
(evidence: backward/float16-range).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

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
        ds_scale = DsScale.of(problem, residuals, d_out, d_lse)
        d_lse = jnp.where(d_lse == 0, 0, ds_scale.scaled(d_lse))  # so that constant zeros stay constant
        gradients = backward(problem, residuals, ds_scale.scaled(d_out), d_lse, *args, **options)
        return tuple(ds_scale.restored(x) for x in gradients)

    return run


class DsScale(NamedTuple):
    """The power of two that multiplies dS, so that it is in range where it is rounded.

    `factors`: float32 [2], that power and its inverse, as a kernel reads them; None where nothing is scaled.
    """

    factors: Any = None

    @classmethod
    def of(cls, problem: Problem, residuals: Residuals, d_out: Any, d_lse: Any) -> "DsScale":
        """Returns the scale for the cotangents `d_out` and `d_lse`."""
        if problem.dtype != jnp.float16:
            return cls()
        exponent = _exponent(problem, residuals, d_out, d_lse)
        return cls(jnp.ldexp(jnp.ones((2,), jnp.float32), jnp.stack([-exponent, exponent])))

    def scaled(self, x: Any) -> Any:
        """Returns x times the power."""
        return x if self.factors is None else _times(x, self.factors[0])

    def restored(self, x: Any) -> Any:
        """Returns x over the power."""
        return x if self.factors is None else _times(x, self.factors[1])


def _times(x, factor):
    return (x.astype(jnp.float32) * factor).astype(x.dtype)  # `ldexp` is some seventy operations


def _exponent(problem, residuals, d_out, d_lse):
    """The least integer >= 0 such that no element of 2^-exponent dS, before a score, is larger than `_LARGEST`."""
    lengths = lengths_of(residuals.operands.mask)
    d_out, v = (transpose(problem.layout, x) for x in (d_out, residuals.operands.v))
    d_out, v = tile.zero_padding(d_out, lengths.q_lengths), tile.zero_padding(v, lengths.kv_lengths)
    d_lse = tile.zero_padding(d_lse[..., None], lengths.q_lengths)[..., 0]
    d_lse = tile.zero_empty_rows(d_lse, residuals.lse)
    # |dP| <= |dO| |V|, and delta is an average of dP, less d_lse. XLA adds up the squares of dO where it multiplies dO with
    # the output; of V it reads the largest element alone, in one kernel less.
    longest_d_out = jnp.sqrt(jnp.max(jnp.sum(jnp.square(d_out.astype(jnp.float32)), axis=-1), initial=0))
    longest_v = math.sqrt(problem.Hv) * jnp.max(jnp.abs(v), initial=0).astype(jnp.float32)
    bound = 2 * longest_d_out * longest_v + jnp.max(jnp.abs(d_lse), initial=0)
    exponent = jnp.frexp(jnp.where(jnp.isfinite(bound), bound / _LARGEST, 0))[1]
    return jnp.maximum(exponent, 0)
