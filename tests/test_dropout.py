"""Dropout where the table of cases doesn't reach: the generator, which elements are dropped, and their statistics."""

import dataclasses
import functools
import math
import re
from types import SimpleNamespace

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
from tests.lowering import kernels

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
    *((0, 0, 0, 8, 0), (0, 0, 0, 0, 8), (0, 0, 0, 8, 8), (0, 0, 0, 8, 1), (0, 0, 0, 8, 9), (0, 0, 0, 0, 9)),
    *((0, 0, 0, 1, 1), (0, 0, 1, 1, 0), (1, 0, 0, 0, 1)),
]  # along [keys, B, N, T, S]


def worst_deviation(keep, rate):
    """The largest |z| of the rates and the correlations of neighbours, along all axes and in pairs of them."""
    x = (np.asarray(keep, np.float32) - (1 - rate)) / math.sqrt(rate * (1 - rate))
    z = lambda x: abs(float(x.mean(dtype=np.float64))) * math.sqrt(x.size)
    found = [z(x)]
    slices = {step: (slice(None, -step or None), slice(step, None)) for step in (0, 1, 8, 9)}
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
@pytest.mark.parametrize("rate", (pytest.param(0.1, marks=pytest.mark.full), 0.5))
def test_rate_and_independence(keys, rate):
    """4 million draws: 20 statistics within 5 standard deviations."""
    assert worst_deviation(_draws(keys(64), rate, SHAPE), rate) < 5


def chi_square(keep, rate):
    """How far the patterns of 8 elements, [patterns, ..], are from independent draws: standard deviations."""
    bits = np.asarray(keep, np.int64).reshape(len(keep), -1)
    counts = np.bincount(bits @ 2 ** np.arange(8), minlength=256)
    dropped = 8 - np.array([bin(i).count("1") for i in range(256)])
    wanted = len(keep) * rate**dropped * (1 - rate) ** (8 - dropped)
    return abs(np.sum((counts - wanted) ** 2 / wanted) - 255) / math.sqrt(2 * 255)


@pytest.mark.parametrize("shape", ((1, 2, 2, 2), (2, 1, 2, 2)))
def test_patterns_over_many_keys(shape):
    assert chi_square(_draws(folds_of_one_key(2**16), 0.5, shape), 0.5) < 5


def test_patterns_of_one_call_of_the_generator():
    """Half a million calls. The rate is no multiple of 2^-7, so that all 15 bits of an element decide."""
    keep = _draws(keys_of_seeds(64), 0.3, SHAPE).reshape(
        64, 2, 4, 4, 2, 8, 8, 2, 4, 2
    )  # [.., t ^ 8, .., s ^ 8, .., s ^ 1]
    calls = jnp.moveaxis(keep, (4, 7, 9), (-3, -2, -1)).reshape(-1, 8)
    assert chi_square(calls, 0.3) < 5


@pytest.mark.parametrize("rounds", (*(pytest.param(i, marks=pytest.mark.full) for i in (1, 2)), 3))
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


# ---- models ---------------------------------------------------------------------------------------------------------


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


# ---- the kernels' registers -----------------------------------------------------------------------------------------


