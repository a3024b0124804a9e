"""Joins a forward and a backward to a function that JAX differentiates in reverse mode.

The residuals are the operands, out and lse. A remat policy can save out and lse by name. Gradients of gradients work: the
forward rule calls `attention` itself, and the backward has a derivative of its own, which recomputes from the operands.
"""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from pallas_fa.autodiff.rules import Rules
from pallas_fa.operands import varying
from pallas_fa.problem import Operands, Residuals

_with_rules: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))


@functools.partial(jax.jit, static_argnums=0, inline=True)
def attention(rules: Rules, operands: Operands) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv], lse [B, T, N]); jitted, so that calls outside any `jit` also compile only once."""
    return _attention(rules, *varying.vary_together(operands))


@_with_rules
def _attention(rules: Rules, operands: Operands) -> tuple[Any, Any]:
    return varying.without_checks(rules.forward, operands)


def _forward_rule(rules, operands):
    out, lse = _attention(rules, operands)
    out, lse = checkpoint_name(out, "pallas_fa_out"), checkpoint_name(lse, "pallas_fa_lse")
    return (out, lse), Residuals(operands, out, lse)


def _backward_rule(rules, residuals, cotangents):
    return (residuals.operands.cotangent(_gradients(rules, residuals, *cotangents)),)


_attention.defvjp(_forward_rule, _backward_rule)


@_with_rules
def _gradients(rules, residuals, d_out, d_lse):
    return varying.without_checks(rules.backward, residuals, d_out, d_lse)


def _gradients_forward(rules, residuals, d_out, d_lse):
    return _gradients(rules, residuals, d_out, d_lse), (residuals.operands, d_out, d_lse)


def _gradients_backward(rules, residuals, cotangents):
    """Gives the whole second derivative to the operands. out and lse get none, since the operands determine them."""

    def pullback(operands, d_out, d_lse, cotangents):
        def gradients(arrays, d_out, d_lse):
            primal = lambda arrays: rules.recompute(operands.with_differentiable(arrays))
            return jax.vjp(primal, arrays)[1]((d_out, d_lse))[0]

        return jax.vjp(gradients, operands.differentiable, d_out, d_lse)[1](cotangents)

    operands, d_out, d_lse = residuals
    d_operands, dd_out, dd_lse = varying.without_checks(pullback, operands, d_out, d_lse, cotangents)
    return Residuals(operands.cotangent(d_operands), None, None), dd_out, dd_lse  # type: ignore[arg-type]


_gradients.defvjp(_gradients_forward, _gradients_backward)
