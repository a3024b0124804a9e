"""Jits functions that have derivatives of their own."""

import functools
from collections.abc import Callable

import jax


def jitted[Rules, Operands, Results](
    attention: Callable[[Rules, Operands], Results],
) -> Callable[[Rules, Operands], Results]:
    """Returns `attention(rules, operands)`, jitted, so that calls outside any `jit` also compile only once.

    It is jitted under `jax.disable_jit` too where that is inside `jax.shard_map`: there JAX (0.11) cannot evaluate the
    functions that `autodiff` makes, whose derivatives see symbolic zeros.
    """
    compiled = jax.jit(attention, static_argnums=0, inline=True)

    @functools.wraps(attention)
    def call(rules: Rules, operands: Operands) -> Results:
        if not (jax.config.jax_disable_jit and jax.sharding.get_abstract_mesh().manual_axes):
            return compiled(rules, operands)
        with jax.disable_jit(False):
            return compiled(rules, operands)

    return call
