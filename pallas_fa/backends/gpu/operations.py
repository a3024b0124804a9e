"""The operations that functions of masks and scores may use in a kernel: what lowers as it is, and what is rewritten.

`ON_TILES` and `ON_SCALARS` are what Mosaic GPU lowers: tests/test_kernel_operations.py lowers every entry. `REWRITES` brings
other operations to these, and those that lower to a wrong result too.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_fa.backends.gpu import float_functions as floats
from pallas_fa.backends.gpu import float_remainders as remainders

_F, _I, _U, _B = "float32", "int32", "uint32", "bool"
_NUMBERS, _INTEGERS, _ALL = (_F, _I, _U), (_I, _U), (_F, _I, _U, _B)
_COMPARISONS = dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge"), _ALL)
_ARITHMETIC = {
    **dict.fromkeys(("add", "sub", "mul", "neg"), _NUMBERS),
    **dict.fromkeys(("and", "or", "xor"), (*_INTEGERS, _B)),
    **dict.fromkeys(("shift_left", "shift_right_logical"), _INTEGERS),
    "div": _NUMBERS,
    "rem": _INTEGERS,
    "select_n": _ALL,
    "shift_right_arithmetic": (_I,),
    **_COMPARISONS,
}
# By the dtype of the operands, for `select_n` of the cases. The operands are tiles or scalars, of `select_n` tiles only.
ON_TILES = {
    **_ARITHMETIC,
    **dict.fromkeys(("cos", "exp2", "logistic", "round", "rsqrt", "sin", "sqrt", "tanh"), (_F,)),
    "abs": (_F,),
    **dict.fromkeys(("max", "min", "bitcast_convert_type"), _NUMBERS),
    "clz": _INTEGERS,
}
# On scalars only what needs no library function: lowering would not show that there is none.
ON_SCALARS = {**_ARITHMETIC, "max": _INTEGERS, "min": _INTEGERS}
BROADCAST = _ALL  # scalars to tiles
NARROW = ("int8", "int16", "uint8", "uint16", "float16", "bfloat16")
# (from, to), on tiles and scalars alike.
CONVERSIONS = frozenset((x, y) for x in (*_ALL, *NARROW) for y in (*_NUMBERS, *NARROW) if x != y)
_SIGNED, _UNSIGNED = ("int8", "int16"), ("uint8", "uint16")
# Functions of 8 and 16 bits that are others in 32 bits.
NOT_WIDENED = {
    **dict.fromkeys(("bitcast_convert_type", "clz"), NARROW),
    "shift_right_arithmetic": _UNSIGNED,
    "shift_right_logical": _SIGNED,
}
# Of operands that are all known.
OF_NUMBERS = {
    "and": np.bitwise_and,
    "eq": np.equal,
    "log": np.log,
    "lt": np.less,
    "ne": np.not_equal,
    "or": np.bitwise_or,
    "select_n": lambda which, *cases: cases[int(which)],
}
IDENTITIES = frozenset("copy copy_p name optimization_barrier pcast pvary stop_gradient".split())


def lowers(name: str, params: dict[str, Any], inputs: Any, on_scalars: bool) -> bool:
    """Whether the operation lowers as it is: on scalars, or on tiles, the other operands being scalars."""
    dtypes = {x.dtype.name for x in inputs}
    if name == "convert_element_type":
        return (*dtypes, params["new_dtype"].name) in CONVERSIONS
    if name == "select_n":
        which, *cases = inputs
        if which.dtype != jnp.bool_ or len(cases) != 2 or len({jnp.shape(x) for x in inputs}) > 1:
            return False
        dtypes = {x.dtype.name for x in cases}
    table = ON_SCALARS if on_scalars else ON_TILES
    return len(dtypes) == 1 and dtypes <= set(table.get(name, ())) and params.get("out_dtype") is None


def is_safe(name: str, inputs: Any) -> bool:
    """Whether the last operand is a number that needs no rewriting of a division, remainder or shift."""
    last = inputs[-1]
    if name in ("div", "rem") and last.dtype != jnp.float32:
        return isinstance(last, np.generic) and last not in (0, -1)
    return name.startswith("shift") and isinstance(last, np.generic) and 0 <= int(last) < 32


def by_power_of_two(name: str, program: Any, inputs: Any) -> Callable[[Any], Any] | None:
    """What jnp's `x // y` or `x % y` does to x, as one operation; None where y is no known power of 2, or it is neither.

    The operations that jnp makes of them are so many that a kernel may spill registers (evidence: forward/visit-lists).

    Args:
      name: of the function that was traced; its derivatives have the same name, and more arguments.
      program: its jaxpr.
      inputs: its arguments.
    """
    if name not in _FLOORED or len(inputs) != 2 or str(program) != _traced(name, tuple(program.in_avals)):
        return None
    y, x_dtype, dtype = inputs[-1], program.in_avals[0].dtype, program.out_avals[0].dtype
    is_power = isinstance(y, np.integer) and 0 < y < 2**31 and int(y) & (int(y) - 1) == 0
    if not is_power or dtype != x_dtype or dtype.name not in _INTEGERS:
        return None
    shift_right = lax.shift_right_arithmetic if dtype == jnp.int32 else lax.shift_right_logical
    if name == "remainder":
        return lambda x: x & dtype.type(int(y) - 1)
    return lambda x: shift_right(x, dtype.type(int(y).bit_length() - 1))


_FLOORED = {"floor_divide": jnp.floor_divide, "remainder": jnp.remainder}


@functools.lru_cache(maxsize=256)
def _traced(name, avals):
    (eqn,) = jax.make_jaxpr(_FLOORED[name])(*avals).eqns
    return str(eqn.params["jaxpr"])


def _not(x):
    return x ^ (True if x.dtype == jnp.bool_ else np.array(-1).astype(x.dtype)[()])


def _abs(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
        return lax.abs(x)
    # The size of the least integer is itself; to LLVM, Mosaic's `abs` of it is whatever suits.
    return x if jnp.issubdtype(x.dtype, jnp.unsignedinteger) else jnp.where(x < 0, -x, x)


def _sign(x):
    if jnp.issubdtype(x.dtype, jnp.floating):
        one = np.float32(1)
        return jnp.where(x > 0, one, jnp.where(x < 0, -one, x))  # 0, -0 and NaN are their own
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _max(x, y):
    return x | y if x.dtype == jnp.bool_ else lax.max(x, y)


def _min(x, y):
    return x & y if x.dtype == jnp.bool_ else lax.min(x, y)


def _square(x):
    return x * x


def _integer_pow(x, *, y):
    if y == 0:
        return jnp.ones_like(x)
    result = x
    for bit in f"{abs(y):b}"[1:]:
        result = result * result
        result = result * x if bit == "1" else result
    return 1 / result if y < 0 else result


def _clamp(low, x, high):
    return _min(_max(x, low), high)


def _select_n(which, *cases):
    """By bool or by number, in any order of scalars and tiles."""
    if which.dtype == jnp.bool_:
        shape = np.broadcast_shapes(which.shape, *(x.shape for x in cases))
        if cases[0].dtype == jnp.int32:
            # With lane semantics a choice between two scalars has the sign of `which`: none.
            return _select_n(which, *(x.astype(jnp.uint32) for x in cases)).astype(jnp.int32)
        return lax.select_n(*(jnp.broadcast_to(x, shape) for x in (which, *cases)))
    result = cases[-1]
    for i, case in enumerate(cases[-2::-1]):
        result = _select_n(which == len(cases) - 2 - i, result, case)
    return result


def _convert(x, *, new_dtype):
    return x != 0 if new_dtype == jnp.bool_ else x if x.dtype == new_dtype else lax.convert_element_type(x, new_dtype)


def _div(x, y):
    """Of integers, as XLA defines what the hardware does not: x / 0 has all bits set, the smallest / -1 is itself."""
    if x.dtype == jnp.float32:
        return lax.div(x, y)
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return jnp.where(y == 0, np.uint32(2**32 - 1), lax.div(x, jnp.where(y == 0, 1, y)))
    special = (y == 0) | (y == -1)
    return jnp.where(special, jnp.where(y == 0, -1, -x), lax.div(x, jnp.where(special, 1, y)))


def _rem(x, y):
    if x.dtype == jnp.float32:
        return remainders.rem(x, y)
    special = (y == 0) | (y == -1) if jnp.issubdtype(x.dtype, jnp.signedinteger) else y == 0
    return jnp.where(special, jnp.where(y == 0, x, 0), lax.rem(x, jnp.where(special, 1, y)))


def _shift(operation, x, amount):
    """The hardware leaves shifts by 32 and more open."""
    far = amount.astype(jnp.uint32) >= 32
    if operation is lax.shift_right_arithmetic and x.dtype.itemsize == 4:  # narrower ones have another sign bit
        signed = operation(x.astype(jnp.int32), jnp.where(far, 31, amount.astype(jnp.int32)))
        return signed.astype(x.dtype)
    return jnp.where(far, 0, operation(x, jnp.where(far, 0, amount)))


# Functions of the operands, and of the parameters that `PARAMETERS` names.
PARAMETERS = {"integer_pow": ("y",), "convert_element_type": ("new_dtype",)}
REWRITES: dict[str, Callable[..., Any]] = {
    "abs": _abs,
    "add_any": lax.add,
    "atan": floats.atan,
    "atan2": floats.atan2,
    "ceil": remainders.ceil,
    "clamp": _clamp,
    "convert_element_type": _convert,
    "div": _div,
    "erf": floats.erf,
    "erfc": floats.erfc,
    "exp": floats.exp,
    "exp2": floats.exp2,
    "expm1": floats.expm1,
    "floor": remainders.floor,
    "integer_pow": _integer_pow,
    "is_finite": lambda x: abs(x) < jnp.inf,
    "log": floats.log,
    "log1p": floats.log1p,
    "log2": floats.log2,
    "max": _max,
    "min": _min,
    "not": _not,
    "one_minus_square": lambda x: 1 - x * x,
    "pow": lambda x, y: floats.pow(x, y.astype(jnp.float32)),
    "rem": _rem,
    "select_n": _select_n,
    "shift_left": functools.partial(_shift, lax.shift_left),
    "shift_right_arithmetic": functools.partial(_shift, lax.shift_right_arithmetic),
    "shift_right_logical": functools.partial(_shift, lax.shift_right_logical),
    "sign": _sign,
    "square": _square,
}
# Of float32 inputs, too: what the hardware has with 11 bits, enough for logits of 16-bit inputs.
PRECISE = REWRITES | {"tanh": floats.tanh}
# What a rewritten form takes from the hardware.
AS_THEY_ARE = {"tanh": ("exp2",)}
