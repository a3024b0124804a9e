"""What kernels compute in the place of XLA's operations: at most 4 times the error of these, and the same special values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax import lax

from pallas_fa.backends.gpu import elementwise
from tests.test_kernel_operations import CLAIMED, dtypes_of_operands, function, is_claimed

TINY = float(np.finfo(np.float32).tiny)
RNG = np.random.default_rng(0)


def line(low, high, count=100_000):
    return np.linspace(low, high, count, dtype=np.float32)


def magnitudes(low=-37, high=38, count=100_000):
    return np.logspace(low, high, count).astype(np.float32)


SMALL = magnitudes(high=0)
BOTH_SIGNS = np.concatenate([magnitudes(), -magnitudes()])
POSITIVE = np.concatenate([magnitudes(), line(0.4, 2.5)])
# Powers whose results lie all over the range, of bases all over the range and close to 1.
BASES = np.concatenate([magnitudes(), line(0.4, 2.5), np.float32(1 + RNG.integers(1, 999, 50_000) * 2.0**-23)])
BASES = BASES[BASES != 1]
EXPONENTS = (RNG.uniform(-126, 127, BASES.size) / np.log2(BASES.astype(float))).astype(np.float32)
DIVIDENDS = np.concatenate([RNG.permutation(BOTH_SIGNS), line(-1000, 1000)])
DIVISORS = np.concatenate([RNG.permutation(BOTH_SIGNS), RNG.uniform(-10, 10, 100_000).astype(np.float32)])
INSIDE = np.concatenate([line(-80, 80), SMALL, -SMALL])

# (a function of float32, its truth in float64, its arguments)
ACCURATE = {
    "exp": (lax.exp, np.exp, (line(-87, 88.7),)),
    "exp2": (lax.exp2, np.exp2, (line(-125.9, 127.9),)),
    "expm1": (lax.expm1, np.expm1, (np.concatenate([line(-30, 88), SMALL, -SMALL]),)),
    "log": (lax.log, np.log, (POSITIVE,)),
    "log2": (jnp.log2, np.log2, (POSITIVE,)),
    "log1p": (lax.log1p, np.log1p, (np.concatenate([POSITIVE, -SMALL[SMALL < 1], line(-0.9999, 0.5)]),)),
    "pow": (lax.pow, np.power, (BASES, EXPONENTS)),
    "2 ** x": (lambda x: 2**x, lambda x: 2**x, (line(-125.9, 127.9),)),
    "x ** 2.5": (lambda x: x**2.5, lambda x: x**2.5, (magnitudes(-15, 15),)),
    "x ** -3": (lambda x: x**-3, lambda x: x**-3.0, (magnitudes(-12, 12),)),
    "tanh": (jnp.tanh, np.tanh, (np.concatenate([line(-12, 12), SMALL, -SMALL]),)),
    "erf": (lax.erf, scipy.special.erf, (np.concatenate([line(-6, 6), SMALL, -SMALL]),)),
    "erfc": (lax.erfc, scipy.special.erfc, (line(-6, 9.19),)),
    "atan": (jnp.arctan, np.arctan, (BOTH_SIGNS,)),
    "atan2": (jnp.arctan2, np.arctan2, (DIVIDENDS, DIVISORS)),
    "floor": (jnp.floor, np.floor, (np.concatenate([BOTH_SIGNS, line(-10, 10)]),)),
    "ceil": (jnp.ceil, np.ceil, (np.concatenate([BOTH_SIGNS, line(-10, 10)]),)),
    "rem": (lax.rem, np.fmod, (DIVIDENDS, DIVISORS)),
    "x % y": (jnp.remainder, np.mod, (line(-1000, 1000), DIVISORS[-100_000:])),
    "softplus": (jax.nn.softplus, lambda x: np.logaddexp(x, 0), (INSIDE,)),
    "elu": (jax.nn.elu, lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), (INSIDE,)),
    "exact gelu": (
        lambda x: jax.nn.gelu(x, approximate=False),
        lambda x: x * scipy.special.ndtr(x),
        (np.concatenate([line(-12, 12), SMALL, -SMALL]),),
    ),
    "logaddexp": (jnp.logaddexp, np.logaddexp, (line(-80, 80), RNG.permutation(line(-80, 80)))),
}  # fmt: skip


def worst(got, want):
    """The largest relative error of results that are normal numbers."""
    normal = (abs(want) > TINY) & (abs(want) < 3.4e38)
    return float(np.max(abs(np.asarray(got, float)[normal] / want[normal] - 1)))


def as_users_compile(fn):
    """As programs of `make test` are compiled, bools can't be clamped, and sums of tiny products lose them."""
    return jax.jit(fn, compiler_options={"xla_backend_extra_options": "", "xla_backend_optimization_level": 3})


