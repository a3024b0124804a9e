"""Joins a forward and its tangents to a function that JAX differentiates in forward mode, and in reverse by transposing.

`forward_mode=True` selects it. JAX takes one rule per function, forward or reverse; vjp.py has the reverse rule.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from pallas_fa.autodiff.jitted import jitted
from pallas_fa.autodiff.rules import ForwardModeRules
from pallas_fa.operands import varying
from pallas_fa.problem import Operands

_with_rule: Any = functools.partial(jax.custom_jvp, nondiff_argnums=(0,))


@jitted
def attention(rules: ForwardModeRules, operands: Operands) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv], lse [B, T, N])."""
    return _attention(rules, *varying.vary_together(operands))


@_with_rule
def _attention(rules: ForwardModeRules, operands: Operands) -> tuple[Any, Any]:
    return varying.without_checks(rules.forward, operands)


def _tangent_rule(rules, primals, tangents):
    (operands,), (operands_dot,) = primals, tangents
    out, lse = _attention(rules, operands)
    out, lse = checkpoint_name(out, "pallas_fa_out"), checkpoint_name(lse, "pallas_fa_lse")
    operand_tangents = [None if isinstance(x, SymbolicZero) else x for x in operands_dot.differentiable]
    return (out, lse), rules.tangents(operands, lse, operand_tangents)


_attention.defjvp(_tangent_rule, symbolic_zeros=True)
