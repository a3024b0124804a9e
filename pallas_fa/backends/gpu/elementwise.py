"""User functions inside a kernel: which of them lower, and in what form.

A mask or score function is traced once and evaluated equation by equation, with inner functions (jit, custom_jvp)
inlined, and what differentiation makes (`add_any`, a sum; `one_minus_square`) written out: neither lowers as it is.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend import core

LOG2E = math.log2(math.e)  # exp(x) is exp2(LOG2E * x), which the hardware has
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
}
# Tried one by one for both of Mosaic GPU's lowerings: tests/test_kernel_lowering.py.
_LOWERS = frozenset(
    "add sub mul div rem neg abs sign max min exp exp2 log tanh logistic sin cos sqrt rsqrt square integer_pow round "
    "eq ne lt le gt ge and or xor not select_n clamp convert_element_type broadcast_in_dim shift_left "
    "shift_right_logical shift_right_arithmetic add_any one_minus_square".split()
)


def inline(fn: Callable[..., Any], *args: Any) -> Any:
    """fn(*args), by primitives that lower in a kernel."""
    closed, out_shape = jax.make_jaxpr(fn, return_shape=True)(*args)
    results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(out_shape), [x for x, _ in results])


def inline_times(fn: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """(x, factor) whose product is fn(*args), one array: a last multiplication by a number is left to the caller."""
    closed = jax.make_jaxpr(fn)(*args)
    ((x, product),) = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args))
    return product or (x, 1.0)


def why_not(fn: Callable[..., Any], *args: Any) -> str | None:
    """None if `fn` of these arguments (or their shapes) lowers in a kernel, else the reason."""
    closed = jax.make_jaxpr(fn)(*args)
    if any(getattr(const, "ndim", 0) for const in closed.consts):
        return "it closes over an array; pass the array to Custom(fn, array) instead"
    unknown = sorted(set(_primitives(closed.jaxpr)) - _LOWERS)
    return f"the operations {', '.join(unknown)} do not lower in a kernel" if unknown else None


def _inner(eqn):
    name = _INLINED.get(eqn.primitive.name)
    return None if name is None else eqn.params[name]


def _is_identity(eqn):
    # Differentiation inside shard_map reshapes to the shape that is there.
    reshaped = eqn.primitive.name == "reshape" and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    return reshaped or eqn.primitive.name in ("stop_gradient", "copy")


def _primitives(jaxpr):
    for eqn in jaxpr.eqns:
        inner = _inner(eqn)
        if inner is None:
            if not _is_identity(eqn):
                yield eqn.primitive.name
        else:
            yield from _primitives(getattr(inner, "jaxpr", inner))


def _evaluate(jaxpr, consts, args):
    """Each result with the (value, number) whose product it is, where it is one, else None."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    products = {}
    read = lambda x: x.val if isinstance(x, core.Literal) else values[x]
    for eqn in jaxpr.eqns:
        inputs, inner = [read(x) for x in eqn.invars], _inner(eqn)
        if inner is not None:
            inner_results = _evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), inputs)
            outputs = [x for x, _ in inner_results]
            products.update((var, p) for var, (_, p) in zip(eqn.outvars, inner_results, strict=True) if p)
        elif eqn.primitive.name == "add_any":
            outputs = [lax.add(*inputs)]
        elif eqn.primitive.name == "one_minus_square":  # of the derivative of tanh
            outputs = [1 - inputs[0] * inputs[0]]
        elif _is_identity(eqn):
            outputs = inputs
        elif (product := _product(eqn, inputs, products)) is not None:
            # Factors meet, where the compiler would keep two multiplications because they round twice.
            outputs = [product[0] * product[1]]
            products[eqn.outvars[0]] = product
        else:
            outputs = eqn.primitive.bind(*inputs, **eqn.params)
            outputs = outputs if eqn.primitive.multiple_results else [outputs]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [(read(x), None if isinstance(x, core.Literal) else products.get(x)) for x in jaxpr.outvars]


def _product(eqn, inputs, products):
    """(value, number) of a float32 array multiplied or divided by a number, else None."""
    if eqn.primitive.name not in ("mul", "div") or eqn.outvars[0].aval.dtype != "float32":
        return None
    numbers = [isinstance(x, core.Literal) for x in eqn.invars]
    if sum(numbers) != 1 or (eqn.primitive.name == "div" and not numbers[1]):
        return None
    var, value = eqn.invars[numbers.index(False)], inputs[numbers.index(False)]
    number = float(inputs[numbers.index(True)])
    value, factor = products.get(var, (value, 1.0))
    return value, factor * number if eqn.primitive.name == "mul" else factor / number
