"""User functions inside a kernel: brought to operations that lower, or the reason why they can't be.

A mask or score function is traced, and its jaxpr evaluated equation by equation: inner functions (jit, custom_jvp) are
inlined, operations that do not lower are rewritten, and scalars are broadcast to tiles where an operation takes tiles only
(`operations.py` says which do what).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend import core

from pallas_fa.backends.gpu import operations
from pallas_fa.operands.position_axes import inner_jaxpr

LOG2E = math.log2(math.e)  # exp(x) is exp2(LOG2E * x), which the hardware has
_WIDE = {name: jnp.float32 if "float" in name else jnp.int32 for name in operations.NARROW}
_REDUCTIONS = {
    "reduce_and": lax.bitwise_and,
    "reduce_max": lax.max,
    "reduce_min": lax.min,
    "reduce_or": lax.bitwise_or,
    "reduce_sum": lax.add,
}


def inline(fn: Callable[..., Any], *args: Any, precise: bool = False) -> Any:
    """fn(*args), by operations that lower in a kernel; the arrays of `args` are tiles of one shape, and scalars.

    `precise`: not by functions of the hardware that are too inexact for float32 inputs.
    """
    program, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    results = _Evaluator(args, precise).run(program, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out_shape), [x for x, _ in results])


def inline_times(fn: Callable[..., Any], *args: Any, precise: bool = False) -> tuple[Any, float]:
    """(x, factor) whose product is fn(*args), one array: a last multiplication by a number is left to the caller."""
    (product,) = inline_products(lambda *args: (fn(*args),), *args, precise=precise)
    return product


def inline_products(fn: Callable[..., tuple[Any, ...]], *args: Any, precise: bool = False) -> list[tuple[Any, float]]:
    """As `inline_times`, for each of the arrays that `fn` returns."""
    results = _Evaluator(args, precise).run(jax.make_jaxpr(fn)(*args), jax.tree.leaves(args))
    return [product or (x, 1.0) for x, product in results]


def why_not(fn: Callable[..., Any], *args: Any) -> str | None:
    """None if `fn` of these arguments (tiles and scalars, or their shapes) lowers in a kernel, else the reason."""
    wide = [x.dtype.name for x in jax.tree.leaves(args) if x.dtype.itemsize == 8]
    if wide:
        return f"it takes an array of dtype {wide[0]}; kernels compute in 32 bits"
    # As kernels are traced: they compute in 32 bits whatever the types are elsewhere.
    with jax.enable_x64(False):
        try:
            jax.eval_shape(functools.partial(inline, fn), *args)
        except _DoesNotLowerError as e:
            return str(e)
        except (IndexError, TypeError, ValueError) as e:
            return f"it does not take tiles [queries, keys] for [b, n, t, s]: {(str(e).splitlines() or [''])[0]}"
    return None


class _DoesNotLowerError(Exception):
    """What a kernel can't do."""


class _Stack(tuple):
    """Arrays stacked along a new first axis, which kernels have no room for."""


