"""`Custom` masks and scores as users write them: the default runs them in kernels, and these lower for CUDA."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.backends.gpu import elementwise
from pallas_fa.backends.gpu.gradient_tile import score_pullback
from tests import test_custom_functions as functions
from tests.elementwise_kernel import lower
from tests.lowering import kernels

B, T, S, N, H = 2, 200, 300, 4, 64
LIMIT = jnp.int32(4)
RNG = np.random.default_rng(1)
ARRAYS = {
    "local heads": np.array([True, False, True, False]).reshape(N, 1, 1),
    "long entries": np.array([True, False]).reshape(B, 1, 1, 1),
    "cap": np.float32(1.5),
    "gain": RNG.uniform(0.5, 2, (N, 1, 1)).astype(np.float32),
    "rows": RNG.uniform(0.5, 2, (B, 1, T, 1)).astype(np.float32),
    "columns": RNG.uniform(0.5, 2, (S,)).astype(np.float32),
    "bytes": RNG.integers(-2, 3, (N, T, S)).astype(np.int8),
}


def _mask(fn, *names):
    return lambda arrays: {"mask": masks.Custom(fn, *(arrays[name] for name in names))}


def _score(fn, *names):
    return lambda arrays: {"score": scores.Custom(fn, *(arrays[name] for name in names))}


def _by_head(b, n, t, s, local, long):
    near = abs(t - s) < 64
    return jnp.where(local, near, t >= s) & jnp.where(long, True, s < 150) & jnp.where(n < 2, near, ~(t < s))


def _score_by_head(x, b, n, t, s, local, gain):
    y = jnp.where(local, x, x * gain) + jnp.where(n % 2 == 0, x, 0.5 * x)
    return jnp.where(jnp.logical_not(b == 0), y, 2 * y)


def _divisions(x, b, n, t, s, cap, gain, rows, columns):
    y = cap * jnp.tanh(x / cap) + x / (1 + abs(x)) + x / gain
    return y / (1 + x * x) + rows / (2 + columns * x**2) + (1 + x * x) ** -2


def _remainders(x, b, n, t, s, rows):
    return x * 0.1 + x % 1.5 + (x // rows) * 0.2 + lax.select_n(jnp.broadcast_to((t - s) % 3, x.shape), x, 2 * x, 3 * x)


def _powers(x, b, n, t, s, gain, rows):
    return (1 + abs(x)) ** gain - 2.0 ** -(n + 1) * abs(t - s) * 0.01 + (2 + x * x) ** -0.5 + 2.0**-rows


def _smooth(x, b, n, t, s, gain):
    y = jax.nn.softplus(x) + jax.nn.elu(x) + jax.nn.gelu(x * gain, approximate=False) + jnp.log1p(x * x)
    y = y + jnp.expm1(-abs(x)) + jnp.log2(2 + abs(x)) + jnp.exp2(-abs(x)) + lax.erf(x) + jnp.arctan2(x, gain)
    return y + jnp.floor(x) * 0.1 + jnp.ceil(gain * x) * 0.1 + jnp.where(jnp.isfinite(x), jnp.clip(x, -1, gain), 0)


def _selections(x, b, n, t, s, flags):
    y = (
        jnp.select([t > s, x < 0, n == 1], [x, 0.5 * x, x * x * 0.1], -x)
        + jnp.where(flags > 0, flags, jnp.int8(1)) * 0.3
    )
    y = lax.cond(LIMIT > 3, lambda: y, lambda: 0.7 * y) + (flags * flags > 1) * 0.2 + 2**n * 0.01
    return y + x.astype(jnp.bfloat16).astype(jnp.float32) + jnp.bool_(flags) * x + (t - s).astype(jnp.float32) * 1e-3


# A call of each kind that once crashed while it was lowered, and of the operations that are rewritten.
CALLS = {
    "not": _mask(lambda b, n, t, s: ~(t < s) & jnp.logical_not(abs(t - s) > 90)),
    "mask by head": _mask(_by_head, "local heads", "long entries"),
    "score by head": _score(_score_by_head, "local heads", "gain"),
    "divisions": _score(_divisions, "cap", "gain", "rows", "columns"),
    "remainders": _score(_remainders, "rows"),
    "powers": _score(_powers, "gain", "rows"),
    "smooth": _score(_smooth, "gain"),
    "selections": _score(_selections, "bytes"),
}


QUICK = ("not", "score by head", "divisions", "selections")  # the others take long to lower


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.full) for x in CALLS])
def test_the_default_lowers_to_kernels(name):
    """Forward and backward, as `explain` says."""
    x, y = (jax.ShapeDtypeStruct((B, n, N, H), jnp.bfloat16) for n in (T, S))
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), ARRAYS)
    told = pallas_fa.explain(x, y, y, **CALLS[name](arrays))
    assert "mosaic_gpu: runs this call" in told and "xla computes its gradients" not in told, told

    def gradients(q, k, v, arrays):
        def loss(q, k, v, arrays):
            return pallas_fa.dot_product_attention(q, k, v, **CALLS[name](arrays)).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1, 2, 3), allow_int=True)(q, k, v, arrays)

    assert kernels(gradients, x, y, y, arrays) >= 2  # gradients of arrays may take a pass of their own


# Scores that are one number in a tile, or whose derivatives are: by x, by the array, or by both.
CONSTANT = {
    "one": lambda x, b, n, t, s, a: jnp.ones_like(x),
    "by head": lambda x, b, n, t, s, a: jnp.broadcast_to(n.astype(jnp.float32), x.shape),
    "the array": lambda x, b, n, t, s, a: jnp.broadcast_to(a, x.shape),
    "floor of x": lambda x, b, n, t, s, a: jnp.floor(x) + 0 * a,
    "quotients": lambda x, b, n, t, s, a: x + x // a,
}


def with_constant_score(name, implementation):
    """Attention of queries, keys that are the values too, and the array of that score."""

    def attend(q, k, a):
        score = scores.Custom(CONSTANT[name], a)
        return pallas_fa.dot_product_attention(q, k, k, score=score, implementation=implementation)

    return attend


@pytest.mark.parametrize("implementation", ("mosaic_gpu", "mma"))
@pytest.mark.parametrize(
    "shape", (pytest.param((1, N, 1, 1), id="heads"), pytest.param((1, 1, T, 1), id="rows", marks=pytest.mark.full))
)
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.full if x == "quotients" else ()) for x in CONSTANT]
)
def test_scores_may_be_constant(name, shape, implementation):
    x, y, one = (jax.ShapeDtypeStruct((B, n, N, H), jnp.bfloat16) for n in (T, S, 1))

    attend = with_constant_score(name, implementation)
    loss = lambda *args: attend(*args).astype(jnp.float32).sum()
    assert kernels(jax.grad(loss, (0, 1, 2)), x, y, jax.ShapeDtypeStruct(shape, jnp.float32)) >= 2
    if shape[2] == 1:
        assert kernels(attend, one, y, jax.ShapeDtypeStruct(shape, jnp.float32)) >= 1


def test_masks_get_16_bit_floats_as_float32():
    """On every implementation, as kernels load them."""
    seen = set()

    def fn(b, n, t, s, limits):
        seen.add(limits.dtype.name)
        return s < limits

    def call(implementation):
        mask = masks.Custom(fn, jnp.ones((8, 1), jnp.bfloat16))
        return lambda x: pallas_fa.dot_product_attention(x, x, x, mask=mask, implementation=implementation)

    x = jax.ShapeDtypeStruct((1, 8, 1, 64), jnp.bfloat16)
    for implementation in ("xla", "reference"):
        jax.eval_shape(call(implementation), x)
    assert kernels(call("mosaic_gpu"), x) == 1
    assert seen == {"float32"}


# ---- any function ---------------------------------------------------------------------------------------------------

NO_KERNEL = ("cbrt", "lgamma")
# No powers and remainders, which are long: lowering them one by one (test_kernel_operations.py) must do.
SCORES = st.recursive(
    functions.FLOATS,
    lambda x: st.one_of(
        st.builds("({} / {})".format, x, x),
        st.builds("np.{}({})".format, st.sampled_from("exp expm1 log1p log2 floor sign isfinite".split()), x),
        st.builds("np.select([x > {}, n == 1], [{}, 0.5], heads)".format, x, x),
        st.builds("({}).astype(np.{})".format, x, st.sampled_from(("bfloat16", "int8", "uint32", "bool_"))),
        st.builds("jax.lax.{}({} * 1.0)".format, st.sampled_from(NO_KERNEL), x),
    ),
    max_leaves=3,
)


def _score_of(source):
    fn = eval(f"lambda x, b, n, t, s, rows, columns, heads, gain: {source}", {"np": jnp, "jax": jax})
    return lambda x, *args: jnp.broadcast_to(jnp.asarray(fn(x, *args), x.dtype), x.shape)


def _check_reason(reason, source):
    assert any(x in reason and x in source for x in NO_KERNEL), reason


# How kernels pass them: the kind and dtype of x, b, n, t, s, rows, columns, heads, gain.
KINDS = ("tile", "scalar", "scalar", "tile", "tile", "column", "row", "scalar", "column")
DTYPES = ("float32", *("int32",) * 7, "float32")


@hypothesis.given(SCORES)
@hypothesis.settings(max_examples=6, deadline=None)
def test_what_is_claimed_lowers(source):
    """Any score and its derivative: in a small kernel, or refused for an operation that it has."""
    score = _score_of(source)

    def gradient(x, *args):
        y, pullback = jax.vjp(lambda x, gain: score(x, *args[:-1], gain), x, args[-1])
        return pullback(y)

    specs = [jax.ShapeDtypeStruct(() if k == "scalar" else (64, 64), x) for k, x in zip(KINDS, DTYPES, strict=True)]
    for fn in (score, gradient):
        if reason := elementwise.why_not(fn, *specs):
            return _check_reason(reason, source)

        def body(value, fn=fn):
            args = [value(*x, seed) for seed, x in enumerate(zip(KINDS, DTYPES, strict=True))]
            return elementwise.inline(fn, *args), args  # Mosaic finds no layout for a row or a column that nothing uses

        lower(body)


@pytest.mark.full
@hypothesis.given(SCORES, functions.BOOLS)
@hypothesis.settings(max_examples=10, deadline=None)
def test_calls_that_are_claimed_lower(score, mask):
    """As `explain` says, forward and backward."""
    q, k = (jax.ShapeDtypeStruct((functions.B, n, functions.N, 64), jnp.bfloat16) for n in (functions.T, functions.S))
    keywords = {"mask": masks.Custom(functions.compiled(mask), *functions.ARRAYS)}

    def loss(q, k, v, gain):
        fn = scores.Custom(_score_of(score), *functions.ARRAYS, gain)
        return pallas_fa.dot_product_attention(q, k, v, score=fn, **keywords).astype(jnp.float32).sum()

    told = pallas_fa.explain(
        q, k, k, score=scores.Custom(_score_of(score), *functions.ARRAYS, functions.GAIN), **keywords
    )
    if "mosaic_gpu: runs this call" not in told:
        return _check_reason(told, score)
    found = kernels(jax.grad(loss, (0, 1, 2, 3)), q, k, k, functions.GAIN)
    assert found >= (1 if "xla computes its gradients" in told else 2)


def test_numbers_of_a_derivative_meet():
    """cap * (1 - tanh^2) / cap of a scaled logit: what is left to multiply by is the scale, once."""
    x, dy = (jax.random.normal(jax.random.key(i), (64, 64)) for i in range(2))
    pullback = lambda x, dy: score_pullback(x, dy, 0, 0, 0, 0, scores.SoftCap(3.0), 0.75)
    ((dx, factor),) = elementwise.inline_products(pullback, x, dy)
    assert factor == pytest.approx(0.75)
    np.testing.assert_allclose(dx, dy * (1 - jnp.tanh(0.25 * x) ** 2), rtol=1e-5)