def in_kernel(fn):
    return as_users_compile(lambda *args: elementwise.inline(fn, *args, precise=True))


@pytest.mark.parametrize("name", ACCURATE)
def test_errors_are_at_most_four_times_those_of_xla(name, record_property):
    fn, truth, args = ACCURATE[name]
    with np.errstate(all="ignore"):
        want = truth(*(x.astype(np.float64) for x in args))
    ours, theirs = (worst(run(*args), want) for run in (in_kernel(fn), as_users_compile(fn)))
    record_property("errors", (ours, theirs))
    assert ours <= 4 * theirs, (ours, theirs)


FLOATS = np.array(
    [0, 0.1, 0.5, 1, 1.5, 2, 2.5, 3, 7, 88.8, 104, 128, 149, 2**24 + 2, 2**31, 1e10, 3e38, 1e-10, 2e-38, np.inf], np.float32
)  # fmt: skip
FLOATS = np.concatenate([FLOATS, -FLOATS, [np.nan]]).astype(np.float32)
INTS = np.array([0, 1, 2, 3, 5, 7, 31, 32, 33, 127, 128, 255, 256, 32768, 2**31 - 1, -(2**31)], np.int32)
INTS = np.concatenate([INTS, -INTS[1:-1]])
VALUES = {"float32": FLOATS, "int32": INTS, "uint32": INTS.view(np.uint32), "bool": np.array([False, True])}
VALUES |= {x: INTS.astype(x) for x in ("int8", "uint8", "int16", "uint16")}
with np.errstate(over="ignore"):
    VALUES |= {x: FLOATS.astype(jnp.dtype(x)) for x in ("bfloat16", "float16")}
HARDWARE = ("cos", "logistic", "rsqrt", "sin", "sqrt")  # not rewritten: kernels have their own


@pytest.mark.parametrize("name", [name for name in CLAIMED if name not in HARDWARE])
def test_special_values_are_those_of_xla(name):
    """Of all dtypes: zeros, infinities, NaN, the ends of the ranges, shifts past the width, divisions by 0."""
    for dtypes in dtypes_of_operands(name, [x for x in VALUES if is_claimed(name, x)]):
        args = np.meshgrid(*(VALUES[x] for x in dtypes))
        args = [args[0] % 2, *args[1:]] if name == "select_n" else args
        runs = in_kernel(function(name)), as_users_compile(function(name))
        got, want = (jax.tree.leaves(run(*args)) for run in runs)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == theirs.dtype
            if not jnp.issubdtype(ours.dtype, jnp.floating):
                np.testing.assert_array_equal(ours, theirs, err_msg=str(dtypes))
                continue
            rounding = max(4 * float(jnp.finfo(ours.dtype).eps), 1e-5)  # XLA's own errors, in float32
            ours, theirs = np.asarray(ours, float), np.asarray(theirs, float)
            normal = abs(theirs) > TINY
            np.testing.assert_allclose(ours[normal], theirs[normal], rtol=rounding, err_msg=str(dtypes))
            assert not (abs(ours[~normal]) > TINY).any() and not np.isnan(ours[~normal & ~np.isnan(theirs)]).any()
