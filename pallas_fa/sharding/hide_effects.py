"""Hides the effects of a function that makes array references (`jax.new_ref`) for its own use.

custom_partitioning takes functions without effects only.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

_call = core.Primitive("pallas_fa_hide_effects")
_call.multiple_results = True
_call.def_abstract_eval(lambda *args, jaxpr: jaxpr.out_avals)  # no effects: no other code can see its references
mlir.register_lowering(
    _call, mlir.lower_fun(lambda *args, jaxpr: core.jaxpr_as_fun(jaxpr)(*args), multiple_results=True)
)


def hide_effects(fn: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Returns `fn`, a function of arrays that returns a list of them, without its effects. JAX can only lower it."""

    def run(*args):
        return _call.bind(*args, jaxpr=jax.make_jaxpr(fn)(*args))

    return run
