"""The functions of `Custom` masks and scores on a GPU, where lowering alone proves nothing about results."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax import lax

import pallas_fa
from pallas_fa.backends.gpu import elementwise
from tests import accuracy
from tests.elementwise_kernel import SEMANTICS, run
from tests.test_float_functions import ACCURATE, VALUES, line, worst
from tests.test_kernel_functions import ARRAYS, CALLS, CONSTANT, B, H, N, S, T, with_constant_score
from tests.test_kernel_operations import CLAIMED, dtypes_of_operands, function

pytestmark = pytest.mark.gpu


def in_kernel(fn, *args, precise=False, semantics="warpgroup"):
    """`fn` of arrays of one size, by a kernel."""
    count = args[0].size
    tiles = [jnp.resize(jnp.asarray(x), (-(-count // 4096) * 64, 64)) for x in args]
    inlined = lambda *args: elementwise.inline(fn, *args, precise=precise)
    return np.asarray(run(inlined, *tiles, semantics=semantics)).ravel()[:count]


@pytest.mark.parametrize("name", ACCURATE)
def test_errors_are_at_most_four_times_those_of_xla(name, record_property):
    """Of XLA on this GPU, over the whole range."""
    fn, truth, args = ACCURATE[name]
    with np.errstate(all="ignore"):
        want = truth(*(x.astype(np.float64) for x in args))
    ours, theirs = worst(in_kernel(fn, *args, precise=True), want), worst(jax.jit(fn)(*args), want)
    record_property("errors", (ours, theirs))
    assert ours <= 4 * max(theirs, 2.0**-24 if theirs else 0.0), (ours, theirs)


# (the function, its truth, arguments, bound on the error, whether that is relative): approximations by the hardware.
HARDWARE = {
    "tanh": (jnp.tanh, np.tanh, line(-10, 10), 2.0**-10.9, True),
    "sin": (jnp.sin, np.sin, line(-np.pi, np.pi), 2.0**-20, False),
    "cos": (jnp.cos, np.cos, line(-np.pi, np.pi), 2.0**-20, False),
    "sqrt": (jnp.sqrt, np.sqrt, line(1e-3, 1e6), 2.0**-22, True),
    "rsqrt": (lax.rsqrt, lambda x: x**-0.5, line(1e-3, 1e6), 2.0**-22, True),
    "logistic": (jax.nn.sigmoid, scipy.special.expit, line(-10, 80), 2.0**-19, True),
}


@pytest.mark.parametrize("name", HARDWARE)
def test_approximations_keep_their_bounds(name, record_property):
    fn, truth, x, bound, relative = HARDWARE[name]
    want = truth(x.astype(np.float64))
    error = worst(in_kernel(fn, x), want) if relative else float(abs(in_kernel(fn, x) - want).max())
    record_property("error", error)
    assert error <= bound


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("name", [name for name in CLAIMED if name not in HARDWARE])
def test_special_values_are_those_of_xla(name, semantics):
    """Of the dtypes that kernels compute in; subnormal numbers may be 0 in either."""
    for dtypes in dtypes_of_operands(name, ("float32", "int32")):
        args = [x.ravel() for x in np.meshgrid(*(VALUES["int32" if x == "bool" else x] for x in dtypes))]
        args = [args[0] % 2, *args[1:]] if name == "select_n" else args

        def first(*args, dtypes=dtypes):
            args = [x.astype(dtype) for x, dtype in zip(args, dtypes, strict=True)]  # bools came as integers
            return jax.tree.leaves(function(name)(*args))[0].astype(jnp.float32)

        ours, theirs = in_kernel(first, *args, semantics=semantics), np.asarray(jax.jit(first)(*args))
        normal = np.isnan(theirs) | (abs(theirs) > 1.2e-38)
        np.testing.assert_allclose(ours[normal], theirs[normal], rtol=1e-5, err_msg=str(dtypes))
        assert not (abs(ours[~normal]) > 1.2e-38).any()


# Of int32 tiles x and y, after what may lose that they are signed.
SIGNED = {
    "below": lambda x, y: x < y,
    "least": jnp.minimum,
    "largest": jnp.maximum,
    "size": lambda x, y: abs(x),
    "float": lambda x, y: x.astype(jnp.float32),
    "quotient": lambda x, y: x // 3,
    "remainder": lambda x, y: lax.rem(x, jnp.int32(5)),
    "shift": lambda x, y: x >> 1,
    "clipped": lambda x, y: jnp.clip(x, -3, 4),
}
CHOICES = {
    "numbers": lambda x, y: jnp.where(x > y, 5, -7),
    "by float": lambda x, y: jnp.where(y.astype(jnp.float32) > 0.5, -1, 3),
    "by two": lambda x, y: jnp.where((x > 0) & (y > 0), -(2**30), 2),
    "nested": lambda x, y: jnp.where(x > 0, jnp.where(y > 0, -1, 1), jnp.where(y > 0, 2, -2)),
    "of three": lambda x, y: lax.select_n(lax.rem(abs(y), jnp.int32(3)), *(jnp.full_like(x, z) for z in (-4, 0, 4))),
    "narrow": lambda x, y: jnp.where(x > y, jnp.int8(5), jnp.int8(-7)).astype(jnp.int32),
    "bool": lambda x, y: -(x > y).astype(jnp.int32),
    "sign": lambda x, y: jnp.sign(x - y),
    "least": lambda x, y: abs(jnp.where(x > y, -(2**31), x)),
}


@pytest.mark.parametrize("semantics", SEMANTICS)
@pytest.mark.parametrize("choice", CHOICES)
def test_chosen_integers_are_signed(choice, semantics):
    """What is chosen between numbers, in every operation that differs for unsigned integers."""
    x, y = np.meshgrid(np.arange(-32, 32, dtype=np.int32), np.arange(-32, 32, dtype=np.int32))

    def all_of_them(x, y):
        chosen = CHOICES[choice](x, y)
        weighted = (fn(chosen, y).astype(jnp.float32) * 3.0**-i for i, fn in enumerate(SIGNED.values()))
        return sum(weighted)

    ours, want = in_kernel(all_of_them, x, y, semantics=semantics), np.asarray(jax.jit(all_of_them)(x, y)).ravel()
    np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("implementation", ("mosaic_gpu", "mma"))
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_accurate(name, implementation):
    """Whole kernels, forward and backward: at most twice the error of xla, against the same in float32.

    Gradients of few elements are sums in which rounding cancels by luck: their errors are averaged over several inputs.
    """
    keywords, arrays = CALLS[name], jax.tree.map(jnp.asarray, ARRAYS)

    def program(implementation):
        def loss(q, k, v, arrays):
            out = pallas_fa.dot_product_attention(q, k, v, implementation=implementation, **keywords(arrays))
            return jnp.sum(jnp.sin(out.astype(jnp.float32))), out

        return jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True, allow_int=True))

    def results(run, qkv):
        gradients, out = run(*qkv, arrays)
        leaves = jax.tree.leaves((out, gradients))
        return [np.asarray(x, np.float64) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]

    truth, xla, ours = map(program, ("reference", "xla", implementation))

    def errors(seed):
        """For each result its largest element, the largest errors of xla and of ours, and its size."""
        rng = np.random.default_rng(seed)
        qkv = [jnp.asarray(rng.standard_normal((B, n, N, H)), jnp.bfloat16) for n in (T, S, S)]
        wide = [x.astype(jnp.float32) for x in qkv]
        found = zip(results(truth, wide), results(xla, qkv), results(ours, qkv), strict=True)
        return [(abs(x).max(), abs(theirs - x).max(), abs(got - x).max(), x.size) for x, theirs, got in found]

    for drawn in zip(*map(errors, range(accuracy.DRAWS)), strict=True):
        counted = drawn if drawn[0][-1] < accuracy.FEW else drawn[:1]
        scale, of_xla, of_ours, _ = np.mean(counted, axis=0)
        assert of_ours <= 2 * of_xla + 2.0**-8 * scale, name


@pytest.mark.parametrize("implementation", ("mosaic_gpu", "mma"))
@pytest.mark.parametrize("name", CONSTANT)
def test_scores_may_be_constant(name, implementation):
    """Those of one query, too, which other kernels compute. In the gradient of `a`, errors of many rows cancel by luck."""
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.standard_normal((B, n, N, H)), jnp.bfloat16) for n in (T, S))
    a = jnp.asarray(rng.uniform(0.5, 2, (1, N, 1, 1)), jnp.float32)

    def program(implementation):
        attend = with_constant_score(name, implementation)
        loss = lambda *args: jnp.sum(jnp.sin(attend(*args).astype(jnp.float32)))
        return jax.jit(lambda q, k, a: (attend(q, k, a), attend(q[:, :1], k, a), jax.grad(loss, (0, 1, 2))(q, k, a)))

    results = [jax.tree.leaves(program(x)(q, k, a)) for x in (implementation, "reference")]
    for ours, want, least in zip(*results, (0.05, 0.05, 0.05, 0.05, math.sqrt(B * T)), strict=True):
        ours, want = (np.asarray(x, np.float64) for x in (ours, want))
        np.testing.assert_allclose(ours, want, atol=0.02 * max(abs(want).max(), least))
