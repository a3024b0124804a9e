"""`pallas_fa.nn` against Flax's own attention: the hook and the drop-in modules, linen and nnx."""

import functools
import subprocess
import sys

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_fa
import pallas_fa.nn
from pallas_fa import masks, scores
from pallas_fa.nn import attention_fn
from tests.flax_layers import FRAMEWORKS, IDS, D, H, N, T, assert_close, compiled, jit, make, normal, with_gradients


def padding(*batch):
    """int32 [*B, 1, 1, T] of 0 and 2: no row is fully masked."""
    keep = np.random.default_rng(5).random((*batch, 1, 1, T)) < 0.6
    return jnp.asarray(2 * (keep | (np.arange(T) == 0)), jnp.int32)


CAUSAL = np.tril(np.ones((1, 1, T, T), bool))
PER_HEAD = np.stack([np.tril(np.ones((T, T), bool), n) for n in range(N)])
CALLS = {  # batch dims, mask, fields of Flax's modules
    "unbatched": ((), None, {}),
    "per-head": ((), PER_HEAD, {"precision": "highest"}),
    "float-causal": ((2,), flax.linen.make_causal_mask(jnp.ones((2, T))), {"normalize_qk": True}),
    "int-padding": ((2, 3), padding(2, 3), {}),
    # Without biases: the gradient of the key's is 0 but for roundings.
    "bfloat16": ((2,), CAUSAL, {"dtype": jnp.bfloat16, "use_bias": False}),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("name", CALLS)
def test_equals_flax(framework, name):
    batch, mask, fields = CALLS[name]
    x = normal(1, *batch, T, D)
    params, call = make(framework, False, x, **fields)
    expected = with_gradients(call, params, x, mask=mask)
    tolerance = 3e-2 if name == "bfloat16" else 2e-5
    for ours, hook in ((False, {"attention_fn": attention_fn}), (True, {})):
        own_params, call = make(framework, ours, x, **fields, **hook)
        assert_close(own_params, params, 0)  # the same tree, and the same numbers from the same key
        assert_close(with_gradients(call, params, x, mask=mask), expected, tolerance)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_cross_attention_and_is_causal(framework):
    """Three different inputs, S != T; and is_causal, as a field and in nnx also as an argument of the call."""
    q, k, v = normal(1, 2, T, D), normal(2, 2, 7, D), normal(3, 2, 7, D)
    mask = flax.linen.make_attention_mask(jnp.ones((2, T)), jnp.arange(14).reshape(2, 7) % 3 != 1)
    causal = np.tril(np.ones((T, 7), bool))[None, None]
    params, call = make(framework, False, q, k, v)
    expected = with_gradients(call, params, q, k, v, mask=mask)
    expected_causal = compiled(call)(params, q, k, v, mask=causal)

    _, call = make(framework, True, q, k, v)
    assert_close(with_gradients(call, params, q, k, v, mask=mask), expected)
    _, call = make(framework, True, q, k, v, is_causal=True)
    assert_close(compiled(call)(params, q, k, v), expected_causal)
    if framework == "nnx":
        assert_close(compiled(call)(params, q, k, v, is_causal=False, mask=mask), expected[0])
        _, call = make(framework, False, q, k, v, attention_fn=attention_fn)
        assert_close(compiled(call)(params, q, k, v, is_causal=True), expected_causal)


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 2e-5), (jnp.bfloat16, 3e-2)])
def test_function_takes_what_flax_takes(dtype, tolerance):
    """Promotion, `dtype`, bias, Hv != H, force_fp32_for_softmax, as flax.linen.dot_product_attention."""
    q, k = normal(1, 2, 3, T, N, H), normal(2, 2, 3, 7, N, H, dtype=jnp.bfloat16)
    v, bias = normal(3, 2, 3, 7, N, 2 * H, dtype=jnp.float16), normal(4, N, 1, 7)
    kwargs = {"dtype": dtype, "bias": bias, "force_fp32_for_softmax": True}
    out = compiled(attention_fn)(q, k, v, **kwargs)
    assert out.shape == (2, 3, T, N, 2 * H)
    assert_close(out, compiled(flax.linen.dot_product_attention)(q, k, v, **kwargs).astype(dtype), tolerance)


def test_fully_masked_rows_give_zero():
    """The documented difference: Flax gives the mean of all values."""
    q = normal(1, 2, T, N, H)
    mask = jnp.ones((2, 1, T, T)).at[0, 0, 3].set(0)
    out, flaxs = (compiled(f)(q, q, q, mask=mask) for f in (attention_fn, flax.linen.dot_product_attention))
    np.testing.assert_array_equal(out[0, 3], 0)
    assert_close(flaxs[0, 3], q[0].mean(axis=0))
    assert_close(out.at[0, 3].set(0), flaxs.at[0, 3].set(0))


def plain_attention(query, key, value, mask=True, **kwargs):
    """What Flax has not: a soft cap, of 5."""
    logits = jnp.einsum("...tnh,...snh->...nts", query, key) / np.sqrt(query.shape[-1])
    logits = jnp.where(True if mask is None else mask, 5 * jnp.tanh(logits / 5), -jnp.inf)
    return jnp.einsum("...nts,...snh->...tnh", jax.nn.softmax(logits), value)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fields(framework):
    """Causal, window, soft cap, segment ids and a mask at once, against Flax with one dense mask."""
    x, t = normal(1, 2, T, D), np.arange(T)
    ids = jnp.asarray([[0] * 5 + [3] * 7, [1] * T])
    given = padding(2).at[..., 1::2].set(0) + jnp.eye(T, dtype=jnp.int32)
    window = (t[None] >= t[:, None] - 3) & (t[None] <= t[:, None])
    dense = window & (ids[:, None, :, None] == ids[:, None, None, :]) & (given != 0)
    params, call = make(framework, False, x, attention_fn=plain_attention)
    expected = with_gradients(call, params, x, mask=dense)

    _, call = make(framework, True, x, is_causal=True, local_window_size=(3, None), logits_soft_cap=5.0)
    segments = dict.fromkeys(IDS, ids)
    assert_close(with_gradients(call, params, x, mask=given, **segments), expected)
    mask = masks.Dense(given != 0) & masks.Segments(ids, ids)
    assert_close(compiled(call)(params, x, mask=mask), expected[0])
    hook = functools.partial(attention_fn, local_window_size=(3, 0), logits_soft_cap=5.0, **segments)
    assert_close(compiled(make(framework, False, x, attention_fn=hook)[1])(params, x, mask=given), expected[0])