class _Evaluator:
    """Evaluates jaxprs by operations that lower."""

    def __init__(self, args: Any, precise: bool):
        self.rewrites = operations.PRECISE if precise else operations.REWRITES
        self.tile = max((jnp.shape(x) for x in jax.tree.leaves(args)), key=len)

    def run(self, program: Any, args: list[Any], within: tuple[str, ...] = ()) -> list[Any]:
        """Each result with the (value, number) whose product it is, where it is one, else None.

        `within`: operations that are not rewritten: the one whose rewritten form this is, and what it needs as it is.
        """
        unknown = sorted({x for x in _operations(program.jaxpr) if not _is_known(x)})
        if unknown:
            raise _DoesNotLowerError(f"the operations {', '.join(unknown)} do not lower in a kernel")
        if any(jnp.ndim(x) for x in program.consts):
            raise _DoesNotLowerError("it closes over an array; pass the array to Custom(fn, array) instead")
        consts = [x if isinstance(x, Tracer) else np.asarray(x)[()] for x in program.consts]
        values = dict(zip((*program.jaxpr.constvars, *program.jaxpr.invars), (*consts, *args), strict=True))
        products: dict[Any, Any] = {}
        read = lambda x: _number(x) if isinstance(x, core.Literal) else values[x]
        for eqn in program.jaxpr.eqns:
            inputs, inner = [read(x) for x in eqn.invars], inner_jaxpr(eqn)
            if simpler := operations.by_power_of_two(eqn.params.get("name"), inner, inputs):
                outputs = [self._call(simpler, inputs[0])]
            elif inner is not None:
                results = self.run(inner, inputs, within)
                outputs = [x for x, _ in results]
                products.update((var, p) for var, (_, p) in zip(eqn.outvars, results, strict=True) if p)
            elif (product := _product(eqn, inputs, products)) is not None:
                # Factors meet, where the compiler would keep two multiplications because they round twice.
                outputs = [product[0] * product[1]]
                products[eqn.outvars[0]] = product
            else:
                outputs = self._apply(eqn, inputs, within)
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [(read(x), None if isinstance(x, core.Literal) else products.get(x)) for x in program.jaxpr.outvars]

    def _apply(self, eqn, inputs, within):
        name = eqn.primitive.name
        if name in operations.OF_NUMBERS and all(isinstance(x, np.generic) for x in inputs):
            return [operations.OF_NUMBERS[name](*inputs)]  # as jnp asks of a divisor, say, whether it is 0
        if name in operations.IDENTITIES:
            return inputs
        if name == "reshape" and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape:
            return inputs  # differentiation inside shard_map reshapes to the shape that is there
        if name == "broadcast_in_dim":
            return [self._broadcast(inputs[0], eqn.params["shape"])]
        if name == "cond":
            which, *operands = inputs
            branches = [[x for x, _ in self.run(branch, operands)] for branch in eqn.params["branches"]]
            return [self._call(operations.REWRITES["select_n"], which, *cases) for cases in zip(*branches, strict=True)]
        if name == "stack" and eqn.params["axis"] == 0:
            return [_Stack(inputs)]
        if any(isinstance(x, _Stack) for x in inputs):
            return [self._reduce(eqn, *inputs)]
        return [self._operation(eqn, inputs, within)]

    def _operation(self, eqn, inputs, within):
        name, params = eqn.primitive.name, eqn.params
        narrow = {x.dtype.name for x in inputs} & set(operations.NARROW)
        if narrow and name != "convert_element_type" and narrow.isdisjoint(operations.NOT_WIDENED.get(name, ())):
            wide = [x.astype(_WIDE.get(x.dtype.name, x.dtype)) for x in inputs]
            result = self._operation(eqn, wide, within)
            dtype = eqn.outvars[0].aval.dtype
            return result if dtype == jnp.bool_ else self._call(lambda x: x.astype(dtype), result)
        if name == "pow" and isinstance(inputs[0], np.generic) and inputs[0] == 2:
            return self._call(lambda y: lax.exp2(y.astype(jnp.float32)), inputs[1])  # at a fraction of the operations
        if name in self.rewrites and name not in within and not operations.is_safe(name, inputs):
            chosen = {key: params[key] for key in operations.PARAMETERS.get(name, ())}
            rewrite = self.rewrites[name]
            return self._call(
                functools.partial(rewrite, **chosen) if chosen else rewrite,
                *inputs,
                within=(name, *operations.AS_THEY_ARE.get(name, ())),
            )
        if not any(jnp.ndim(x) for x in inputs) and not operations.lowers(name, params, inputs, on_scalars=True):
            inputs = [self._broadcast(x, self.tile) for x in inputs]
        if not operations.lowers(name, params, inputs, on_scalars=not any(jnp.ndim(x) for x in inputs)):
            dtypes = ", ".join(dict.fromkeys(x.dtype.name for x in inputs))
            raise _DoesNotLowerError(f"the operation {name} of {dtypes} does not lower in a kernel")
        return eqn.primitive.bind(*inputs, **params)

    def _call(self, fn, *inputs, within=()):
        """One result of `fn`."""
        ((result, _),) = self.run(jax.make_jaxpr(fn)(*inputs), list(inputs), within)
        return result

    def _broadcast(self, x, shape):
        if jnp.shape(x) == tuple(shape):
            return x
        if x.dtype.name in _WIDE:
            return self._broadcast(x.astype(_WIDE[x.dtype.name]), shape).astype(x.dtype)
        if jnp.ndim(x) or tuple(shape) != self.tile or x.dtype.name not in operations.BROADCAST:
            raise _DoesNotLowerError(
                f"{x.dtype} of shape {jnp.shape(x)} is not broadcast to {tuple(shape)} in a kernel"
            )
        return lax.broadcast_in_dim(x, shape, ())

    def _reduce(self, eqn, stack):
        name = eqn.primitive.name
        if eqn.params.get("axes") != (0,) or name not in ("argmax", "argmin", *_REDUCTIONS):
            raise _DoesNotLowerError(f"the operation {name} of stacked arrays does not lower in a kernel")
        if name in _REDUCTIONS:
            return functools.reduce(functools.partial(self._call, _REDUCTIONS[name]), stack)
        better = lax.gt if name == "argmax" else lax.lt
        best, index = stack[0], jnp.int32(0)
        for i, x in enumerate(stack[1:], start=1):
            is_better = self._call(better, x, best)
            best = self._call(jnp.where, is_better, x, best)
            index = self._call(jnp.where, is_better, np.int32(i), index)
        return index


def _number(literal: Any):
    return np.asarray(literal.val, literal.aval.dtype)[()]


def _operations(jaxpr):
    for eqn in jaxpr.eqns:
        inner = inner_jaxpr(eqn)
        if inner is None:
            yield eqn.primitive.name
        else:
            yield from _operations(inner.jaxpr)


def _is_known(name):
    structural = ("broadcast_in_dim", "cond", "reshape", "stack", "convert_element_type", "argmax", "argmin")
    tables = (operations.ON_TILES, operations.REWRITES, operations.IDENTITIES, _REDUCTIONS, structural)
    return any(name in table for table in tables)


def _product(eqn, inputs, products):
    """(value, number) of a float32 array multiplied or divided by a number, or of a product times an array, else None."""
    if eqn.primitive.name not in ("mul", "div") or eqn.outvars[0].aval.dtype != "float32":
        return None
    numbers = [isinstance(x, core.Literal) for x in eqn.invars]
    if eqn.primitive.name == "mul" and not any(numbers):
        factors = (products.get(var, (value, 1.0)) for var, value in zip(eqn.invars, inputs, strict=True))
        (x, x_number), (y, y_number) = factors
        number = x_number * y_number
        same = jnp.shape(x) == jnp.shape(y) and number != 1.0 and 2.0**-60 < abs(number) < 2.0**60
        return (x * y, number) if same else None
    if sum(numbers) != 1 or (eqn.primitive.name == "div" and not numbers[1]):
        return None
    var, value = eqn.invars[numbers.index(False)], inputs[numbers.index(False)]
    number = float(inputs[numbers.index(True)])
    value, factor = products.get(var, (value, 1.0))
    if not 2.0**-60 < abs(number) < 2.0**60 or not 2.0**-60 < abs(factor) < 2.0**60:
        return None  # the product of the numbers might not be a float
    return value, factor * number if eqn.primitive.name == "mul" else factor / number
