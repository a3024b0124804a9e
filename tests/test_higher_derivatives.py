"""Second and third derivatives: by xla in float32, against the reference in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.masks import Causal, Dense, Lengths, Segments
from pallas_fa.scores import Alibi, Bias, Custom
from tests.cases import wave

_KEY = np.array([3, 4], np.uint32)


def _small_loss(implementation, a):
    """A scalar of few elements, of out and lse, with something of everything."""
    score = Alibi(a["slopes"]).then(Custom(wave, a["gain"]))
    out, lse = pallas_fa.dot_product_attention(
        a["query"], a["key"], a["value"], a["bias"], scale=a["scale"], logits_soft_cap=3.0, score=score,
        mask=Causal("bottom_right") & Segments(np.array([0, 1]), np.array([0, 1, 1])),
        sinks=a["sinks"], dropout_rate=0.3, dropout_key=_KEY, implementation=implementation, return_residual=True,
    )  # fmt: skip
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, jnp.cos(lse)))


_SMALL = {
    "query": (1, 2, 2, 2), "key": (1, 3, 1, 2), "value": (1, 3, 1, 3), "bias": (2, 1, 3), "scale": (), "slopes": (2,),
    "gain": (2, 1), "sinks": (2,),
}  # fmt: skip


def _small_arguments():
    rng = np.random.default_rng(3)
    return {name: rng.standard_normal(shape) for name, shape in _SMALL.items()}


def _in_float32_and_truth(transform):
    """`transform` of the loss: by xla in float32, and by the reference in float64."""
    run = lambda implementation: jax.jit(transform(functools.partial(_small_loss, implementation)))
    got = run("xla")({name: jnp.float32(x) for name, x in _small_arguments().items()})
    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, run("reference")(_small_arguments()))
    return got, want


def _close_to_truth(got, want):
    scale = max(np.abs(x).max() for x in jax.tree.leaves(want))
    assert scale > 0.01, "the test would see nothing"
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert x.dtype == jnp.float32 and x.shape == y.shape
        np.testing.assert_allclose(x, y, atol=2e-5 * max(scale, 1))


def test_jacrev_of_grad():
    """The Hessian, over all pairs of arguments."""
    _close_to_truth(*_in_float32_and_truth(lambda f: jax.jacrev(jax.grad(f))))


def test_jacrev_of_jacrev():
    """Of the output, not of a scalar."""

    def transform(f):
        def outputs(a):
            return jax.vmap(lambda shift: f({**a, "scale": a["scale"] + shift}))(jnp.arange(3) / 4)

        return jax.jacrev(jax.jacrev(outputs))

    _close_to_truth(*_in_float32_and_truth(transform))


def test_third_derivatives():
    def transform(f):
        along = lambda f: lambda a: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(jax.grad(f)(a)))
        return jax.grad(along(along(f)))

    _close_to_truth(*_in_float32_and_truth(transform))


@pytest.mark.parametrize("mask", ("causal", "segments", "dense", "lengths"))
def test_grad_of_grad_over_several_chunks_of_rows(mask, rng):
    """Second derivatives go a few rows at a time; arrays of masks and scores that span rows go with them."""
    T, S = 150, 20
    ids = np.sort(rng.integers(0, 3, (2, T)), axis=1), np.sort(rng.integers(0, 3, (2, S)), axis=1)
    masks = {
        "causal": Causal("bottom_right"),
        "segments": Segments(*ids),
        "dense": Dense(rng.random((2, 1, T, S)) < 0.5),
        "lengths": Lengths(np.array([140, 80]), np.array([20, 7])),
    }
    shapes = {"query": (2, T, 2, 4), "key": (2, S, 1, 4), "value": (2, S, 1, 4), "bias": (2, T, 1), "keys_bias": (S,)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    direction = {name: rng.standard_normal(shape) for name, shape in shapes.items()}

    def second(implementation, arrays, direction):
        def loss(a):
            out, lse = pallas_fa.dot_product_attention(
                a["query"], a["key"], a["value"], a["bias"], mask=masks[mask], score=Bias(a["keys_bias"]),
                implementation=implementation, return_residual=True,
            )  # fmt: skip
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, jnp.cos(lse)))

        def along(a):
            gradients = jax.grad(loss)(a)
            return sum(jnp.vdot(gradients[name], direction[name]) for name in a)

        return jax.jit(jax.grad(along))(arrays)

    got = second("xla", *jax.tree.map(jnp.float32, (arrays, direction)))
    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, second("reference", arrays, direction))
    for name, x in got.items():
        np.testing.assert_allclose(x, want[name], atol=2e-5 * np.abs(want[name]).max(), err_msg=name)


def test_vmap_of_grad_of_grad(rng):
    q, k = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 1, 3, 2, 4), (1, 3, 1, 4)))

    def second(q):
        attend = lambda q: jnp.sum(pallas_fa.dot_product_attention(q, k, k, is_causal=True, implementation="xla") ** 2)
        return jax.grad(lambda q: jnp.sum(jax.grad(attend)(q) ** 2))(q)

    want = jnp.stack([jax.jit(second)(x) for x in q])
    np.testing.assert_allclose(jax.jit(jax.vmap(second))(q), want, atol=1e-5 * np.abs(want).max())


def test_grad_of_vmap_of_grad(rng):
    """Mapped over values alone, on which their own gradient does not depend."""
    q, k = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1, 3, 2, 4), (1, 3, 1, 4)))
    values = jnp.stack([k, 2 * k])

    def loss(q, k, v):
        attend = lambda *args: jnp.sum(pallas_fa.dot_product_attention(*args, is_causal=True, implementation="xla"))
        return sum(jnp.sum(jnp.sin(d)) for d in jax.grad(attend, (0, 1, 2))(q, k, v))

    total = lambda q, k: jnp.sum(jax.vmap(lambda v: loss(q, k, v))(values))
    got = jax.jit(jax.grad(total, (0, 1)))(q, k)
    want = jax.jit(jax.grad(lambda q, k: loss(q, k, values[0]) + loss(q, k, values[1]), (0, 1)))(q, k)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())