def test_grouped_heads():
    """linen's module with num_kv_heads against Flax nnx, which has them; the parameters are the same tree."""
    x = normal(1, 2, T, D)
    params, call = make("nnx", False, x, num_kv_heads=2)
    expected = with_gradients(call, params, x)
    for framework in FRAMEWORKS:
        _, call = make(framework, True, x, num_kv_heads=2)
        assert_close(with_gradients(call, params, x), expected)
    hook = functools.partial(attention_fn, implementation="reference")
    assert_close(compiled(make("nnx", False, x, num_kv_heads=2, attention_fn=hook)[1])(params, x), expected[0])


def test_linen_scan_and_remat():
    """Two layers under nn.scan and nn.remat: as Flax's own attention in the same stack."""
    x, mask = normal(1, 2, T, D), flax.linen.make_causal_mask(jnp.ones((2, T)))

    def stack(cls, **fields):
        class Block(flax.linen.Module):
            @flax.linen.compact
            def __call__(self, x, mask):
                return x + cls(num_heads=N, name="attention", **fields)(x, mask=mask), None

        layers = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "in_axes": flax.linen.broadcast}
        model = flax.linen.scan(flax.linen.remat(Block), length=2, **layers)()
        variables = jit(model.init)(jax.random.key(0), x, mask)
        return with_gradients(lambda variables, x: model.apply(variables, x, mask)[0], variables, x)

    expected = stack(flax.linen.MultiHeadDotProductAttention)
    assert_close(stack(flax.linen.MultiHeadDotProductAttention, attention_fn=attention_fn), expected)
    assert_close(stack(pallas_fa.nn.linen.MultiHeadDotProductAttention), expected)


@pytest.mark.smoke
def test_nnx_transforms():
    """nnx.jit, nnx.grad, nnx.remat and nnx.scan of stacked layers; a Mask is an argument like any other."""
    x = normal(1, 2, T, D)

    def gradients(cls, mask, **fields):
        @nnx.vmap(in_axes=0)
        def layers(rngs):
            return cls(N, D, decode=False, rngs=rngs, **fields)

        @nnx.remat
        @nnx.scan(in_axes=(0, nnx.Carry, None), out_axes=nnx.Carry)
        def run(layer, x, mask):
            return x + layer(x, mask=mask)

        stacked = layers(nnx.Rngs(0).split(2))
        return nnx.jit(nnx.grad(lambda layer, x, mask: jnp.sum(jnp.sin(run(layer, x, mask)))))(stacked, x, mask)

    expected = nnx.to_pure_dict(gradients(nnx.MultiHeadAttention, CAUSAL))
    ours = gradients(pallas_fa.nn.nnx.MultiHeadAttention, masks.Causal())
    hooked = gradients(nnx.MultiHeadAttention, masks.Causal(), attention_fn=attention_fn)
    assert_close(nnx.to_pure_dict(ours), expected)
    assert_close(nnx.to_pure_dict(hooked), expected)


def test_variables_of_nnx_are_arrays():
    """As a module passes its own, without `[...]`; that they can be called does not make a strip a function."""
    q, scale = normal(0, 1, T, 2, 8), normal(1)
    strip, slopes, sinks, gain = (normal(2, n) for n in (2 * T - 1, 2, 2, 1))

    def call(wrap):
        score = scores.Custom(lambda x, b, n, t, s, gain: x * gain, wrap(gain))
        score = scores.RelativeBias(wrap(strip)).then(scores.Alibi(wrap(slopes))).then(score)
        return pallas_fa.dot_product_attention(
            wrap(q),
            q,
            q,
            score=score,
            sinks=wrap(sinks),
            scale=wrap(scale),
            local_window_size=(wrap(jnp.array(2)), 0),
        )

    np.testing.assert_array_equal(call(nnx.Param), call(lambda x: x))


def test_nnx_modules_compile_once():
    """Two modules of the same fields are one program: the fields are static and comparable."""
    traced = []

    @nnx.jit
    def call(layer, x):
        traced.append(layer.logits_soft_cap)
        return layer(x)

    for seed, cap in enumerate((5.0, 5.0, 6.0)):
        fields = {"local_window_size": (3, 0), "logits_soft_cap": cap, "implementation": ("mosaic_gpu", "xla")}
        call(pallas_fa.nn.nnx.MultiHeadAttention(N, D, decode=False, rngs=nnx.Rngs(seed), **fields), normal(1, T, D))
    assert traced == [5.0, 6.0]


@pytest.mark.smoke
def test_flax_is_optional(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pallas_fa.nn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(pallas_fa, "nn")
    monkeypatch.setitem(sys.modules, "flax", None)  # makes `import flax` fail
    with pytest.raises(ImportError, match=r"pip install 'pallas_fa\[flax\]'"):
        import pallas_fa.nn as _  # noqa: F401
    subprocess.run([sys.executable, "-c", "import pallas_fa, sys; assert 'flax' not in sys.modules"], check=True)
