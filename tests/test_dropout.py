"""Dropout where the table of cases doesn't reach: the generator, which elements are dropped, and their statistics."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa.softmax import dropout
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


# ---- which elements -------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("rate", (0.5 / 2**16, 1e-9))
def test_a_rate_that_rounds_to_zero_drops_nothing(rate):
    np.testing.assert_allclose(kept(jax.random.key(0), rate=rate), 1, rtol=1e-5)


def test_a_rate_near_one_keeps_some():
    """The largest rate is 1 - 2^-16, and the scale is its own."""
    found = kept(jax.random.key(0), T=256, S=256, B=1, N=8, rate=1 - 1e-9)
    assert set(np.unique(np.round(found))) == {0, 2**16}


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


# ---- statistics -----------------------------------------------------------------------------------------------------


def _draws(words, rate, shape):
    """Which elements are kept, bool [keys, B, N, T, S], for keys uint32 [keys, words]."""
    B, N, T, S = shape

    def of_key(words):
        d = Dropout.of(words, rate, B, N, broadcast=False)
        assert d is not None
        return d.keeps(jnp.arange(T)[:, None], jnp.arange(S)[None, :])

    return jax.jit(jax.vmap(of_key))(words)  # a new function each time, since a test changes the generator


def keys_of_seeds(count):
    return jax.vmap(lambda i: jax.random.key_data(jax.random.key(i)))(jnp.arange(count))


def folds_of_one_key(count):
    fold = jax.random.fold_in
    return jax.vmap(lambda i: jax.random.key_data(fold(jax.random.key(0), i)))(jnp.arange(count))


def small_words(count):
    """Keys that differ in few bits, in each of four words."""
    return jnp.stack([jnp.arange(count) // 4 ** (3 - i) % 4 for i in range(4)], 1).astype(jnp.uint32)


SHIFTS = [tuple(row) for row in np.eye(5, dtype=int)] + [
    *((0, 0, 0, 8, 0), (0, 0, 0, 0, 8), (0, 0, 0, 8, 8)),
    *((0, 0, 0, 1, 1), (0, 0, 1, 1, 0), (1, 0, 0, 0, 1)),
]  # along [keys, B, N, T, S]


def worst_deviation(keep, rate):
    """The largest |z| of the rates and the correlations of neighbours, along all axes and in pairs of them."""
    x = (np.asarray(keep, np.float32) - (1 - rate)) / math.sqrt(rate * (1 - rate))
    z = lambda x: abs(float(x.mean(dtype=np.float64))) * math.sqrt(x.size)
    found = [z(x)]
    slices = {step: (slice(None, -step or None), slice(step, None)) for step in (0, 1, 8)}
    for shift in SHIFTS:
        before, after = (tuple(slices[step][i] for step in shift) for i in (0, 1))
        found.append(z(x[before] * x[after]))
    # The means of rows, columns, heads and keys scatter as independent draws do: the sum of z^2 is a chi-square.
    for axis in range(5):
        others = tuple(i for i in range(5) if i != axis)
        squares = np.square(x.mean(axis=others, dtype=np.float64)) * (x.size // x.shape[axis])
        found.append(abs(squares.sum() - len(squares)) / math.sqrt(2 * len(squares)))
    return max(found)


SHAPE = (2, 4, 64, 128)


@pytest.mark.parametrize("keys", (keys_of_seeds, folds_of_one_key, small_words), ids=lambda f: f.__name__)
@pytest.mark.parametrize("rate", (0.125, 0.5))
def test_rate_and_independence(keys, rate):
    """4 million draws: 17 statistics within 5 standard deviations."""
    assert worst_deviation(_draws(keys(64), rate, SHAPE), rate) < 5


def chi_square(keep, rate):
    """How far the patterns of 8 neighbours, in b, n, t and s, are from independent draws: standard deviations."""
    bits = np.asarray(keep, np.int64).reshape(len(keep), -1)
    counts = np.bincount(bits @ 2 ** np.arange(8), minlength=256)
    dropped = 8 - np.array([bin(i).count("1") for i in range(256)])
    wanted = len(keep) * rate**dropped * (1 - rate) ** (8 - dropped)
    return abs(np.sum((counts - wanted) ** 2 / wanted) - 255) / math.sqrt(2 * 255)


@pytest.mark.parametrize("shape", ((1, 2, 2, 2), (2, 1, 2, 2)))
def test_patterns_over_many_keys(shape):
    assert chi_square(_draws(folds_of_one_key(2**16), 0.5, shape), 0.5) < 5


@pytest.mark.parametrize("rounds", (1, 2, 3))
def test_the_statistics_fail_a_bad_generator(rounds, monkeypatch):
    """Philox with too few rounds."""
    monkeypatch.setattr(dropout, "ROUNDS", rounds)
    assert worst_deviation(_draws(keys_of_seeds(64), 0.5, SHAPE), 0.5) > 5


def test_the_mean_over_keys_is_attention_without_dropout():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((6, 2, 4)), jnp.float32) for _ in range(3))
    keys = jax.random.split(jax.random.key(0), 4096)
    attend = functools.partial(pallas_fa.dot_product_attention, q, k, v, implementation="reference")
    found = jax.jit(jax.vmap(lambda key: attend(dropout_rate=0.3, dropout_key=key)))(keys)
    deviations = (found.mean(axis=0) - attend()) / (found.std(axis=0) / 64)
    assert jnp.abs(deviations).max() < 5
