"""One program, several platforms: a kernel where it is lowered for its own, another function or an error elsewhere."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import batching, mlir

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
    """`fn` where the program is lowered for `platform`; on others `elsewhere`, or an error with `message` without it."""

    def no_kernel(*args: Any) -> Any:
        shapes = jax.eval_shape(fn, *args)
        leaves, structure = jax.tree.flatten(shapes)
        like = tuple(ShapedArray(x.shape, x.dtype) for x in leaves)
        return jax.tree.unflatten(structure, _wrong_platform.bind(*jax.tree.leaves(args), like=like, message=message))

    return lambda *args: jax.lax.platform_dependent(*args, **{platform: fn}, default=elsewhere or no_kernel)
