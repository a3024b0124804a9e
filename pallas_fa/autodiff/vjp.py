"""`attention`: forward and backward of one implementation joined as a function that JAX differentiates.

The residuals are q, k, v, the score and mask arrays, out and lse; out and lse carry the names that a remat policy can
keep. The forward rule calls `attention` itself and the backward is a function with a derivative of its own, so that
gradients of gradients work: they recompute from q, k and v a few rows at a time (`by_rows`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_fa.autodiff import by_rows
from pallas_fa.backends.dispatch import Implementation
from pallas_fa.operands import manual_axes
from pallas_fa.problem import Problem
from pallas_fa.scores.base import float_arrays, with_float_arrays

_with_rules: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def attention(
    implementation: Implementation, problem: Problem, q: Any, k: Any, v: Any, score: Any, mask: Any
) -> tuple[Any, Any]:
    """(out [B, T, N, Hv], log-sum-exp [B, T, N]); jitted, so that calls outside of any jit compile once, too."""
    return _attention(implementation, problem, *manual_axes.made_alike(q, k, v, score, mask))


@_with_rules
def _attention(
    implementation: Implementation, problem: Problem, q: Any, k: Any, v: Any, score: Any, mask: Any
) -> tuple[Any, Any]:
    """(out [B, T, N, Hv], log-sum-exp [B, T, N])."""
    return manual_axes.unchecked(functools.partial(implementation.forward, problem), q, k, v, score, mask)


def _forward_rule(implementation, problem, q, k, v, score, mask):
    out, lse = _attention(implementation, problem, q, k, v, score, mask)
    out, lse = checkpoint_name(out, "pallas_fa_out"), checkpoint_name(lse, "pallas_fa_lse")
    return (out, lse), (q, k, v, score, mask, out, lse)


def _backward_rule(implementation, problem, residuals, cotangents):
    q, k, v, score, mask, out, lse = residuals
    dq, dk, dv, d_arrays = _gradients(implementation, problem, q, k, v, score, mask, out, lse, *cotangents)
    return dq, dk, dv, score_gradient(score, d_arrays), None


_attention.defvjp(_forward_rule, _backward_rule)


@_with_rules
def _gradients(implementation, problem, q, k, v, score, mask, out, lse, d_out, d_lse):
    backward = functools.partial(implementation.backward, problem)
    return manual_axes.unchecked(backward, q, k, v, score, mask, out, lse, d_out, d_lse)


def _gradients_forward(implementation, problem, q, k, v, score, mask, out, lse, d_out, d_lse):
    gradients = _gradients(implementation, problem, q, k, v, score, mask, out, lse, d_out, d_lse)
    return gradients, (q, k, v, score, mask, d_out, d_lse)


def _gradients_backward(implementation, problem, residuals, cotangents):
    """The whole second derivative goes to q, k, v and the score: out and lse are functions of them, so they get none."""

    def pullback(q, k, v, score, mask, d_out, d_lse, cotangents):
        def gradients(q, k, v, arrays, d_out, d_lse):
            def primal(q, k, v, arrays):
                return by_rows.attention(problem, q, k, v, with_float_arrays(score, arrays), mask)

            return jax.vjp(primal, q, k, v, arrays)[1]((d_out, d_lse))

        return jax.vjp(gradients, q, k, v, float_arrays(score), d_out, d_lse)[1](cotangents)

    dq, dk, dv, d_arrays, dd_out, dd_lse = manual_axes.unchecked(pullback, *residuals, cotangents)
    return dq, dk, dv, score_gradient(residuals[3], d_arrays), None, None, None, dd_out, dd_lse


_gradients.defvjp(_gradients_forward, _gradients_backward)


def score_gradient(score, d_arrays):
    """A cotangent for `score`: `d_arrays` for its float arrays, none for its integer ones."""
    d_arrays = iter(d_arrays)

    def one(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return next(d_arrays) if is_float else np.zeros(x.shape, jax.dtypes.float0)

    return jax.tree.map(one, score)
