"""Scores: what each does to a logit, that composition keeps the order, and that derivatives are derived."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.masks import Lengths
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.part import Part
from pallas_fa.scores import Alibi, Bias, Custom, Score, SoftCap
from pallas_fa.scores.base import chain, fixed, float_arrays, with_float_arrays
from tests.cases import SCORES, Case

IMPLEMENTATIONS = ("xla", "reference")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
DIMS = Dims(batch=(2,), T=5, S=7, N=3)
INDEX = tuple(np.ogrid[:2, :3, :5, :7])


@pytest.fixture
def x(rng):
    return jnp.asarray(rng.standard_normal((2, 3, 5, 7)), jnp.float32)


def apply(score, x):
    return score.bind(DIMS, Lengths()).apply(x, *INDEX)


# ---- meanings -------------------------------------------------------------------------------------------------------


def test_soft_cap(x):
    np.testing.assert_allclose(apply(SoftCap(2.0), 9 * x), 2 * np.tanh(9 * x / 2), rtol=1e-6)
    assert jnp.abs(apply(SoftCap(2.0), 9 * x)).max() <= 2


@pytest.mark.parametrize("cap", (2.0**-100, 2.0**100))
def test_the_least_and_the_largest_soft_cap(cap, x):
    """At 0, too: past them, quotients and derivatives are 0 there, which are not."""
    x = x.at[0, 0, 0].set(0)
    value, pullback = jax.vjp(lambda x: apply(SoftCap(cap), x), x)
    quotient = np.float64(x) / cap
    np.testing.assert_allclose(value, cap * np.tanh(quotient), rtol=1e-6, atol=1e-7)
    (gradient,) = pullback(jnp.full_like(value, 1e-3))
    np.testing.assert_allclose(gradient, 1e-3 * (1 - np.tanh(quotient) ** 2), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("shape", ((3,), (2, 3)), ids=("[N]", "[B, N]"))
def test_alibi(shape, x, rng):
    slopes = rng.random(shape)
    want = x - slopes.reshape(-1, 3, 1, 1) * abs(np.arange(5)[:, None] - np.arange(7))
    np.testing.assert_allclose(apply(Alibi(slopes), x), want, atol=1e-6)


def test_bottom_right_alibi_counts_from_the_last_query_and_key(x):
    q, kv = (np.asarray(n, np.int32).reshape(2, 1, 1, 1) for n in ((5, 3), (4, 7)))
    score = Alibi(np.ones(3, np.float32), 1, align="bottom_right")
    for lengths, offset in ((Lengths(), 7 - 5), (Lengths(kv_lengths=kv), kv - 5), (Lengths(q, kv), kv - q)):
        want = x - abs(np.arange(5)[:, None] + 1 + offset - np.arange(7))
        np.testing.assert_allclose(score.bind(DIMS, lengths).apply(x, *INDEX), want, atol=1e-6)
    q, key = x[:, :, :, :5].swapaxes(1, 2), jnp.swapaxes(x, 1, 2)  # [2, 5, 3, 5] and [2, 5, 3, 7]
    call = lambda score, mask: pallas_fa.dot_product_attention(q, q, key, score=score, mask=mask, implementation="xla")
    lengths = Lengths(kv_lengths=np.array([4, 2]))
    want = call(Alibi(np.ones(3, np.float32), np.array([4, 2]) - 5), lengths)
    np.testing.assert_array_equal(call(Alibi(np.ones(3, np.float32), align="bottom_right"), lengths), want)


@pytest.mark.parametrize("shape", ((), (7,), (5, 1), (3, 1, 7), (1, 1, 1, 7), (2, 1, 5, 1), (2, 3, 5, 7)), ids=str)
def test_bias_is_broadcast_right_aligned(shape, x, rng):
    array = rng.standard_normal(shape, np.float32) if shape else np.float32(0.5)
    np.testing.assert_array_equal(apply(Bias(array), x), x + array)


def test_a_part_of_a_score_is_the_score_of_the_part(x, rng):
    slopes, bias, gain = (rng.standard_normal(shape, np.float32) for shape in ((3,), (2, 1, 5, 7), (3, 1, 1)))
    score = Alibi(slopes, np.array([4, -2])).then(Bias(bias)).then(SoftCap(2.0)).then(Custom(_positions, gain))
    start, size = (1, 1, 2, 3), (1, 2, 3, 4)
    inside = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
    want, index = apply(score, x)[inside], np.ogrid[tuple(slice(n) for n in size)]
    for part in (Part(start, size), Part(tuple(map(jnp.int32, start)), size)):
        got = part.cut(score.bind(DIMS, Lengths())).moved(part).apply(x[inside], *index)
        np.testing.assert_allclose(got, want, rtol=1e-6)


def _positions(x, b, n, t, s, gain):
    return x * gain + b - n + t * s


def test_custom_sees_absolute_indices_and_its_arrays(x, rng):
    def score(x, b, n, t, s, gain, shift):
        return x * gain + (b + 10 * n + 100 * t + 1000 * s) + shift

    gain, shift = rng.standard_normal((3, 1, 1), np.float32), rng.standard_normal((2, 1, 5, 1), np.float32)
    b, n, t, s = INDEX
    want = x * gain + (b + 10 * n + 100 * t + 1000 * s) + shift
    np.testing.assert_allclose(apply(Custom(score, gain, shift), x), want, rtol=1e-6)


def test_then_keeps_the_order(x):
    double, add = Custom(lambda x, *_: 2 * x), Bias(jnp.float32(1))
    np.testing.assert_array_equal(apply(double.then(add), x), 2 * x + 1)
    np.testing.assert_array_equal(apply(add.then(double), x), 2 * (x + 1))
    nested = double.then(add.then(SoftCap(2.0))).then(double)
    np.testing.assert_array_equal(apply(nested, x), 2 * apply(SoftCap(2.0), 2 * x + 1))
    assert chain([double, add]) == double.then(add) and chain([add]) is add and chain([]) is None


@every_implementation
def test_keywords_are_scores(implementation, rng):
    """`bias` and `logits_soft_cap` are `Bias` and `SoftCap` before the score that is given."""
    q, k = (jnp.asarray(rng.standard_normal((2, n, 3, 8)), jnp.float32) for n in (5, 7))
    bias = jnp.asarray(rng.standard_normal((3, 5, 7)), jnp.float32)
    slopes = jnp.asarray(rng.random(3), jnp.float32)
    attend = lambda **kw: pallas_fa.dot_product_attention(q, k, k, **kw, implementation=implementation)
    by_keyword = attend(bias=bias, logits_soft_cap=1.5, score=Alibi(slopes))
    by_score = attend(score=Bias(bias).then(SoftCap(1.5)).then(Alibi(slopes)))
    np.testing.assert_array_equal(by_keyword, by_score)


@every_implementation
@pytest.mark.parametrize("dtype", ("bfloat16", "float16", "float32"))
def test_scores_see_float32_logits(dtype, implementation):
    """Whatever the inputs are; a float64 logit is never cut down to float32 (tests of the table in float64)."""
    seen = []

    def spy(x, b, n, t, s):
        seen.append((x.dtype, b.dtype, n.dtype, t.dtype, s.dtype))
        return x

    q = jnp.ones((1, 4, 2, 8), dtype)
    pallas_fa.dot_product_attention(q, q, q, score=Custom(spy), implementation=implementation)
    assert set(seen) == {(jnp.dtype("float32"),) + (jnp.dtype("int32"),) * 4}


# ---- derivatives ----------------------------------------------------------------------------------------------------


def _relu(x, b, n, t, s):
    return jax.nn.relu(x) - 0.1 * x


def _gelu(x, b, n, t, s, width):
    return jax.nn.gelu(x * width)


def _fan_out(x, b, n, t, s, a):
    return a * x * jnp.tanh(x) + x * x * 0.1 + a


def _by_position(x, b, n, t, s, left, right):
    return jnp.where(s <= t, left * x, right + x)


def _log_abs(x, b, n, t, s):
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


_FUNCTIONS = {
    "relu": (_relu, ()),
    "gelu": (_gelu, ((3, 1, 1),)),
    "fan out": (_fan_out, ((2, 1, 70, 1),)),
    "by position": (_by_position, ((), (3, 1, 80))),
    "log": (_log_abs, ()),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_derivatives_of_custom_scores_are_derived(name, small_chunks, rng):
    """xla recomputes the logits in chunks and differentiates the score there; the reference as a whole."""
    fn, shapes = _FUNCTIONS[name]
    q, k, v = (jnp.asarray(rng.standard_normal((2, n, 3, 8)), jnp.float32) for n in (70, 80, 80))
    arrays = tuple(jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes)

    def gradients(implementation):
        def loss(q, k, v, arrays):
            out = pallas_fa.dot_product_attention(
                q, k, v, score=Custom(fn, *arrays), local_window_size=(50, 60), implementation=implementation
            )
            return jnp.sum(jnp.sin(out))

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))(q, k, v, arrays)

    for got, want in zip(*map(jax.tree.leaves, map(gradients, IMPLEMENTATIONS)), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())


@every_implementation
def test_score_objects_are_differentiated_as_pytrees(implementation, rng):
    """The gradient to a Score is a Score of the same structure; integer arrays get float0."""
    q = jnp.asarray(rng.standard_normal((2, 5, 3, 8)), jnp.float32)

    def gated(x, b, n, t, s, gain, marked):
        return jnp.where(marked > 0, gain * x, x)

    score = Alibi(jnp.asarray([0.1, 0.2, 0.3])).then(Custom(gated, jnp.float32(2.0), jnp.arange(5)[:, None] % 2))

    def loss(score):
        return jnp.sum(pallas_fa.dot_product_attention(q, q, q, score=score, implementation=implementation) ** 2)

    gradient = jax.grad(loss, allow_int=True)(score)
    assert jax.tree.structure(gradient) == jax.tree.structure(score)
    slopes, gain, marked = jax.tree.leaves(gradient)
    assert slopes.shape == (3,) and gain.shape == () and (slopes != 0).all() and gain != 0
    assert marked.dtype == jax.dtypes.float0 and marked.shape == (5, 1)


# ---- pytrees --------------------------------------------------------------------------------------------------------


def test_static_scores_are_structure_and_arrays_are_leaves():
    assert jax.tree.leaves(SoftCap(2.0).then(Custom(_relu))) == []
    assert SoftCap(2) == SoftCap(2.0) and hash(SoftCap(2)) == hash(SoftCap(2.0))
    assert SoftCap(2.0).then(Custom(_relu)) == SoftCap(2.0).then(Custom(_relu))
    assert jax.tree.structure(SoftCap(2.0)) != jax.tree.structure(SoftCap(3.0))
    assert len(jax.tree.leaves(Alibi(np.ones(3)).then(Bias(np.ones(7))).then(Custom(_gelu, np.float32(1))))) == 3


@pytest.mark.parametrize("name", SCORES)
def test_scores_survive_flattening(name):
    made = Case(6, 5, "full", name).inputs().score
    score = made.keywords(made.arrays).get("score", SoftCap(1.0))
    leaves, structure = jax.tree.flatten(score)
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, Score) and jax.tree.structure(again) == structure
    assert all(a is b for a, b in zip(jax.tree.leaves(again), leaves, strict=True))
    floats = float_arrays(score)
    assert jax.tree.structure(with_float_arrays(score, [2 * x for x in floats])) == structure


@pytest.mark.parametrize("constants", [{4}, {1, 2, 6}])
def test_constants_stay_constants_at_other_positions(constants):
    """However many leaves the position adds: five arrays of a function, and those of the scores round it."""
    arrays = (np.full(7, i, np.float32) for i in range(1, 6))
    function = Custom(lambda x, b, n, t, s, *arrays: x + sum(arrays) * t, *arrays)
    score = Alibi(np.zeros(3, np.float32)).then(function).then(Bias(np.full(7, np.float32(6))))
    moved = fixed(score.bind(DIMS, Lengths()), constants).moved(Part((0, 0, jnp.int32(5), jnp.int32(7)), (2, 3, 5, 7)))
    assert [float(x.max()) for x in float_arrays(moved)] == [i for i in range(7) if i not in constants]


@pytest.mark.smoke
def test_one_program_for_all_arrays_of_a_score():
    q = jnp.ones((2, 4, 3, 8))
    traced = []

    @jax.jit
    def attend(score):
        traced.append(score)
        return pallas_fa.dot_product_attention(q, q, q, score=score)

    for cap in (2.0, 2.0, 3.0):
        for slopes in (np.ones(3, np.float32), np.zeros(3, np.float32)):
            attend(Alibi(slopes).then(SoftCap(cap)))
    assert len(traced) == 2
