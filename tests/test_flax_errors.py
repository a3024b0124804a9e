"""What the modules and the function of `pallas_fa.nn` refuse, and the remedy that they name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_fa
import pallas_fa.nn
from pallas_fa import masks
from pallas_fa.nn import attention_fn
from tests.flax_layers import FRAMEWORKS, IDS, D, H, N, T, assert_close, decoder, make, normal

ERRORS = {  # fields, arguments of the call, what is raised
    "sow_weights": ({}, {"sow_weights": True}, NotImplementedError, "never in memory here.*dot_product_attention"),
    "rate": ({"dropout_rate": 1.5}, {}, ValueError, r"dropout_rate=1.5 must be in \[0, 1\)"),
    "soft cap": ({"logits_soft_cap": -1.0}, {}, ValueError, "logits_soft_cap=-1.0 must be positive"),
    "window": ({"local_window_size": (1, -2)}, {}, ValueError, r"local_window_size\[1\]=-2 must not be negative"),
    "one id": ({}, {"query_segment_ids": np.zeros((2, T), int)}, ValueError, "both or neither"),
    "ids": (
        {},
        dict.fromkeys(IDS, np.zeros(T, int)),
        ValueError,
        r"query_segment_ids.shape=\(12,\) must be \[\*B, T\]",
    ),
    "use_sinks": ({"use_sinks": "no"}, {}, TypeError, "use_sinks='no' must be True or False"),
    "is_causal": ({"is_causal": "no"}, {}, TypeError, "is_causal='no' must be True or False"),
    "text": ({}, {"mask": "causal"}, TypeError, "mask='causal' is a str; it must be a bool or number array"),
    "class": ({}, {"mask": masks.Causal}, TypeError, r"mask is the class Causal.*mask=Causal\(\.\.\.\)"),
    "mask": ({}, {"mask": np.ones((2, T, T))}, ValueError, r"mask.shape=\(2, 12, 12\) is not broadcastable"),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", ERRORS)
def test_errors_of_modules(framework, name):
    fields, kwargs, error, match = ERRORS[name]
    x = normal(1, 2, T, D)
    with pytest.raises(error, match=match):
        make(framework, True, x, deterministic=False, **fields)[1](make(framework, True, x)[0], x, **kwargs)


def test_errors_of_linen_modules():
    x = normal(1, 2, T, D)
    for ours, hook in ((False, {"attention_fn": attention_fn}), (True, {})):
        for name in ("qk_attn_weights_einsum", "attn_weights_value_einsum"):
            with pytest.raises(NotImplementedError, match=f"{name}=.* cannot be replaced. Leave {name}_cls=None"):
                make("linen", ours, x, **{f"{name}_cls": lambda: jnp.einsum}, **hook)
    for wrong, message in (
        ({"num_kv_heads": 3}, "num_kv_heads=3 must divide num_heads=4"),
        ({"num_kv_heads": "2"}, "num_kv_heads='2' must be an int of at least 1. Use None"),
    ):
        with pytest.raises(ValueError, match=message):
            make("linen", True, x, **wrong)
    with pytest.raises(ValueError, match=f"qkv_features={D} must be a multiple of num_heads=0"):
        pallas_fa.nn.linen.MultiHeadAttention(num_heads=0).init(jax.random.key(0), x)
    with pytest.raises(
        TypeError, match="not an argument here. In a Flax module pass attention_fn=pallas_fa.nn.attention_fn"
    ):
        make("linen", True, x, attention_fn=pallas_fa.dot_product_attention)
    call, step, state = decoder("linen", pallas_fa.nn.linen.MultiHeadAttention, x)
    with pytest.raises(ValueError, match="decode=True takes one position at a time"):
        step(state, x, {})
    with pytest.raises(ValueError, match="inputs_v is given without inputs_k"):
        call(x, inputs_v=x)


def test_inputs_without_a_length_are_named():
    x = normal(1, T, D)
    layer = pallas_fa.nn.nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(0))
    linen = pallas_fa.nn.linen.MultiHeadDotProductAttention(N)
    for call in (layer, lambda *inputs: linen.init_with_output(jax.random.key(0), *inputs)[0]):
        with pytest.raises(
            ValueError, match=r"inputs_q.shape=\(12,\) must be \[\*B, length, features\].*`inputs_q\[None\]`"
        ):
            call(jnp.ones(12))
        with pytest.raises(ValueError, match=r"inputs_q.shape=\(\) must be .*expand_dims"):
            call(jnp.ones(()))
        with pytest.raises(ValueError, match=r"inputs_k.shape=\(12,\) must be .*`inputs_k\[None\]`"):
            call(x, jnp.ones(12))
        with pytest.raises(TypeError, match="inputs_v='x' is a str; it must be an array"):
            call(x, x, "x")
        assert call(x[0][None]).shape == (1, D)  # as the error says
        assert_close(call(x.tolist()), call(x))


def test_errors_of_the_function():
    q = normal(1, 2, T, N, H)
    with pytest.raises(ValueError, match="dropout_rng=None, but dropout is active"):
        attention_fn(q, q, q, dropout_rate=0.1)
    for wrong, message in (
        ({"key": None}, r"key=None is a NoneType; it must be a float array \[\*B, length"),
        ({"dtype": "bf16"}, "dtype='bf16' must be a float dtype"),
        ({"dtype": jnp.int32}, "dtype=.*int32.* must be a float dtype.*Leave it out"),
        ({"mask": (masks.Causal(), q)}, "is a tuple; .* Combine masks by `&`"),
        ({"deterministic": "no", "dropout_rate": 0.1}, "deterministic='no' must be True or False"),
        ({"dropout_rate": jnp.zeros(2)}, "dropout_rate=.* must be a Python float"),
    ):
        with pytest.raises(TypeError, match=message):
            attention_fn(**{"query": q, "key": q, "value": q} | wrong)
    with pytest.raises(NotImplementedError, match="attention_fn rotates nothing.*RoPE"):
        layer = nnx.MultiHeadAttention(N, D, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0))
        layer(normal(1, 2, T, D), input_positions=jnp.zeros((2, T), int))
    for kwargs in ({"is_causal": True}, {"local_window_size": (3, 0)}):  # a cache: position 0 it is not
        with pytest.raises(ValueError, match="one query with 12 keys would be taken for position 0"):
            attention_fn(q[:, -1:], q, q, **kwargs)
