"""Array references (`jax.new_ref`) that a function makes for itself, where JAX takes functions without effects only."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

_call = core.Primitive("pallas_fa_own_refs")
_call.multiple_results = True
_call.def_abstract_eval(lambda *args, jaxpr: jaxpr.out_avals)  # and no effects: its references are seen by nobody else
mlir.register_lowering(
    _call, mlir.lower_fun(lambda *args, jaxpr: core.jaxpr_as_fun(jaxpr)(*args), multiple_results=True)
)


def hidden(fn: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """`fn`, a function of arrays that returns a list of them, without effects; to be lowered, and not transformed."""

    def run(*args):
        return _call.bind(*args, jaxpr=jax.make_jaxpr(fn)(*args))

    return run