class _Words:
    """`arith`, `llvm` and `vector` on NumPy arrays that hold a value for each thread of a warpgroup."""

    class CmpIPredicate:
        ne = None

    addi = staticmethod(lambda a, b: (a + b) % 2**32)
    xori = staticmethod(lambda a, b: a ^ b)
    andi = staticmethod(lambda a, b: a & b)
    ori = staticmethod(lambda a, b: a | b)
    mului_extended = staticmethod(lambda a, b: (a * b % 2**32, a * b // 2**32))
    cmpi = staticmethod(lambda predicate, a, b: a != b)
    select = staticmethod(np.where)
    constant = staticmethod(lambda type, x: x)
    bitcast = staticmethod(lambda type, x: x.astype(np.uint32).view(np.int16))
    from_elements = staticmethod(lambda type, elements: np.stack(elements, -1))
    extract = staticmethod(lambda x, dynamic_position, static_position: x[..., static_position[0]])

    @staticmethod
    def inline_asm(type, operands, text, constraints, has_side_effects):
        words = [np.asarray(x, np.uint64).astype(np.uint32) for x in operands]
        if text.startswith("shfl"):  # the threads in order of what their numbers become
            return operands[0][np.arange(128) ^ int(re.search(r"\$1, (\d+)", text)[1])]  # type: ignore[index]
        if text.startswith("prmt"):
            x, y, which = np.broadcast_arrays(*words)
            of_both = np.stack([x, y], -1).view(np.uint8)
            places = np.stack([which >> 4 * i & 0xF for i in range(4)], -1).astype(int)
            return np.take_along_axis(of_both, places, -1).view(np.uint32)[..., 0].astype(np.uint64)
        # The low 15 bits of each half as a float16 number, as abs.f16x2 and set.f16x2 have it.
        word, bound = (x[..., None].view(np.uint16) for x in words)
        x, bound = abs(word.view(np.float16)), bound.view(np.float16)
        found = {"geu": ~(x < bound), "lt.": x < bound}[text.split("set.")[1][:3]]
        return np.where(found, 0xFFFF, 0).astype(np.uint16).view(np.uint32)[..., 0].astype(np.uint64)


def in_numpy(monkeypatch):
    """Returns the module of random bits in the kernels, whose operations on registers are now those of `_Words`."""
    from pallas_fa.backends.gpu import dropout_bits as kernel

    for name in ("arith", "llvm", "vector"):
        monkeypatch.setattr(kernel, name, _Words)
    monkeypatch.setattr(kernel, "_word", lambda x: np.uint64(x % 2**32))
    types = dict(F32Type=None, VectorType=None, IntegerType=SimpleNamespace(get_signless=lambda bits: None))
    types |= {name: SimpleNamespace(get=lambda *args: None) for name in ("F32Type", "VectorType")}
    monkeypatch.setattr(kernel, "ir", SimpleNamespace(FloatAttr=SimpleNamespace(get=lambda type, x: x), **types))
    monkeypatch.setattr(kernel, "mgpu", SimpleNamespace(FragmentedArray=lambda _registers, **_: _registers))
    return kernel


@pytest.mark.parametrize("threshold", (1, 1000, 0x7BFF, 0x7C00, 0x7C01, 0x7FFF))
def test_two_decisions_at_once(threshold, monkeypatch):
    """By a comparison of float16 numbers, among which are denormal ones, infinity and NaN."""
    bits = np.arange(2**16, dtype=np.uint64)
    words = bits << np.uint64(16) | bits[::-1]
    found = in_numpy(monkeypatch)._at_least(words, threshold)
    wanted = np.where((bits & 0x7FFF) >= threshold, 0xFFFF, 0).astype(np.uint64)
    np.testing.assert_array_equal(found, wanted << np.uint64(16) | wanted[::-1])


@pytest.mark.parametrize("threshold", (10000, 0x7C80))
@pytest.mark.parametrize(("keys_by_queries", "rounded"), ((False, False), (True, False), (False, True)))
def test_what_a_thread_does_with_its_registers(keys_by_queries, rounded, threshold, monkeypatch):
    """The interpreter can't run it: here each register is an array of the values that 128 threads hold."""
    shape, seeds, first = (64, 144), (0x12345678, 0x9ABCDEF0), np.uint64(48)
    kernel, thread = in_numpy(monkeypatch), np.arange(128, dtype=np.uint64)
    row = lambda half: 16 * (thread // 32) + thread % 32 // 4 + 8 * half  # of the layout of wgmma's results
    column = lambda tile: 8 * tile + 2 * (thread % 4)[:, None] + np.arange(2, dtype=np.uint64)
    x = np.random.default_rng(0).random(shape)

    def registers(shape, contents):
        array = np.empty(len(contents), object)
        for i, values in enumerate(contents):
            array[i] = Register(values)
        return SimpleNamespace(registers=array.reshape(shape), shape=x.shape, layout=None)

    class Register(np.ndarray):
        type = None

        def __new__(cls, x):
            return np.asarray(x).view(cls)

    places = [(tile, half) for tile in range(shape[1] // 8) for half in range(2)]
    tiled = registers(
        (1, shape[1] // 8, 1, 1, 2), [x[row(h)[:, None].astype(int), column(tile).astype(int)] for tile, h in places]
    )
    rows = registers((1, 1, 2), [first + row(h)[:, None] for h in range(2)])
    columns = registers((shape[1] // 8, 1, 1), [column(tile) for tile in range(shape[1] // 8)])
    key, offset = (np.uint64(x) for x in seeds)
    draw = kernel.Draw(shape, keys_by_queries, threshold)
    run = draw.random if rounded else draw.decisions
    found = run(None, rows, columns, SimpleNamespace(registers={(): key}), SimpleNamespace(registers={(): offset}))
    words = [SimpleNamespace(registers=word) for word in found]
    if rounded:
        masks = draw.masks(None, *words).reshape(-1)
        found = [np.where(mask, x, 0) for mask, x in zip(masks, tiled.registers.reshape(-1), strict=True)]
        assert {int(bits) for mask in masks for bits in np.unique(mask)} == {0, -1}
    else:
        assert len(words) == 3  # bits of 72 elements
        found = draw.select(None, tiled, *words).reshape(-1)

    r, c = first + np.arange(shape[0]), np.arange(shape[1])
    t, s = (c[:, None], r[None]) if keys_by_queries else (r[:, None], c[None])
    keeps = np.asarray(
        Dropout(tuple(jnp.full((1, 1, 1, 1), x, jnp.uint32) for x in seeds), threshold).keeps(t, s)[0, 0]
    )
    want = np.where(keeps.T if keys_by_queries else keeps, x, 0)
    for (tile, h), got in zip(places, found, strict=True):
        np.testing.assert_array_equal(
            np.asarray(got, np.float64), want[row(h)[:, None].astype(int), column(tile).astype(int)]
        )


@pytest.mark.parametrize("rows", (32, 24))
def test_where_a_shard_starts(rows):
    """The kernels share calls of the generator only where shards start at multiples of 16."""
    from pallas_fa.operands.part import Part
    from pallas_fa.problem import normalise

    x = jnp.ones((1, rows, 2, 64), jnp.bfloat16)
    _, operands = normalise(x, x, x, dropout_rate=0.1, dropout_key=jax.random.key(0))
    moved = operands.dropout.moved(Part((0, 0, jnp.int32(3) * rows, 32), (1, 2, rows, rows)))
    assert moved.aligned == (rows == 32)
    np.testing.assert_array_equal(moved.first_query, 3 * rows)
    assert moved.first_key == 32


@pytest.mark.parametrize(
    ("T", "placement", "count"),
    (
        pytest.param(512, "contiguous", 2, marks=pytest.mark.full),
        pytest.param(512, "zigzag", 8, marks=pytest.mark.full),
        (96, "contiguous", 2),
    ),
)
def test_the_kernels_of_a_ring_lower(T, placement, count):
    """Also where shards start at no multiple of 16."""
    mesh = jax.make_mesh((4,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x = jnp.ones((1, T, 2, 64), jnp.bfloat16)

    def loss(q, key):
        attend = functools.partial(
            pallas_fa.context_parallel.ring_attention, axis_name="ring", placement=placement, is_causal=True,
            dropout_rate=0.1, implementation=("mosaic_gpu", "xla"),
        )  # fmt: skip
        run = jax.shard_map(
            lambda q, key: attend(q, q, q, dropout_key=key),
            mesh=mesh, in_specs=(P(None, "ring"), P()), out_specs=P(None, "ring"),
        )  # fmt: skip
        return jnp.sum(run(q, key).astype(jnp.float32))

    assert kernels(jax.grad(loss), x, jax.random.key(0)) == count
