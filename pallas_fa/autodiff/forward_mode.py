"""`attention`: a forward and its tangents as a function that JAX differentiates forward-mode, and reverse by transposing.

For `forward_mode=True`, in place of `vjp.py`: JAX takes one rule for the derivatives of a function, forward or reverse.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_fa.autodiff.rules import ForwardModeRules
from pallas_fa.operands import varying
from pallas_fa.problem import Operands

_with_rule: Any = functools.partial(jax.custom_jvp, nondiff_argnums=(0,))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def attention(rules: ForwardModeRules, operands: Operands) -> tuple[Any, Any]:
    """(out [B, T, N, Hv], log-sum-exp [B, T, N]); jitted, so that calls outside of any jit compile once, too."""
    return _attention(rules, *varying.made_alike(operands))


@_with_rule
def _attention(rules: ForwardModeRules, operands: Operands) -> tuple[Any, Any]:
    return varying.unchecked(rules.forward, operands)


def _tangent_rule(rules, primals, tangents):
    (operands,), (moves,) = primals, tangents
    out, lse = _attention(rules, operands)
    out, lse = checkpoint_name(out, "pallas_fa_out"), checkpoint_name(lse, "pallas_fa_lse")
    dots = [None if isinstance(x, SymbolicZero) else x for x in moves.differentiable]
    return (out, lse), rules.tangents(operands, lse, dots)


_attention.defjvp(_tangent_rule, symbolic_zeros=True)
