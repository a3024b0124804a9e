"""Hides the effects of a function that makes array references (`jax.new_ref`) for its own use.

custom_partitioning takes functions without effects only.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import AbstractMesh

_call = core.Primitive("pallas_fa_hide_effects")
_call.multiple_results = True
_call.def_abstract_eval(lambda *args, jaxpr: jaxpr.out_avals)  # no effects: no other code can see its references
_lowered = mlir.lower_fun(lambda *args, jaxpr: core.jaxpr_as_fun(jaxpr)(*args), multiple_results=True)
_NO_MESH = AbstractMesh((), ())


def _lower(ctx, *args, jaxpr):
    with jax.sharding.use_abstract_mesh(_NO_MESH):
        return _lowered(ctx.replace(avals_in=jaxpr.in_avals), *args, jaxpr=jaxpr)


mlir.register_lowering(_call, _lower)


def hide_effects(fn: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Returns `fn`, a function of arrays that returns a list of them, without its effects. JAX can only lower it.

    It is on one device: where `jax.set_mesh` has set a mesh with explicit axes, JAX would say of each array in it how it is
    sharded over them, to XLA, which is past sharding here and does not compile that.
    """

    def run(*args):
        with jax.sharding.use_abstract_mesh(_NO_MESH):
            jaxpr = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args))
            return _call.bind(*args, jaxpr=jaxpr)

    return run
