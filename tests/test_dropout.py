"""Which elements dropout drops: a function of the key and the element's index, whatever computes it and wherever."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa.softmax.dropout import Dropout
from pallas_fa.softmax.philox import philox2x32
from tests.case_dropout import multipliers

# (rounds, counter, key, result), of Random123's kat_vectors
KNOWN_ANSWERS = (
    (7, (0, 0), 0, (0x257A3673, 0xCD26BE2A)),
    (7, (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0xAB302C4D, 0x3DC9D239)),
    (7, (0x243F6A88, 0x85A308D3), 0x13198A2E, (0xBEDBBE6B, 0xE4C770B3)),
    (10, (0, 0), 0, (0xFF1DAE59, 0x6CD10DF2)),
    (10, (0xFFFFFFFF, 0xFFFFFFFF), 0xFFFFFFFF, (0x2C3F628B, 0xAB4FD7AD)),
    (10, (0x243F6A88, 0x85A308D3), 0x13198A2E, (0xDD7CE038, 0xF62A4C12)),
)
IMPLEMENTATIONS = ("xla", "reference")


@pytest.mark.parametrize(("rounds", "counter", "key", "result"), KNOWN_ANSWERS)
def test_known_answers(rounds, counter, key, result):
    assert tuple(map(int, philox2x32(*map(jnp.uint32, counter), jnp.uint32(key), rounds))) == result


def kept(key, T=40, S=40, B=2, N=3, rate=0.3, implementation="xla", **keywords):
    """What dropout multiplies the probabilities by, [B, N, T, S]: attention with equal probabilities and V = 1."""
    q, k = jnp.zeros((B, T, N, 8)), jnp.zeros((B, S, N, 8))
    v = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, N, S))
    attend = functools.partial(pallas_fa.dot_product_attention, implementation=implementation, **keywords)
    return jnp.swapaxes(attend(q, k, v, dropout_rate=rate, dropout_key=key), 1, 2) * S


def expected(key, T=40, S=40, B=2, N=3, rate=0.3):
    return multipliers(np.asarray(key), rate, *np.ogrid[:B, :N, :T, :S])


KEYS = {
    "typed": lambda: jax.random.key(5),
    "raw": lambda: jax.random.PRNGKey(5),
    "rbg": lambda: jax.random.key(5, impl="rbg"),
    "raw rbg": lambda: jax.random.key_data(jax.random.key(7, impl="rbg")),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", KEYS)
def test_elements_by_global_index(name, implementation):
    key = KEYS[name]()
    words = jax.random.key_data(key) if name in ("typed", "rbg") else key
    np.testing.assert_allclose(kept(key, implementation=implementation), expected(words), rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_batch_entries_and_heads_may_share(implementation):
    want = np.broadcast_to(expected([1, 2], B=1, N=1), (2, 3, 40, 40))
    words = jnp.asarray([1, 2], jnp.uint32)
    np.testing.assert_allclose(kept(words, implementation=implementation, broadcast_dropout=True), want, rtol=1e-5)


@pytest.mark.parametrize("rate", (0.5 / 2**15, 1e-9))
def test_a_rate_that_rounds_to_zero_drops_nothing(rate):
    np.testing.assert_allclose(kept(jax.random.key(0), rate=rate), 1, rtol=1e-5)


def test_a_rate_near_one_keeps_some():
    """The largest rate is 1 - 2^-15, and the scale is its own."""
    found = kept(jax.random.key(0), T=256, S=256, B=1, N=8, rate=1 - 1e-9)
    assert set(np.unique(np.round(found))) == {0, 2**15}


def test_rate_zero_is_the_same_program():
    q = jnp.ones((2, 40, 4, 8))
    trace = lambda **keywords: str(jax.make_jaxpr(lambda q: pallas_fa.dot_product_attention(q, q, q, **keywords))(q))
    assert trace(dropout_rate=0, dropout_key=jax.random.key(0)) == trace()


def test_vmap_over_typed_keys_is_a_loop():
    """A key that is mapped gives each entry its own bits, one that is not the same."""
    keys = jax.random.split(jax.random.key(0), 3)
    np.testing.assert_array_equal(jax.vmap(kept)(keys), jnp.stack([kept(key) for key in keys]))
    scaled = jax.vmap(lambda x: kept(keys[0]) * x)(jnp.ones(3))
    np.testing.assert_array_equal(scaled, jnp.stack([kept(keys[0])] * 3))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_sharded_arrays_drop_the_same(kind):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)
    rng, shape = np.random.default_rng(0), (2, 24, 4, 8)
    qkv = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(3)]
    place = NamedSharding(mesh, P("data", None, "model"))
    attend = jax.jit(lambda key, *qkv: pallas_fa.dot_product_attention(*qkv, dropout_rate=0.4, dropout_key=key))
    key = jax.random.key(2)
    got = attend(jax.device_put(key, NamedSharding(mesh, P())), *(jax.device_put(x, place) for x in qkv))
    np.testing.assert_allclose(got, attend(key, *qkv), atol=1e-5)


def test_rematerialised_layers_drop_the_same():
    x, keys = jnp.ones((1, 24, 2, 8)), jax.random.split(jax.random.key(0), 2)

    def loss(x, wrap):
        layer = lambda x, key: jnp.sin(pallas_fa.dot_product_attention(x, x, 1 + x, dropout_rate=0.5, dropout_key=key))
        return jnp.sum(jax.lax.scan(lambda x, key: (wrap(layer)(x, key), None), x, keys)[0] ** 2)

    want, got = (jax.grad(loss)(x, wrap) for wrap in (lambda f: f, jax.checkpoint))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("traced", (False, True))
@pytest.mark.parametrize(("first_query", "t0", "T"), ((0, 0, 48), (5, 7, 1), (24, 100, 37), (2**31 - 40, 0, 20)))
def test_a_tile_is_its_elements(first_query, t0, T, traced):
    """Eight elements share a call of the generator, wherever a tile starts."""
    first_key, s0, S = 11, 3, 50
    dropout = Dropout.of(jnp.asarray([1, 2], jnp.uint32), 0.3, 2, 3, broadcast=False)
    assert dropout is not None
    origin = lambda x: jnp.full((1, 1, 1, 1), x, jnp.int32) if traced else x
    dropout = dataclasses.replace(dropout, first_query=origin(first_query), first_key=origin(first_key))
    got = dropout.keeps_tile(jnp.int32(t0) if traced else t0, T, s0, S)
    want = dropout.keeps(t0 + jnp.arange(T)[:, None], s0 + jnp.arange(S)[None])
    np.testing.assert_array_equal(got, want)


# ---- models -----------------------------------------------------------------------------------------------------------


def test_a_gpt_drops_by_key_and_layer():
    """Other keys drop other elements, and so do other layers with the same inputs."""
    from flax import nnx

    from models.attention import Dropout as LayerDropout
    from models.attention import causal_attention
    from models.gpt import GPT, SIZES

    seen = []

    def attention(query, key, value, implementation, sinks, dropout: LayerDropout | None):
        seen.append(None if dropout is None else (dropout.rate, tuple(map(int, dropout.key))))
        return causal_attention(query, key, value, implementation, sinks, dropout)

    model = GPT(dataclasses.replace(SIZES["nano"], dropout=0.5, attention=attention), nnx.Rngs(0))
    tokens = jnp.arange(32)[None]
    run = lambda seed: model(tokens, dropout_key=None if seed is None else jax.random.PRNGKey(seed))[0]
    first, again, other, plain = run(1), run(1), run(2), run(None)
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other, atol=1e-3) and not np.allclose(first, plain, atol=1e-3)
    layers = SIZES["nano"].layers
    assert len(set(seen[:layers])) == layers and seen[-layers:] == [None] * layers
    assert {rate for rate, _ in seen[:layers]} == {0.5}


@pytest.mark.parametrize("shape", ((2, 2, 2), pytest.param((2, 1, 4), marks=pytest.mark.full)))
def test_devices_of_a_mesh_drop_their_own(shape):
    from models.attention import Dropout as LayerDropout
    from models.attention import MeshAttention

    mesh = jax.make_mesh(shape, ("data", "context", "model"), axis_types=(AxisType.Auto,) * 3)
    query, value = jnp.zeros((4, 16, 4, 8)), jnp.ones((4, 16, 4, 8))
    dropout = LayerDropout(0.5, jax.random.PRNGKey(0))
    out = jax.jit(lambda q, v: MeshAttention(mesh)(q, q, v, None, None, dropout))(query, value)
    rows = np.asarray(out[:, :, :, 0]).transpose(0, 2, 1).reshape(16, 16)
    assert len(np.unique(rows.round(4), axis=0)) == 16
