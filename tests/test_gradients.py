"""Gradients against float64 truth: what the table of cases (test_table.py) cannot express."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks, scores
from tests import cases
from tests.cases import Case

IMPLEMENTATIONS = ("xla", "reference")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_representative_case(dtype, check):
    check(Case(203, 113, "packed", "everything", dtype, N=4, K=2, H=40, Hv=24), "xla", gradients=True)


@pytest.mark.parametrize("heads", ((4, 2), (4, 1)), ids=("GQA", "MQA"))
@pytest.mark.parametrize("mask", ("dense_head_keys", "dense_head_rows", "head_lengths"))
@pytest.mark.parametrize("score", ("bias_head_keys", "bias_head_rows"))
def test_what_varies_by_query_head_under_grouped_heads(score, mask, heads, check):
    """Biases [N, 1, S] and [N, T, 1] and masks per head: not per key head, which is what other libraries read."""
    N, K = heads
    check(Case(70, 131, mask, score, N=N, K=K, H=16, Hv=16), "xla", gradients=True)


def test_short_last_block_at_head_dim_64(check):
    """S % 128 == 64 at H = 64 with a mask: where tiles of 128 keys have gone wrong elsewhere."""
    check(Case(192, 320, "causal", "soft_cap", N=2, K=1), "xla", gradients=True)
    check(Case(64, 448, "key_lengths", "bias_keys", N=2, K=1), "xla", gradients=True)


# ---- meanings -------------------------------------------------------------------------------------------------------


def _float64_problem(rng):
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float64)
    q, k, v = normal(2, 70, 4, 8), normal(2, 80, 2, 8), normal(2, 80, 2, 4)
    arrays = {"bias": normal(4, 1, 80), "slopes": 0.1 * abs(normal(4)), "gain": 0.3 * normal(2, 1, 70, 1)}
    return (q, k, v, arrays), normal(2, 70, 4, 4), normal(2, 70, 4)


@pytest.mark.parametrize("what", ("both", "out", "lse"))
@every_implementation
def test_gradients_are_finite_differences(implementation, what, rng):
    """In float64, in one random direction through all arguments at once; of out and lse, alone and together."""
    with jax.enable_x64(True):
        arguments, d_out, d_lse = _float64_problem(rng)

        @jax.jit
        def f(arguments):
            q, k, v, a = arguments
            score = scores.Alibi(a["slopes"]).then(scores.Custom(cases.wave, a["gain"]))
            out, lse = pallas_fa.dot_product_attention(
                q, k, v, a["bias"], logits_soft_cap=2.0, score=score, is_causal=True, local_window_size=(50, None),
                implementation=implementation, return_residual=True,
            )  # fmt: skip
            return (what != "lse") * jnp.sum(out * d_out) + (what != "out") * jnp.sum(
                jnp.where(lse == -jnp.inf, 0, lse * d_lse)
            )

        direction = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), arguments)
        along = lambda h: f(jax.tree.map(lambda x, d: x + h * d, arguments, direction))
        h = 1e-4
        numeric = (8 * (along(h) - along(-h)) - (along(2 * h) - along(-2 * h))) / (12 * h)
        slope = sum(jax.tree.leaves(jax.tree.map(jnp.vdot, jax.grad(f)(arguments), direction)))
        np.testing.assert_allclose(slope, numeric, rtol=1e-7)


@every_implementation
def test_the_cotangent_of_lse_alone(implementation, rng):
    """d lse / d logits is the softmax: for zero queries all keys share the cotangent."""
    k = jnp.asarray(rng.standard_normal((1, 5, 1, 8)), jnp.float32)
    q = jnp.zeros((1, 3, 1, 8))

    def lse(q, k, v):
        return pallas_fa.dot_product_attention(q, k, v, implementation=implementation, return_residual=True)[1].sum()

    dq, dk, dv = jax.grad(lse, (0, 1, 2))(q, k, k)
    np.testing.assert_allclose(dq, np.broadcast_to(k.mean(axis=1, keepdims=True) / np.sqrt(8), q.shape), atol=1e-6)
    assert (dk == 0).all() and (dv == 0).all()


@every_implementation
@pytest.mark.parametrize("dtypes", (("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")), ids=str)
@pytest.mark.parametrize("shape", ((), (9,), (6, 1), (4, 1, 9), (1, 4, 1, 1), (2, 1, 6, 9)), ids=str)
def test_bias_gradient_has_the_shape_and_dtype_of_the_bias(shape, dtypes, implementation, rng):
    """Also of another float dtype than q; summed over the dims along which the bias is broadcast."""
    q, k = (jnp.asarray(rng.standard_normal(s), dtypes[0]) for s in ((2, 6, 4, 8), (2, 9, 4, 8)))
    bias = jnp.asarray(rng.standard_normal(shape), dtypes[1])

    @jax.jit
    def run(bias):
        attend = lambda b: pallas_fa.dot_product_attention(q, k, k, b, implementation=implementation).astype("float32")
        return jax.grad(lambda b: jnp.sum(jnp.sin(3 * attend(b))))(bias), jax.grad(
            lambda b: jnp.sum(jnp.sin(3 * attend(b)))
        )(jnp.broadcast_to(bias.astype(jnp.float32), (2, 4, 6, 9)))

    small, full = run(bias)
    assert small.shape == bias.shape and small.dtype == bias.dtype
    full = np.asarray(full, np.float64)
    want = full.sum(axis=tuple(range(4 - len(shape))))
    want = want.sum(axis=tuple(i for i, size in enumerate(shape) if size == 1), keepdims=True)
    # A constant shift of a row changes nothing, so that some of these sums cancel: errors are those of the summands.
    tolerance = 2 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(want).max() + 2e-3 * np.abs(full).max()
    np.testing.assert_allclose(np.asarray(small, np.float64), want, atol=tolerance)


def test_a_bias_that_is_not_differentiated_by_gets_no_gradient(rng):
    """Nor is one computed: not under jit, remat, scan or vmap; and second derivatives by it are right all the same."""
    q, k, bias = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 6, 4, 8), (2, 9, 4, 8), (1, 4, 6, 9)))

    def loss(attend, q, bias):
        return jnp.sum(attend(q, k, k, bias) ** 2)

    ours = functools.partial(loss, functools.partial(pallas_fa.dot_product_attention, implementation="xla"))
    theirs = functools.partial(loss, jax.nn.dot_product_attention)
    looped = lambda f: lambda q, bias: jax.lax.scan(lambda x, _: (x + f(q * x, bias), None), 1.0, None, length=2)[0]
    stopped = lambda f: jax.grad(lambda q, bias: f(q, jax.lax.stop_gradient(bias)), (0, 1))
    mapped = lambda f: lambda q, bias: jax.vmap(jax.grad(f), (0, None))(q[None], bias)
    by_query = {
        "closed over": jax.grad,
        "stop_gradient": stopped,
        "jit": lambda f: jax.grad(jax.jit(f)),
        "remat": lambda f: jax.grad(jax.checkpoint(f)),
        "scan": lambda f: jax.grad(looped(f)),
        "vmap": mapped,
    }
    of_gradient = lambda f: lambda q, bias: jnp.sum(jax.grad(f)(q, bias) ** 2)
    second = {
        "by both": lambda f: jax.grad(of_gradient(f), (0, 1)),
        "third": lambda f: jax.grad(lambda q, bias: jnp.sum(jax.grad(of_gradient(f))(q, bias) ** 2), 1),
    }
    for name, derivative in (by_query | second).items():
        got, want = (jax.tree.leaves(derivative(f)(q, bias)) for f in (ours, theirs))
        for x, true in zip(got, want, strict=True):
            np.testing.assert_allclose(x, true, atol=1e-5 * float(jnp.abs(true).max()), rtol=1e-4, err_msg=name)


@every_implementation
def test_traced_scale_has_a_gradient(implementation, rng):
    q, k = (jnp.asarray(rng.standard_normal((2, n, 4, 8)), jnp.float32) for n in (6, 9))

    def loss(scale, q=q):
        return jnp.sum(pallas_fa.dot_product_attention(q, k, k, scale=scale, implementation=implementation) ** 2)

    gradient = jax.jit(jax.grad(loss))(jnp.float32(0.3))
    assert gradient.shape == () and gradient.dtype == jnp.float32
    # scale * q: the gradient to the scale is that to q, along q.
    d_q = jax.grad(lambda q: loss(jnp.float32(0.3), q))(q)
    np.testing.assert_allclose(gradient, jnp.vdot(d_q, q) / 0.3, rtol=1e-4)
    assert jax.grad(loss)(jnp.bfloat16(0.3)).dtype == jnp.bfloat16


def test_deterministic_gradients_add_nothing_up_in_no_fixed_order():
    """XLA's scatters may add in any order on a GPU. That reruns are equal there, tests/test_gpu.py shows."""
    q, k = (jax.ShapeDtypeStruct((2, n, 4, 8), jnp.bfloat16) for n in (150, 170))

    def run(q, k, bias):
        attend = lambda *x: pallas_fa.dot_product_attention(
            x[0], x[1], x[1], x[2], is_causal=True, deterministic_gradients=True
        )
        return jax.vjp(attend, q, k, bias)[1](q)

    lowered = jax.jit(run).lower(q, k, jax.ShapeDtypeStruct((4, 1, 170), jnp.float32)).as_text()
    assert "stablehlo.while" in lowered and "scatter" not in lowered


