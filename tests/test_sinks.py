"""Attention sinks where the table of cases doesn't reach: their meaning, Flax's modules, the GPT and its mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import pallas_fa
import pallas_fa.nn
from models.attention import MeshAttention, causal_attention
from models.gpt import GPT, SIZES
from models.step import init_state, make_optimizer, make_train_step
from pallas_fa.backends.gpu.elementwise import LOG2E
from pallas_fa.backends.gpu.row_statistics import row_statistics, row_sums
from pallas_fa.nn import attention_fn
from pallas_fa.problem import Residuals, normalise

B, T, N, H = 2, 16, 4, 8
pytestmark = pytest.mark.usefixtures("quick_compilation")
IMPLEMENTATIONS = ("xla", "reference")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), jnp.float32)


Q, K, V = (normal(B, T, heads, H, seed=seed) for seed, heads in enumerate((N, 2, 2)))


def attend(sinks, implementation="xla", q=Q, **keywords):
    return pallas_fa.dot_product_attention(
        q, K, V, sinks=sinks, implementation=implementation, return_residual=True, **keywords
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_sink_of_minus_infinity_is_no_sink(implementation):
    """Also for a row that has nothing else, and for the gradients."""
    mask = jnp.ones((T, T), bool).at[3].set(False)

    def run(sinks):
        loss = lambda q, sinks: sum(
            jnp.sum(jnp.where(jnp.isfinite(x), jnp.sin(x), 0)) for x in attend(sinks, q=q, mask=mask)
        )
        return attend(sinks, implementation, mask=mask), jax.grad(loss, 0 if sinks is None else (0, 1))(Q, sinks)

    (results, (d_q, d_sinks)), (want, want_d_q) = run(jnp.full(N, -jnp.inf)), run(None)
    jax.tree.map(np.testing.assert_array_equal, (*results, d_q), (*want, want_d_q))
    np.testing.assert_array_equal(d_sinks, 0)


def test_cotangents_of_rows_without_keys_or_a_sink_may_be_nan():
    """Those of lse, which is -inf there: in reverse of forward mode, too."""
    mask = jnp.ones((T, T), bool).at[3].set(False)

    def loss(sinks, forward_mode):
        _, lse = attend(sinks, mask=mask, forward_mode=forward_mode)
        return jnp.sum(jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0))

    sinks = normal(N).at[1].set(-jnp.inf)
    np.testing.assert_allclose(jax.grad(loss)(sinks, True), jax.grad(loss)(sinks, False), atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", (-300.0, 300.0))
def test_sinks_far_from_the_logits(size, implementation):
    """Nothing overflows; what vanishes is 0."""
    out, lse = attend(jnp.full(N, size), implementation, logits_soft_cap=5.0)
    plain, plain_lse = attend(None, logits_soft_cap=5.0)
    np.testing.assert_allclose(out, plain if size < 0 else 0, atol=1e-6)
    np.testing.assert_allclose(lse, plain_lse if size < 0 else size, rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_without_keys_a_row_has_its_sink_alone(implementation):
    sinks, nothing = normal(N), jnp.zeros((B, 0, 2, H))

    def run(sinks):
        keywords = dict(implementation=implementation, return_residual=True)
        return pallas_fa.dot_product_attention(Q, nothing, nothing, sinks=sinks, **keywords)

    (out, lse), pullback = jax.vjp(run, sinks)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, jnp.broadcast_to(sinks, lse.shape))
    np.testing.assert_allclose(pullback((out, jnp.ones_like(lse)))[0], B * T)


def test_cotangents_of_padding_may_be_nan():
    lengths = jnp.asarray([T, 5])
    padding = jnp.arange(T)[:, None, None] >= lengths[:, None, None, None]
    run = lambda q, sinks: attend(sinks, q=q, query_seq_lengths=lengths)
    (out, lse), pullback = jax.vjp(run, Q, normal(N))
    clean, poisoned = (pullback((jnp.where(padding, x, jnp.ones_like(out)), lse)) for x in (0.0, jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


@pytest.mark.parametrize("layout", ("BTNH", "BNTH"))
@pytest.mark.parametrize("lengths", (None, (T, 5)))
@pytest.mark.parametrize("lse_factor", (-LOG2E, -1.0, -8.0))
def test_the_gradient_that_kernels_take_from_row_statistics(lse_factor, lengths, layout):
    """Also of padding, whose lse is the sink, of no sink, and of sinks that have next to no float32 beyond them."""
    sinks = jnp.asarray([0.5, -jnp.inf, 3e38, -3e38])
    lead = lambda x: x if layout == "BTNH" else jnp.swapaxes(x, 1, 2)
    q, k, v = map(lead, (Q, K, V))
    mask = jnp.ones((T, T), bool).at[3].set(False)
    keywords = dict(mask=mask, query_seq_lengths=None if lengths is None else jnp.asarray(lengths), layout=layout)

    def attend(sinks):
        return pallas_fa.dot_product_attention(
            q, k, v, sinks=sinks, implementation="reference", return_residual=True, **keywords
        )

    (out, lse), pullback = jax.vjp(attend, sinks)
    cotangents = jax.tree.map(lambda x: normal(*x.shape, seed=1), (out, lse))
    problem, operands = normalise(q, k, v, sinks=sinks, **keywords)
    residuals = Residuals(operands, out, lse)
    found = row_statistics(problem, residuals, row_sums(problem, out, cotangents[0]), cotangents[1], lse_factor)
    np.testing.assert_allclose(found.d_sinks[0].reshape(-1), pullback(cotangents)[0], rtol=1e-5, atol=1e-6)
    assert not np.isnan(found.neg_lse).any() and not np.isposinf(found.neg_lse).any()


def test_hessian():
    """Forward over reverse is that of the reference."""
    run = lambda implementation, **keywords: jax.jit(
        jax.hessian(lambda sinks: sum(jnp.sum(jnp.sin(x)) for x in attend(sinks, implementation, **keywords)))
    )
    np.testing.assert_allclose(run("xla", forward_mode=True)(normal(N)), run("reference")(normal(N)), atol=1e-4)


@pytest.mark.parametrize("framework", ("linen", "nnx"))
def test_modules_learn_sinks(framework):
    """A parameter that does what the argument does, beside the parameters that the module has without it."""
    x, init = normal(B, T, N * H), lambda key, shape, dtype: 1 + jnp.arange(shape[0], dtype=dtype)
    fields = dict(use_sinks=True, sinks_init=init, is_causal=True)
    if framework == "linen":
        make = lambda **fields: pallas_fa.nn.linen.MultiHeadAttention(num_heads=N, **fields)
        params = make(**fields).init(jax.random.key(0), x)["params"]
        call = lambda params, x: make(**fields).apply({"params": params}, x)
        bound = make(is_causal=True, attention_fn=with_sinks)
        plain = lambda params, x: bound.apply({"params": {k: p for k, p in params.items() if k != "sinks"}}, x)
    else:
        make = lambda **fields: pallas_fa.nn.nnx.MultiHeadAttention(N, N * H, decode=False, rngs=nnx.Rngs(0), **fields)
        graph, params = nnx.split(make(**fields))
        call = lambda params, x: nnx.merge(graph, params)(x)
        plain = lambda params, x: make(is_causal=True, attention_fn=with_sinks)(x)  # the same key, the same parameters
    np.testing.assert_array_equal(jax.tree.leaves(params["sinks"])[0], 1 + np.arange(N))
    np.testing.assert_allclose(call(params, x), plain(params, x), atol=1e-5)
    gradient = jax.grad(lambda params: jnp.sum(jnp.square(call(params, x))))(params)["sinks"]
    assert (jnp.abs(jax.tree.leaves(gradient)[0]) > 1e-6).all()


def with_sinks(*args, **kwargs):
    return attention_fn(*args, sinks=1.0 + jnp.arange(N), **kwargs)


def test_a_gpt_learns_its_sinks():
    config = dataclasses.replace(SIZES["nano"], sinks=True)
    graph, params = nnx.split(GPT(config, nnx.Rngs(0)))
    tokens = jnp.asarray(np.arange(2 * 17).reshape(2, 17) % 7, jnp.int32)

    def loss(params, tokens):
        logits, _ = nnx.merge(graph, params)(tokens[:, :-1])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1).mean()

    optimizer = make_optimizer("adamw", 1e-2)
    state, step = init_state(params, optimizer), make_train_step(loss, optimizer)
    losses = []
    for _ in range(10):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0]
    sinks = [block["attention"]["sinks"] for block in nnx.to_pure_dict(state.params)["blocks"].values()]
    assert len(sinks) == config.layers
    assert all((x != 0).all() and jnp.abs(x).max() > 1e-2 for x in sinks)


@pytest.mark.parametrize("shape", ((2, 2, 2), (2, 1, 4)))
def test_sinks_of_the_gpt_on_a_mesh(shape):
    mesh = jax.make_mesh(shape, ("data", "context", "model"), axis_types=(AxisType.Auto,) * 3)
    key, sinks = normal(B, T, N, H, seed=1), normal(N)

    def gradients(attention):
        return jax.jit(jax.grad(lambda *x: jnp.sum(attention(*x[:3], None, x[3]) * Q), (0, 3)))(Q, key, key, sinks)

    order = pallas_fa.context_parallel.to_zigzag if shape[1] > 1 else lambda x, *_: x
    back = pallas_fa.context_parallel.from_zigzag if shape[1] > 1 else lambda x, *_: x

    def on_mesh(q, k, v, implementation, sinks):
        q, k, v = (order(x, 1, shape[1]) for x in (q, k, v))
        return back(MeshAttention(mesh)(q, k, v, implementation, sinks), 1, shape[1])

    for x, y in zip(gradients(on_mesh), gradients(causal_attention), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)
