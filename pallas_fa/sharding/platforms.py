"""Selects by platform, when a program is lowered: a kernel on its own platform, a fallback or an error on others."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import batching, mlir

from pallas_fa.sharding import exporting

_wrong_platform = core.Primitive("pallas_fa_wrong_platform")
_wrong_platform.multiple_results = True
_wrong_platform.def_abstract_eval(lambda *args, like, message: like)


@_wrong_platform.def_impl
def _raise(*args, like, message):
    raise NotImplementedError(message)


mlir.register_lowering(_wrong_platform, lambda ctx, *args, like, message: _raise(*args, like=like, message=message))


def _batch(args, dims, like, message):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    out = _wrong_platform.bind(*args, like=tuple(x.update(shape=(size, *x.shape)) for x in like), message=message)
    return out, [0] * len(out)


batching.primitive_batchers[_wrong_platform] = _batch


def only_on(
    platform: str, fn: Callable[..., Any], elsewhere: Callable[..., Any] | None, message: str
) -> Callable[..., Any]:
    """Returns a function that runs `fn` where the program is lowered for `platform`.

    Args:
      platform: a name of JAX's, such as "cuda".
      fn: a function of arrays.
      elsewhere: runs on other platforms, with the same results; None to raise there.
      message: of the NotImplementedError that lowering raises on other platforms without `elsewhere`.
    """

    def refuse(*args: Any) -> Any:
        shapes = jax.eval_shape(fn, *args)
        leaves, structure = jax.tree.flatten(shapes)
        like = tuple(ShapedArray(x.shape, x.dtype) for x in leaves)
        return jax.tree.unflatten(structure, _wrong_platform.bind(*jax.tree.leaves(args), like=like, message=message))

    def on_platform(*args: Any) -> Any:
        (first, *rest), structure = jax.tree.flatten(args)
        return fn(*jax.tree.unflatten(structure, [exporting.refuse_several_platforms(first), *rest]))

    return lambda *args: jax.lax.platform_dependent(*args, **{platform: on_platform}, default=elsewhere or refuse)
