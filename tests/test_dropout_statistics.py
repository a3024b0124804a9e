"""The statistics of dropout: its rate, and the independence of elements, heads, batch entries, keys and layers."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.softmax import dropout
from pallas_fa.softmax.dropout import Dropout


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
    *((0, 0, 0, 0, 2), (0, 0, 0, 0, 16), (0, 0, 0, 8, 16), (0, 0, 0, 0, 24), (0, 0, 0, 0, 32)),
    *((0, 0, 0, 1, 1), (0, 0, 1, 1, 0), (1, 0, 0, 0, 1)),
]  # along [keys, B, N, T, S]


def worst_deviation(keep, rate):
    """The largest |z| of the rates and the correlations of neighbours, along all axes and in pairs of them."""
    x = (np.asarray(keep, np.float32) - (1 - rate)) / math.sqrt(rate * (1 - rate))
    z = lambda x: abs(float(x.mean(dtype=np.float64))) * math.sqrt(x.size)
    found = [z(x)]
    slices = {step: (slice(None, -step or None), slice(step, None)) for step in (0, 1, 2, 8, 9, 16, 24, 32)}
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
    """4 million draws: 25 statistics within 5 standard deviations."""
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
    """A million halves of calls. The rate is no multiple of 2^-7, so that all 15 bits of an element decide."""
    keep = _draws(keys_of_seeds(64), 0.3, SHAPE).reshape(64, 2, 4, 4, 2, 8, 8, 2, 4, 2)
    calls = jnp.moveaxis(keep, (4, 7, 9), (-3, -2, -1)).reshape(-1, 8)  # by t ^ 8, s ^ 8 and s ^ 1
    assert chi_square(calls, 0.3) < 5


def rank(vectors):
    """Of ints, as vectors of bits."""
    basis = []
    for vector in vectors:
        for other in basis:
            vector = min(vector, vector ^ other)
        basis += [vector] * (vector > 0)
    return len(basis)


def test_numbers_of_one_call_are_independent():
    """They are linear in the 64 random bits: independent are bits of numbers that depend on these in independent ways."""
    inputs = np.uint64(1) << np.arange(64, dtype=np.uint64)
    words = np.stack(dropout.numbers(*(jnp.asarray(inputs >> shift & 2**32 - 1, jnp.uint32) for shift in (0, 32))))
    halves = np.concatenate([words >> shift & 0x7FFF for shift in (0, 16)]).astype(object)  # [numbers, inputs]
    bits = [
        [sum((int(x) >> bit & 1) << i for i, x in enumerate(number)) for bit in range(14, -1, -1)] for number in halves
    ]
    dependent = lambda count, of_bits, numbers: sum(
        rank(itertools.chain.from_iterable(x[:of_bits] for x in chosen)) < count * of_bits
        for chosen in itertools.combinations(numbers, count)
    )
    assert [dependent(2, 15, bits), dependent(3, 7, bits), dependent(4, 7, bits)] == [0, 0, 7]
    far = [i for i in range(16) if i % 8 >= 4]
    for half in (far, sorted(set(range(16)) - set(far))):
        assert not dependent(8, 7, [bits[i] for i in half])


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
