"""One program, several platforms: the kernel where it is lowered for CUDA, another function or a clear error elsewhere."""

from collections.abc import Callable
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import batching, mlir

_needs_cuda = core.Primitive("pallas_fa_needs_cuda")
_needs_cuda.multiple_results = True
_needs_cuda.def_abstract_eval(lambda *args, like: like)


@_needs_cuda.def_impl
def _raise(*args, like):
    raise NotImplementedError(
        "implementation='mosaic_gpu' was named, but the program is lowered for a platform that is no CUDA GPU. Run it on"
        " an NVIDIA GPU of compute capability 9.0, name ('mosaic_gpu', 'xla') to use XLA elsewhere, or leave"
        " implementation=None."
    )


mlir.register_lowering(_needs_cuda, lambda ctx, *args, like: _raise(*args, like=like))


def _batch(args, dims, like):
    size = next(x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None)
    out = _needs_cuda.bind(*args, like=tuple(x.update(shape=(size, *x.shape)) for x in like))
    return out, [0] * len(out)


batching.primitive_batchers[_needs_cuda] = _batch


def cuda_only(fn: Callable[..., Any], otherwise: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`fn` where the program is lowered for CUDA; `otherwise` elsewhere, or an error when it is lowered there."""

    def no_kernel(*args: Any) -> Any:
        shapes = jax.eval_shape(fn, *args)
        leaves, structure = jax.tree.flatten(shapes)
        like = tuple(ShapedArray(x.shape, x.dtype) for x in leaves)
        return jax.tree.unflatten(structure, _needs_cuda.bind(*jax.tree.leaves(args), like=like))

    def run(*args):
        return jax.lax.platform_dependent(*args, cuda=fn, default=otherwise or no_kernel)

    return run
