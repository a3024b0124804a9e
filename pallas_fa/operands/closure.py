"""Arrays that the function of a mask or a score closes over travel with it, as its arguments do.

A constant of a program may be neither a tracer of another trace, as it would be in the derivative of a jitted function, nor
an array inside a kernel. So closed-over arrays are collected where a mask or a score is bound, and put back where its
function is called. They come as [1, 1, 1, 1, *shape], so that nobody cuts them to a tile, and floats as integers of the
same bits, so that nobody computes a gradient.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core


@dataclasses.dataclass(frozen=True)
class ClosureConverted:
    """`fn`, whose last arguments are the arrays of `dtypes` that it closes over.

    The dtypes are part of it, since floats travel as integers: those of a variable that has changed may look the same.

    In a derivative, those that it still holds may be tracers of a trace that has ended. JAX keeps its jaxpr from the forward
    pass, in which they are replaced.
    """

    fn: Callable[..., Any]
    dtypes: tuple[Any, ...]

    def __call__(self, *args: Any) -> Any:
        count = len(self.dtypes)
        args, arrays = args[:-count], args[-count:]
        program = jax.make_jaxpr(self.fn)(*args)
        known = [(x.shape, x.dtype) for x in program.consts if _travels(x)]
        given = zip(arrays, self.dtypes, known, strict=False)
        if known != [(x.shape[4:][: len(shape)], dtype) for x, dtype, (shape, _) in given]:
            program = jax.make_jaxpr(lambda *args: self.fn(*args))(*args)  # it closes over others since it was traced
        arrays = iter(arrays)
        consts = [_restored(next(arrays), x) if _travels(x) else x for x in program.consts]
        (result,) = core.jaxpr_as_fun(core.ClosedJaxpr(program.jaxpr, consts))(*args)
        return result


def convert(fn: Callable[..., Any], consts: Iterable[Any]) -> tuple[Callable[..., Any], list[Any]]:
    """(a function, the arrays that it takes behind the arguments of `fn`): `consts`, those of its jaxpr."""
    consts = [x for x in consts if _travels(x)]
    dtypes = tuple(x.dtype for x in consts)
    return (ClosureConverted(fn, dtypes) if consts else fn), [_as_argument(x) for x in consts]


def why_not_in_kernels(arrays: Iterable[Any]) -> str | None:
    """Why the functions of a bound mask or score that holds `arrays` can't run in a kernel, or None."""
    for x in arrays:
        if x.ndim > 4:
            return (
                f"it closes over an array of shape {x.shape[4:]}, which a kernel can't index; pass its values at"
                " (b, n, t, s) as Custom(fn, array)"
            )
    return None


def _travels(x):
    kinds = (jnp.bool_, jnp.number, jax.dtypes.prng_key)
    return any(jnp.issubdtype(x.dtype, kind) for kind in kinds)


def _as_argument(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = jnp.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = _without_gradient(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = lax.bitcast_convert_type(x, f"int{jnp.finfo(x.dtype).bits}")
    return x.reshape((1, 1, 1, 1, *x.shape))


def _restored(x, like):
    """The array `like` from its form [1, 1, 1, 1, *shape], which for a scalar is a scalar in a kernel."""
    x = x.reshape(x.shape[4:])
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        return lax.complex(*jnp.moveaxis(lax.bitcast_convert_type(x, jnp.finfo(like.dtype).dtype), -1, 0))
    return lax.bitcast_convert_type(x, like.dtype) if jnp.issubdtype(like.dtype, jnp.floating) else x


@jax.custom_jvp
def _without_gradient(x):
    return x


@_without_gradient.defjvp
def _raise(primals, tangents):
    del tangents
    raise NotImplementedError(
        f"the function of a Custom mask or score closes over an array, of shape {jnp.shape(primals[0])}, that is being"
        " differentiated, and would get no gradient. For the gradient of a score pass its values at (b, n, t, s) as an"
        " argument, Custom(fn, array), with array broadcastable to [*B, N, T, S]; those of a table of offsets s - t as a"
        " scores.RelativeBias. Where no gradient is wanted, close over jax.lax.stop_gradient(array)."
    )
