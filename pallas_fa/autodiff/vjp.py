"""Joins a forward and a backward to a function that JAX differentiates in reverse mode.

The residuals are the operands, out and lse. A remat policy can save out and lse by name. Gradients of gradients work: the
forward rule calls `attention` itself, and the backward has a derivative of its own, which recomputes from the operands.
Arrays of a score that the caller does not differentiate by are fixed: a bias that is a constant, or passed through
`stop_gradient`, costs the backward nothing but its loads.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, custom_vjp_primal_tree_values

from pallas_fa.autodiff.jitted import jitted
from pallas_fa.autodiff.rules import Rules
from pallas_fa.operands import varying
from pallas_fa.problem import Operands, Residuals

_with_rules: Any = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))


@jitted
def attention(rules: Rules, operands: Operands) -> tuple[Any, Any]:
    """Returns (out [B, T, N, Hv], lse [B, T, N])."""
    return _attention(rules, *varying.vary_together(operands))


@_with_rules
def _attention(rules: Rules, operands: Operands) -> tuple[Any, Any]:
    out, lse = varying.without_checks(rules.forward, operands)
    return out, _batched_as(out, lse)


def _forward_rule(rules, primals):
    operands = custom_vjp_primal_tree_values(primals)
    perturbed = jax.tree.map(lambda x: x.perturbed, primals, is_leaf=lambda x: isinstance(x, CustomVJPPrimal))
    out, lse = _attention(rules, operands)
    out, lse = checkpoint_name(out, "pallas_fa_out"), checkpoint_name(lse, "pallas_fa_lse")
    return (out, lse), Residuals(operands.fixed(perturbed), out, lse)


def _backward_rule(rules, residuals, cotangents):
    of_results = zip(cotangents, residuals[1:], strict=True)
    cotangents = (jnp.zeros_like(x) if isinstance(d, SymbolicZero) else d for d, x in of_results)
    found = residuals.operands.cotangent(_gradients(rules, residuals, *cotangents))
    return (found.free(),)


_attention.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)


@_with_rules
def _gradients(rules, residuals, d_out, d_lse):
    d_q, d_k, d_v, *rest = varying.without_checks(rules.backward, residuals, d_out, d_lse)
    return d_q, d_k, _batched_as(d_q, d_v), *rest


def _batched_as(other, x):
    """Returns `x`, which `vmap` then batches wherever it batches `other`; both are results of one custom_vjp function.

    lse does not depend on v, nor d_v on v and d_lse. Under `vmap` over these alone it would not be batched, and JAX (0.11)
    would give its cotangent, already the sum over the batch, to the backward of each entry: counted once too often for each.
    """
    no_elements = lax.slice_in_dim(other, 0, 0, axis=-1)  # XLA removes them and their sum, which is 0
    return x + jnp.sum(no_elements, dtype=x.dtype)


def _gradients_forward(rules, residuals, d_out, d_lse):
    return _gradients(rules, residuals, d_out, d_lse), (residuals.operands, d_out, d_lse)


def _gradients_backward(rules, residuals, cotangents):
    """Gives the whole second derivative to the operands. out and lse get none, since the operands determine them.

    It is by fixed arrays, too: whoever holds them fixed in a gradient may differentiate the gradient by them.
    """

    def pullback(operands, d_out, d_lse, cotangents):
        def gradients(arrays, d_out, d_lse):
            changed = operands.free().with_differentiable(arrays).fixed_as(operands)
            primal = lambda arrays: rules.recompute(changed.with_differentiable(arrays))
            return jax.vjp(primal, changed.differentiable)[1]((d_out, d_lse))[0]

        return jax.vjp(gradients, operands.free().differentiable, d_out, d_lse)[1](cotangents)

    operands, d_out, d_lse = residuals
    d_operands, dd_out, dd_lse = varying.without_checks(pullback, operands, d_out, d_lse, cotangents)
    of_operands = operands.free().cotangent(d_operands).fixed_as(operands)
    return Residuals(of_operands, None, None), dd_out, dd_lse  # type: ignore[arg-type]


_gradients.defvjp(_gradients_forward, _gradients_backward)
