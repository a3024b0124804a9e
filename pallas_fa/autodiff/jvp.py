"""`attention`: one implementation as a function that JAX differentiates forward-mode, and reverse by transposing that.

For `forward_mode=True`, in the place of `vjp.py`: JAX takes one rule for the derivatives of a function, forward or reverse.
Values come from the implementation, kernels included; tangents from `tangents.py`.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_fa.backends.dispatch import Implementation
from pallas_fa.backends.xla import tangents
from pallas_fa.operands import manual_axes
from pallas_fa.problem import Problem
from pallas_fa.scores.base import float_arrays

_with_rule: Any = functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def attention(
    implementation: Implementation, problem: Problem, q: Any, k: Any, v: Any, score: Any, mask: Any
) -> tuple[Any, Any]:
    """(out [B, T, N, Hv], log-sum-exp [B, T, N]); jitted, so that calls outside of any jit compile once, too."""
    return _attention(implementation, problem, *manual_axes.made_alike(q, k, v, score, mask))


@_with_rule
def _attention(
    implementation: Implementation, problem: Problem, q: Any, k: Any, v: Any, score: Any, mask: Any
) -> tuple[Any, Any]:
    return manual_axes.unchecked(functools.partial(implementation.forward, problem), q, k, v, score, mask)


def _tangent_rule(implementation, problem, primals, primals_dot):
    q, k, v, score, mask = primals
    out, lse = _attention(implementation, problem, q, k, v, score, mask)
    out, lse = checkpoint_name(out, "pallas_fa_out"), checkpoint_name(lse, "pallas_fa_lse")
    q_dot, k_dot, v_dot, score_dot, _ = primals_dot  # masks have no derivative
    moving = (q_dot, k_dot, v_dot, *float_arrays(score_dot))
    dots = [None if isinstance(x, SymbolicZero) else x for x in moving]
    return (out, lse), tangents.attention(problem, q, k, v, score, mask, lse, dots)


_attention.defjvp(_tangent_rule, symbolic_zeros=True)
