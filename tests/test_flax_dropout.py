"""Dropout of `pallas_fa.nn`: the modules' rates and keys reach the function."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_fa
import pallas_fa.nn
from pallas_fa.nn import attention_fn
from tests.flax_layers import FRAMEWORKS, D, H, N, T, assert_close, jit, make, normal


@pytest.mark.parametrize("broadcast", (None, False))
def test_dropout_of_the_function(broadcast):
    """That of `dot_product_attention`, where Flax draws its own; batch entries and heads share it, unless told not to."""
    qkv, key = tuple(normal(i, 2, T, N, H) for i in range(3)), jax.random.key(4)
    given = {} if broadcast is None else {"broadcast_dropout": broadcast}
    options = {"is_causal": True, "dropout_rate": 0.3}
    want = pallas_fa.dot_product_attention(*qkv, **options, dropout_key=key, broadcast_dropout=broadcast is None)
    plain = pallas_fa.dot_product_attention(*qkv, is_causal=True)
    assert not np.allclose(want, plain, atol=1e-2)
    for name in ("dropout_rng", "dropout_key"):
        assert_close(attention_fn(*qkv, **options, **given, **{name: key}), want)
        assert_close(attention_fn(*qkv, **options, **given, **{name: key}, deterministic=True), plain)
    with pytest.raises(ValueError, match="dropout_rng and dropout_key are both given"):
        attention_fn(*qkv, **options, dropout_rng=key, dropout_key=key)


def test_linen_drops_no_dropout_on_the_way_to_the_function_itself():
    """linen passes what a function's signature names, and leaves the rest out without a word."""
    x, key = jnp.ones((1, 4, 8)), jax.random.key(0)
    fields = {"num_heads": 2, "attention_fn": pallas_fa.dot_product_attention}
    with pytest.raises(ValueError, match="dropout_rate=0.1, but dropout_key=None.*pallas_fa.nn.attention_fn"):
        module = flax.linen.MultiHeadDotProductAttention(**fields, dropout_rate=0.1)
        module.init_with_output({"params": key, "dropout": key}, x, deterministic=False)
    out, _ = flax.linen.MultiHeadDotProductAttention(**fields).init_with_output(key, x)
    assert out.shape == x.shape


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_dropout_in_modules(framework):
    """Flax's module with our function and ours do the same, from the same key; without dropout they do what Flax does."""
    x = normal(1, 2, T, D)
    fields = {"dropout_rate": 0.3, "broadcast_dropout": False}
    params, flaxs = make(framework, False, x, **fields, deterministic=True)
    hooked, ours, plain = (
        make(framework, own, x, **hook, **fields)[1]
        for own, hook in (
            (False, {"attention_fn": attention_fn, "deterministic": False}),
            (True, {"deterministic": False}),
            (True, {"deterministic": True}),
        )
    )

    @jit
    def run(params, x, *keys):
        rngs = lambda key: {"dropout": key} if framework == "linen" else nnx.Rngs(dropout=key)
        dropped = [call(params, x, rngs=rngs(key)) for call in (hooked, ours) for key in keys]
        return flaxs(params, x), dropped, plain(params, x)

    expected, (hooked_1, hooked_2, ours_1, ours_2), undropped = run(params, x, jax.random.key(4), jax.random.key(5))
    assert_close((ours_1, ours_2), (hooked_1, hooked_2))
    assert_close(undropped, expected)
    assert not np.allclose(ours_1, ours_2, atol=1e-2) and not np.allclose(ours_1, expected, atol=1e-2)