def test_the_reference_differentiates_forward_mode(rng):
    """<J x, y> = <x, J' y>."""
    q, k, v, dq, dk, dv, d_out = (jnp.asarray(rng.standard_normal((1, 5, 2, 8)), jnp.float32) for _ in range(7))
    attend = lambda *x: pallas_fa.dot_product_attention(*x, is_causal=True, implementation="reference")
    _, tangent = jax.jvp(attend, (q, k, v), (dq, dk, dv))
    gradients = jax.vjp(attend, q, k, v)[1](d_out)
    transposed = sum(jnp.vdot(g, x) for g, x in zip(gradients, (dq, dk, dv), strict=True))
    np.testing.assert_allclose(jnp.vdot(tangent, d_out), transposed, rtol=1e-4)


def test_masks_and_integer_arrays_need_no_gradient(rng):
    """Differentiating a function that builds its mask from float inputs goes through, with nothing from the mask."""
    q = jnp.asarray(rng.standard_normal((2, 6, 2, 8)), jnp.float32)

    def loss(x, threshold):
        mask = masks.Dense(x[..., 0].swapaxes(1, 2)[..., None] > threshold) | masks.Window(0, 0)
        marked = (jnp.abs(x[0, :, 0, 0]) > threshold).astype(jnp.int32)
        score = scores.Custom(cases.steeper_in, marked)
        return jnp.sum(pallas_fa.dot_product_attention(x, x, x, mask=mask, score=score) ** 2)

    d_x, d_threshold = jax.grad(loss, (0, 1))(q, jnp.float32(0.2))
    assert jnp.isfinite(d_x).all() and (d_x != 0).any() and d_threshold == 0
