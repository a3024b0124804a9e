"""Where `jax.nn.dot_product_attention` and this library define the same thing, they agree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa

B, T, S, N, H = 2, 20, 33, 4, 16


def _keep_one(mask):
    """Every query attends to something: elsewhere `jax.nn` gives the mean of the values."""
    mask[..., 0] = True
    return mask


_RNG = np.random.default_rng(0)
_NORMAL = lambda *shape: _RNG.standard_normal(shape, np.float32)
_BOOL = lambda *shape: _keep_one(_RNG.random(shape) < 0.5)

SAME = {
    "plain": {},
    "scale": {"scale": 0.7},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (3, 20)},
    "window of one int": {"local_window_size": 15},
    "window of an array": {"local_window_size": np.array([3, 20])},
    "causal window": {"local_window_size": (4, 2), "is_causal": True},
    "lengths": {"query_seq_lengths": np.array([20, 7], np.int32), "key_value_seq_lengths": np.array([5, 33], np.int32)},
    "key lengths, causal": {"key_value_seq_lengths": np.array([5, 33], np.int32), "is_causal": True},
    "bias": {"bias": _NORMAL(B, N, T, S)},
    "bias of one head": {"bias": _NORMAL(B, 1, T, S)},
    "bias of keys": {"bias": _NORMAL(B, 1, 1, S)},
    "bias of rank 3": {"bias": _NORMAL(N, 1, S)},
    "bias of rank 2": {"bias": _NORMAL(T, S)},
    "bias of rank 1": {"bias": _NORMAL(S)},
    "is_causal of None": {"is_causal": None},
    "bias of another dtype": {"bias": _NORMAL(N, T, S).astype(jnp.bfloat16)},
    "mask": {"mask": _BOOL(B, N, T, S)},
    "mask of keys": {"mask": _BOOL(B, 1, 1, S)},
    "mask of rank 3": {"mask": _BOOL(N, 1, S)},
    "mask of rank 2": {"mask": _BOOL(T, S)},
    "mask of rank 1": {"mask": _BOOL(S)},
    "all": {
        "bias": _NORMAL(N, 1, S),
        "mask": _BOOL(B, 1, T, S),
        "is_causal": True,
        "key_value_seq_lengths": np.array([5, 33], np.int32),
        "scale": 0.4,
    },
}


def gradients(attention, q, k, v, keywords):
    """out and the gradients to q, k, v and bias of a loss."""

    @jax.jit
    def run(q, k, v, bias):
        rest = {name: x for name, x in keywords.items() if name != "bias"}
        bias = {} if bias is None else {"bias": bias}

        def loss(q, k, v, bias):
            out = attention(q, k, v, **bias, **rest)
            return jnp.sum(jnp.sin(out)), out

        (_, out), found = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)
        return out, found

    return run(q, k, v, keywords.get("bias"))


def agree(q, k, v, keywords):
    ours = gradients(pallas_fa.dot_product_attention, q, k, v, keywords)
    theirs = gradients(lambda *x, **kw: jax.nn.dot_product_attention(*x, **kw, implementation="xla"), q, k, v, keywords)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        rounding = 1e-5 if x.dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(np.float32(x), np.float32(y), atol=rounding * np.abs(np.float32(y)).max())


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.smoke) if x in ("all", "lengths") else x for x in SAME]
)
def test_agrees(name):
    K = 4 if "one head" in name or "lengths" in name else 2
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))
    agree(q, k, v, SAME[name])


def test_agrees_in_bfloat16():
    """float16 `jax.nn` cannot do on CPUs."""
    rng = np.random.default_rng(1)
    shapes = (B, T, N, H), (B, S, 1, H), (B, S, 1, H)
    agree(*(jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes), {"is_causal": True})


def test_agrees_without_batch_dims():
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((T, N, H), (S, 2, H), (S, 2, H)))
    agree(q, k, v, {"bias": _NORMAL(N, 1, S), "mask": _BOOL(T, S), "is_causal": True})


def test_agrees_with_a_batch_dim_that_the_queries_lack():
    """`jax.nn` adds one to queries without it, and takes biases, masks and lengths that have it."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((T, N, H), (S, 2, H), (S, 2, H)))
    agree(q, k, v, {"bias": _NORMAL(1, N, T, S), "mask": _BOOL(1, 1, T, S)})
    agree(q, k, v, {"query_seq_lengths": np.array([9]), "key_value_seq_lengths": np.array([20])})


WINDOWS = np.array([[3, 0], [T, 4], [-3, S], [0, 0]], np.int32)  # a negative side leaves the query itself out


@pytest.mark.parametrize("transformation", ("scan", "vmap"))
def test_traced_windows_agree(transformation):
    """As of layers that alternate between windows."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in ((B, T, N, H), (B, S, 2, H), (B, S, 2, H)))

    def results(attention):
        attend = lambda x, k, v, window: attention(x, k, v, local_window_size=(window[0], window[1]))

        def loss(q, k, v, windows):
            if transformation == "vmap":
                return jnp.sin(jax.vmap(attend, (None, None, None, 0))(q, k, v, windows)).sum()
            layer = lambda x, window: (x + attend(x, k, v, window), None)
            return jnp.sin(jax.lax.scan(layer, q, windows)[0]).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v, WINDOWS)

    ours, theirs = results(pallas_fa.dot_product_attention), results(jax.nn.dot_product_attention)
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5 * np.abs(y).max())


def test_an_integer_bias_agrees():
    rng = np.random.default_rng(1)
    q, bias = rng.standard_normal((B, T, N, H), np.float32), np.arange(N * T, dtype=np.int32).reshape(N, 1, T) % 3
    np.testing.assert_allclose(
        pallas_fa.dot_product_attention(q, q, q, bias), jax.nn.dot_product_attention(q, q, q, bias), atol=1e-5
    )


@pytest.mark.parametrize("implementation", ("xla", "reference"))
def test_an_integer_array_as_scale_agrees(implementation):
    q = np.random.default_rng(1).standard_normal((B, T, N, H), np.float32)
    for scale in (jnp.array(2), np.array(2), np.array(-1, np.int8)):
        attend = lambda scale: pallas_fa.dot_product_attention(q, q, q, scale=scale, implementation=implementation)
        want = jax.nn.dot_product_attention(q, q, q, scale=int(scale))
        for got in (attend(scale), jax.jit(attend)(scale), attend(int(scale))):
            np.testing.assert_allclose(got, want, atol=1e-5)


def test_residual_agrees():
    """Ours is float32 whatever the inputs are; `jax.nn` casts it to their dtype."""
    rng = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((B, T, N, H), (B, S, 2, H), (B, S, 2, H))
    )
    _, ours = pallas_fa.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    _, theirs = jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    assert ours.shape == theirs.shape and ours.dtype == jnp.float32
    np.testing.assert_array_equal(np.float32(ours.astype(jnp.bfloat16)), np.float32(theirs))


def test_the_first_call_of_a_jax_user():
    """The positional arguments are in the same order."""
    rng = np.random.default_rng(1)
    q, bias, mask = rng.standard_normal((B, T, N, H)), rng.standard_normal((1, N, T, T)), rng.random((B, 1, T, T)) < 0.9
    arguments = (q, q, q, bias, mask | np.eye(T, dtype=bool))
    ours = pallas_fa.dot_product_attention(*arguments)
    np.testing.assert_allclose(ours, jax.nn.dot_product_attention(*arguments), atol=1e-5)
