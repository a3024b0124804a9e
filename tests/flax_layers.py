"""Layers of linen and nnx for the tests of `pallas_fa.nn`: Flax's own and ours, their gradients, and how close they are."""

import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_fa
import pallas_fa.nn

T, D, N, H = 12, 16, 4, 4
FRAMEWORKS = ["linen", "nnx"]
IDS = ("query_segment_ids", "key_value_segment_ids")

# The programs here are many and tiny: to compile them without LLVM's optimizations takes a third of the time.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def compiled(call):
    """`call`, compiled; its keyword arguments are constants of the program."""
    return lambda *args, **kwargs: jit(functools.partial(call, **kwargs))(*args)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def make(framework, ours, *inputs, **fields):
    """(parameters as a pure dict, call(parameters, *inputs, **arguments)) of Flax's module or of ours."""
    if framework == "linen":
        cls = pallas_fa.nn.linen.MultiHeadDotProductAttention if ours else flax.linen.MultiHeadDotProductAttention
        layer = cls(num_heads=N, qkv_features=N * H, **fields)
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        init = jit(layer.init)
        return init(keys, *inputs)["params"], lambda params, *a, **kw: layer.apply({"params": params}, *a, **kw)
    cls = pallas_fa.nn.nnx.MultiHeadAttention if ours else nnx.MultiHeadAttention
    layer = cls(N, D, N * H, decode=False, rngs=nnx.Rngs(params=0, dropout=1), **fields)
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def call(pure, *args, **kwargs):
        state = jax.tree.map(lambda x: x, params)
        nnx.replace_by_pure_dict(state, pure)
        return nnx.merge(graph, state, rest)(*args, **kwargs)

    return nnx.to_pure_dict(params), call


def with_gradients(call, params, *inputs, **kwargs):
    """(output, its gradients to parameters and inputs, for some cotangent)."""

    def loss(params, *inputs):
        out = call(params, *inputs, **kwargs)
        return jnp.sum(out.astype(jnp.float32) * normal(9, *out.shape)), out

    gradients, out = jit(jax.grad(loss, argnums=tuple(range(1 + len(inputs))), has_aux=True))(params, *inputs)
    return out, gradients


def assert_close(actual, expected, tolerance=2e-5):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.float64(a), np.float64(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max(initial=0)))


def decoder(framework, cls, x, **fields):
    """(call of x without a cache, step with the cache: (state, x, kwargs) -> (out, state), first state)."""
    if framework == "linen":
        module = cls(num_heads=N, qkv_features=N * H, decode=True, **fields)
        variables = jit(module.init)(jax.random.key(0), x)
        call = functools.partial(module.clone(decode=False).apply, {"params": variables["params"]})

        def linen_step(variables, x, kwargs):
            out, cache = module.apply(variables, x, mutable="cache", **kwargs)
            return out, {**variables, **cache}

        return compiled(call), jit(linen_step), variables
    layer = cls(N, D, N * H, decode=False, rngs=nnx.Rngs(0), **fields)
    layer.init_cache(x.shape)
    graph, state = nnx.split(layer)

    def nnx_step(state, x, kwargs):
        layer = nnx.merge(graph, state)
        # Flax drops `is_causal` beside a cache: at T = 1 it would leave key 0 only.
        return layer(x, decode=True, is_causal=True, **kwargs), nnx.state(layer)

    return compiled(layer), jit(nnx_step), state
