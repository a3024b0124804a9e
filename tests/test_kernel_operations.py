"""The operations of masks and scores in kernels: every entry of the tables lowers, and every claim comes down to them."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_fa.backends.gpu import elementwise, operations
from tests.elementwise_kernel import SHAPE, lower

# It has no function in `jax.lax`: it stands in the derivative of tanh, which is an approximation in kernels.
_DERIVATIVE = jax.make_jaxpr(lambda x: jax.vjp(lax.tanh, x)[1](x))(1.0)
_ONE_MINUS_SQUARE = next(x.primitive for x in _DERIVATIVE.eqns if x.primitive.name == "one_minus_square")

# The operations by name, where `jax.lax` has no function of that name that takes arrays only.
FUNCTIONS = {
    "add_any": lambda x: jax.vjp(lambda x: lax.mul(x, lax.tanh(x)), x)[1](x)[0],
    "and": lax.bitwise_and,
    "bitcast_convert_type": lambda x: lax.bitcast_convert_type(x, jnp.float32 if x.dtype != jnp.float32 else jnp.int32),
    "convert_element_type": lambda x: (x.astype(jnp.float32), x.astype(jnp.int8), x.astype(jnp.bool_)),
    "integer_pow": lambda x: [
        lax.integer_pow(x, y) for y in ((-3, -1, 0, 1, 2, 5) if x.dtype == jnp.float32 else (0, 3))
    ],
    "max": lambda x, y: lax.max(x, y),
    "min": lambda x, y: lax.min(x, y),
    "not": lax.bitwise_not,
    "one_minus_square": lambda x: _ONE_MINUS_SQUARE.bind(x),
    "or": lax.bitwise_or,
    "round": lambda x: [lax.round(x, method) for method in lax.RoundingMethod],
    "select_n": lambda which, x, y: lax.select_n(which, x, y),
    "xor": lax.bitwise_xor,
}
PAIRS = [
    tuple(x.split()) for x in ("tile tile", "tile scalar", "scalar tile", "row column", "column row", "scalar scalar")
]
KINDS = {
    1: [("tile",), ("row",), ("column",), ("scalar",)],
    2: PAIRS,
    3: [("tile", "row", "column"), ("scalar",) * 3],
}
SHAPES = {  # of operands, as JAX takes them
    1: [(SHAPE,), ((),)],
    2: [(SHAPE, SHAPE), (SHAPE, ()), ((), SHAPE), ((), ())],
    "clamp": [(SHAPE,) * 3, ((), SHAPE, ()), ((),) * 3],
    "select_n": [(SHAPE,) * 3, ((), SHAPE, SHAPE), ((),) * 3],
}
DTYPES = ("float32", "int32", "uint32", "bool")
NARROW = ("int8", "uint8", "int16", "uint16", "bfloat16", "float16")
CLAIMED = sorted({*operations.ON_TILES, *operations.REWRITES})


def function(name):
    return FUNCTIONS.get(name) or getattr(lax, name)


def arity(name):
    parameters = inspect.signature(function(name)).parameters.values()
    return sum(p.default is p.empty and p.kind is not p.KEYWORD_ONLY for p in parameters)


def is_claimed(name, dtype):
    """Not asked of 16-bit floats, which are widened as in other functions: what XLA compiles slowly, or is bad at."""
    few = ("bfloat16", "float16") if name in ("exp2", "pow", "rem") else ()
    return dtype not in (*operations.NOT_WIDENED.get(name, ()), *few)


def dtypes_of_operands(name, dtypes):
    """Those of `dtypes` that JAX takes, each as a tuple of one dtype for each operand."""
    if name == "select_n":
        return [(which, x, x) for x in dtypes for which in ("bool", "int32")]
    found = [(x,) * arity(name) for x in dtypes]
    return [x for x in found if _accepts(name, x)]


def _accepts(name, dtypes):
    try:
        jax.eval_shape(function(name), *(jax.ShapeDtypeStruct(SHAPE, x) for x in dtypes))
    except (TypeError, ValueError):
        return False
    return True


def applied(fn, dtypes, kinds):
    """`fn` of values of these dtypes and kinds, made by a function as `lower` passes one."""
    return lambda value: fn(*(value(k, x, seed) for seed, (k, x) in enumerate(zip(kinds, dtypes, strict=True))))


def gradient(name):
    """The gradients to the last operand, and to the one before where there are two, as the backward kernel has them."""

    def pulled_back(*args):
        count = min(arity(name), 2)
        out, pullback = jax.vjp(lambda *floats: function(name)(*args[: len(args) - count], *floats), *args[-count:])
        return pullback(jax.tree.map(_cotangent, out))

    return pulled_back


def _cotangent(y):
    return y if y.dtype == jnp.float32 else np.zeros(y.shape, jax.dtypes.float0)


# ---- the tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", operations.ON_TILES)
def test_entries_of_the_tables_lower(name):
    """As they are, of every dtype and every kind of operands."""
    functions = []
    for dtype in operations.ON_TILES[name]:
        on_scalars = dtype in operations.ON_SCALARS.get(name, ())
        dtypes = ("bool", dtype, dtype) if name == "select_n" else (dtype,) * arity(name)
        for kinds in KINDS[arity(name)]:
            if on_scalars or set(kinds) != {"scalar"}:
                functions.append(applied(function(name), dtypes, kinds))
    lower(*functions)


@pytest.mark.parametrize("dtype", sorted({x for x, _ in operations.CONVERSIONS}))
def test_conversions_lower(dtype):
    convert = lambda y: lambda x: lax.convert_element_type(x, y)
    others = [y for x, y in sorted(operations.CONVERSIONS) if x == dtype]
    lower(*(applied(convert(y), (dtype,), (kind,)) for y in others for kind in ("tile", "scalar")))


def test_broadcasts_lower():
    lower(lambda value: [lax.broadcast_in_dim(value("scalar", x), SHAPE, ()) for x in operations.BROADCAST])


# ---- claims ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLAIMED)
def test_claims_come_down_to_the_tables(name):
    """Of every dtype that JAX takes and every kind of operands, and the derivative."""
    every = SHAPES.get(name) or SHAPES[arity(name)]
    for dtypes in dtypes_of_operands(name, [x for x in DTYPES + NARROW if is_claimed(name, x)]):
        for shapes in every if "32" in dtypes[-1] else every[:1]:
            specs = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]
            tile = jax.ShapeDtypeStruct(SHAPE, jnp.float32)  # there is one in every kernel
            assert elementwise.why_not(lambda _, *args: function(name)(*args), tile, *specs) is None, specs
        if dtypes[-1] == "float32":
            specs = [jax.ShapeDtypeStruct(SHAPE, x) for x in dtypes]
            assert elementwise.why_not(gradient(name), *specs) is None, specs


@pytest.mark.parametrize("name", operations.NOT_WIDENED)
def test_functions_that_differ_in_32_bits_are_refused(name):
    for dtypes in dtypes_of_operands(name, operations.NOT_WIDENED[name]):
        specs = [jax.ShapeDtypeStruct(SHAPE, x) for x in dtypes]
        assert f"the operation {name} of {dtypes[0]} does not lower" in (
            elementwise.why_not(function(name), *specs) or ""
        )


@pytest.mark.parametrize("name", sorted(operations.REWRITES))
def test_rewritten_operations_lower(name):
    """With their derivatives."""

    def inlined(fn):
        return lambda tile, *args: elementwise.inline(lambda _, *args: fn(*args), tile, *args)

    functions = []
    for dtypes in dtypes_of_operands(name, ("float32", "int32", "bool")):
        kinds = ["column" if x else "scalar" for x in (SHAPES.get(name) or SHAPES[arity(name)])[1]]
        functions.append(applied(inlined(function(name)), ("int32", *dtypes), ("tile", *kinds)))
        if dtypes[-1] == "float32":
            functions.append(applied(inlined(gradient(name)), ("int32", *dtypes), ("tile",) * (1 + len(dtypes))))
    lower(*functions)


@pytest.mark.parametrize("fn", (jnp.remainder, jnp.floor_divide), ids=("remainder", "floor_divide"))
def test_gradients_of_floored_divisions_to_both_operands_lower(fn):
    """The derivative is traced under the name of the function, with more arguments."""
    tile = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    assert elementwise.why_not(lambda x, y: jax.vjp(fn, x, y)[1](x), tile, tile) is None


@pytest.mark.parametrize("dtype", ("int32", "uint32"))
@pytest.mark.parametrize("y", (1, 8, 2**30, 6))
def test_floored_divisions_by_powers_of_two_are_one_operation(dtype, y):
    x = np.array([[0, 1, 7, 8, 9, 2**31 - 1], [2**31, 2**32 - 1, 2**32 - 8, 2**32 - 9, 5, 6]], np.uint32).astype(dtype)
    fn = lambda x: (x // y, x % y, *jnp.divmod(x, np.asarray(y, dtype)))
    inlined = lambda x: elementwise.inline(fn, x)
    np.testing.assert_array_equal(jax.jit(inlined)(x), fn(x))
    program = jax.make_jaxpr(inlined)(x)
    assert (len(program.eqns) == 4) == (y != 6), program


def test_integers_are_not_chosen_as_signed_ones():
    """With lane semantics a choice between numbers is taken for unsigned, until a conversion says that it is not."""
    program = jax.make_jaxpr(lambda x: elementwise.inline(lambda x: jnp.where(x > 0, 5, -7) < x, x))(
        jnp.zeros(SHAPE, int)
    )
    chosen = [str(eqn.outvars[0].aval) for eqn in program.eqns if eqn.primitive.name == "select_n"]
    assert chosen == ["uint32[64,64]"], program


def test_narrow_numbers_are_chosen_by_what_becomes_a_tile():
    """As a scalar does in an operation that does not lower on scalars."""
    bits = lambda: lax.bitcast_convert_type(jnp.float32(-3), jnp.int32)
    chosen = lambda x: x + jnp.where(bits() > 0, jnp.int8(-5), jnp.int8(7)).astype(jnp.float32)
    assert elementwise.why_not(chosen, jax.ShapeDtypeStruct(SHAPE, jnp.float32)) is None
    np.testing.assert_array_equal(elementwise.inline(chosen, jnp.zeros(SHAPE)), jnp.full(SHAPE, 7.0))
