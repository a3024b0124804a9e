"""Decoding with caches: the tokens of a model without them, one compilation each of two programs, and what may be drawn."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.decoder import Decoder
from models.gpt import GPT, SIZES, GPTConfig
from models.sample import Sampling
from tests.lowering import kernels

pytestmark = pytest.mark.usefixtures("quick_compilation")
NANO = dataclasses.replace(SIZES["nano"], layers=1)
GREEDY = Sampling(temperature=0)


def model_of(context, **changes):
    config = dataclasses.replace(NANO, context=context, **changes)
    model = GPT(config, nnx.Rngs(5))
    return config, model, nnx.to_pure_dict(nnx.state(model))


def prompts_of(*lengths):
    return [np.random.default_rng(length).integers(0, 256, length).tolist() for length in lengths]


def greedy_without_a_cache(model, prompts, count):
    """Each token from a forward pass over all tokens before it."""
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.stack([np.pad(prompt, (0, lengths.max() + count - len(prompt))) for prompt in prompts])
    following = nnx.jit(lambda model, tokens: model(tokens)[0].argmax(-1))
    rows = np.arange(len(prompts))
    for i in range(count):
        tokens[rows, lengths + i] = np.asarray(following(model, tokens))[rows, lengths + i - 1]
    return np.stack([row[length : length + count] for row, length in zip(tokens, lengths, strict=True)], axis=1)


def compilations(decoder: Any) -> tuple[int, int]:
    return decoder.read._cache_size(), decoder.step._cache_size()


@pytest.mark.parametrize("page_size", (None, 16))
@pytest.mark.parametrize("count", (40, pytest.param(256, marks=pytest.mark.full)))
def test_greedy_tokens_are_those_of_a_model_without_a_cache(count, page_size):
    config, model, params = model_of(context=288, sinks=True)
    prompts = prompts_of(3, 21, 9)
    decoder = Decoder(config, params, GREEDY, page_size)
    found = list(decoder.tokens(prompts, count, seed=0))
    np.testing.assert_array_equal(found, greedy_without_a_cache(model, prompts, count))
    assert len(np.unique(found)) > 10  # no single token again and again
    assert compilations(decoder) == (1, 1)


@pytest.mark.parametrize("page_size", (None, 8))
def test_past_the_context_the_last_half_is_read_anew(page_size):
    config, model, params = model_of(context=16)
    prompts = prompts_of(11, 4)
    decoder = Decoder(config, params, GREEDY, page_size)
    found = np.stack(list(decoder.tokens(prompts, 24, seed=0)), axis=1)
    first = greedy_without_a_cache(model, prompts, 6)
    np.testing.assert_array_equal(found[:, :6], first.T)  # 11 + 5 fill the context
    windows = [[*prompt, *tokens] for prompt, tokens in zip(prompts, found[:, :6].tolist(), strict=True)]
    windows[0] = windows[0][-8:]
    np.testing.assert_array_equal(found[:, 6:12], greedy_without_a_cache(model, windows, 6).T)
    assert compilations(decoder) == (1, 1)


def test_matrices_lie_in_the_dtype_of_the_computation():
    config, _, params = model_of(context=16, sinks=True, dtype=jnp.bfloat16)
    decoder = Decoder(config, params, GREEDY)
    kinds = {(x.ndim > 1, x.dtype.name) for x in jax.tree.leaves(decoder.params)}
    assert kinds == {(True, "bfloat16"), (False, "float32")}


def test_steps_write_into_the_caches_in_place():
    config, _, params = model_of(context=16)
    decoder = Decoder(config, params, GREEDY)
    length, key = np.array([4], np.int32), jax.random.key(0)
    caches, tokens = decoder.read(decoder.params, decoder.empty_caches([8]), np.ones((1, 4), int), length, key, 0)
    old = caches[0].key, caches[0].value
    places = [x.unsafe_buffer_pointer() for x in old]
    caches, _ = decoder.step(decoder.params, caches, tokens, key, 1)
    assert all(x.is_deleted() for x in old)
    assert [x.unsafe_buffer_pointer() for x in (caches[0].key, caches[0].value)] == places
    assert caches[0].lengths.tolist() == [5]


def test_kernels_lower():
    """One in each layer, to read prompts and to make a step."""
    config = GPTConfig(2, 128, 2, 1, 64, context=64, sinks=True, dtype=jnp.bfloat16, implementation="mosaic_gpu")
    params = jax.tree.map(
        lambda x: np.zeros(x.shape, x.dtype), nnx.eval_shape(lambda: nnx.state(GPT(config, nnx.Rngs(0))))
    )
    decoder = Decoder(config, nnx.to_pure_dict(params), Sampling(0.8, top_k=4))
    caches, lengths, key = decoder.empty_caches([40, 64]), np.array([20, 40]), jax.random.key(0)
    assert kernels(decoder.read, decoder.params, caches, np.zeros((2, 40), int), lengths, key, 0) == 2
    assert kernels(decoder.step, decoder.params, caches, np.zeros(2, int), key, 1) == 2


# ---- what is drawn ----

LOGITS = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3], [0.3, 0.1, 0.05, 0.55]]))


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    (
        (Sampling(0), ({1}, {3})),
        (Sampling(1e-6), ({1}, {3})),
        (Sampling(), ({0, 1, 2, 3}, {0, 1, 2, 3})),
        (Sampling(top_k=1), ({1}, {3})),
        (Sampling(top_k=2), ({1, 3}, {0, 3})),
        (Sampling(top_k=4), ({0, 1, 2, 3}, {0, 1, 2, 3})),
        (Sampling(top_p=1e-9), ({1}, {3})),
        (Sampling(top_p=0.5), ({1, 3}, {3})),
        (Sampling(top_p=0.75), ({1, 2, 3}, {0, 3})),
        (Sampling(top_p=1.0), ({0, 1, 2, 3}, {0, 1, 2, 3})),
        (Sampling(top_k=3, top_p=0.6), ({1, 3}, {0, 3})),  # of the three in the first row 0.4 is 0.44
        (Sampling(0.5, top_p=0.5), ({1}, {3})),  # colder, so that fewer are needed
        (Sampling(2.0, top_p=0.7), ({1, 2, 3}, {0, 3})),  # hotter, so that more are needed
    ),
    ids=str,
)
def test_what_is_left_out_is_never_drawn(sampling, allowed):
    keys = jax.random.split(jax.random.key(0), (400, 2))
    drawn = np.asarray(jax.vmap(sampling.draw, (None, 0))(LOGITS, keys))
    assert drawn.dtype == np.int32
    assert tuple(set(column.tolist()) for column in drawn.T) == allowed


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    (
        (Sampling(top_k=1), ({0}, {1})),
        (Sampling(top_k=2), ({0, 1}, {1, 3})),
        (Sampling(top_k=3), ({0, 1, 2}, {0, 1, 3})),
        (Sampling(top_p=0.5), ({0, 1}, {1, 3})),
        (Sampling(top_p=0.51), ({0, 1, 2}, {1, 3})),
        (Sampling(top_k=2, top_p=0.5), ({0}, {1})),
    ),
    ids=str,
)
def test_of_equals_the_first_are_taken(sampling, allowed):
    """As many as were asked for, and no more: in the first row all are equal, in the second the two that are left."""
    logits = jnp.log(jnp.array([[0.25] * 4, [0.125, 0.375, 0.125, 0.375]]))
    keys = jax.random.split(jax.random.key(2), (200, 2))
    drawn = np.asarray(jax.vmap(sampling.draw, (None, 0))(logits, keys))
    assert tuple(set(column.tolist()) for column in drawn.T) == allowed


@pytest.mark.parametrize("temperature", (2**-126, 2**-100, 1e-9, 2.0**127))
@pytest.mark.parametrize("left_out", ({}, {"top_k": 3}, {"top_p": 0.9}), ids=str)
def test_extreme_temperatures(temperature, left_out):
    """The coldest is greedy, the hottest draws all alike."""
    keys = jax.random.split(jax.random.key(3), (200, 2))
    drawn = np.asarray(jax.vmap(Sampling(temperature, **left_out).draw, (None, 0))(LOGITS * 40 + 900, keys))
    if temperature < 1:
        assert set(drawn[:, 0]) == {1} and set(drawn[:, 1]) == {3}
    else:
        assert [len(set(column)) for column in drawn.T] == [3, 3] if left_out.get("top_k") else [4, 4]


def test_frequencies_are_probabilities():
    keys = jax.random.split(jax.random.key(1), (4000, 2))
    drawn = np.asarray(jax.vmap(Sampling(0.5, top_k=3).draw, (None, 0))(LOGITS, keys))
    for column, logits in zip(drawn.T, np.asarray(LOGITS), strict=True):
        want = np.exp(2 * logits) * (logits > logits.min())
        np.testing.assert_allclose(np.bincount(column, minlength=4) / 4000, want / want.sum(), atol=0.03)


def test_a_seed_draws_the_same_whatever_else_is_in_the_batch(monkeypatch):
    config, _, params = model_of(context=32)
    decoder = Decoder(config, params, Sampling(1.0, top_p=0.9))
    prompts = prompts_of(4, 7, 5)
    draw = lambda prompts, seed: np.stack(list(decoder.tokens(prompts, 12, seed)), axis=1)
    together = draw(prompts, 3)
    np.testing.assert_array_equal(together[:1], draw(prompts[:1], 3))
    other = draw([prompts[0], prompts[0], prompts[1]], 4)
    assert (other[0] != together[0]).any() and (other[0] != other[1]).any()
    step, calls = decoder.step, []
    monkeypatch.setattr(decoder, "step", lambda *arguments: calls.append(arguments) or step(*arguments))
    next(decoder.tokens(prompts, 12, 3))
    assert len(calls) == 1  # the second token is under way before the first is looked at
