"""Checkpoints of Flax's modules and of ours are one another's."""

import functools

import flax.linen
import jax
import pytest
from flax import nnx, serialization

import pallas_fa
import pallas_fa.nn
from tests.flax_layers import D, N, T, assert_close, jit, normal

FIELDS = [{}, {"normalize_qk": True}, {"use_bias": False}, {"decode": True}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
def test_checkpoints_of_linen(fields):
    """Automatic names, parameters and cache: bytes written by one are read by the other."""
    x = normal(1, 2, T, D)
    for name in ("MultiHeadDotProductAttention", "MultiHeadAttention"):
        states, calls = [], []
        for library in (flax.linen, pallas_fa.nn.linen):

            class Model(flax.linen.Module):
                cls: type

                @flax.linen.compact
                def __call__(self, x):
                    return x + self.cls(num_heads=N, **fields)(x)

            model = Model(getattr(library, name))
            states.append(jit(model.init)(jax.random.key(len(states)), x))
            calls.append(jit(functools.partial(model.apply, mutable="cache")))
        assert list(states[0]["params"]) == [f"{name}_0"]
        step = x[:, :1] if "decode" in fields else x
        for source, target in ((0, 1), (1, 0)):
            read = serialization.from_bytes(states[target], serialization.to_bytes(states[source]))
            assert_close(calls[target](read, step), calls[source](states[source], step))


@pytest.mark.parametrize("fields", [*FIELDS, {"num_kv_heads": 2}], ids=str)
def test_checkpoints_of_nnx(fields):
    x = normal(1, 2, T, D)
    decode = fields.get("decode", False)
    layers = [
        cls(N, D, rngs=nnx.Rngs(seed), **({"decode": False} | fields))
        for seed, cls in enumerate((nnx.MultiHeadAttention, pallas_fa.nn.nnx.MultiHeadAttention))
    ]
    if decode:
        [layer.init_cache(x.shape) for layer in layers]
    for source, target in (layers, layers[::-1]):
        nnx.update(target, nnx.state(source))
        kind = nnx.Any(nnx.Param, nnx.Cache)
        assert_close(nnx.to_pure_dict(nnx.state(target, kind)), nnx.to_pure_dict(nnx.state(source, kind)), 0)
        step = x[:, :1] if decode else x
        assert_close(*(nnx.jit(lambda layer, x: layer(x))(layer, step) for layer in (target, source)))
        nnx.update(target, jax.tree.map(lambda x: x + 1, nnx.state(target)))  # so that the way back has something to do
