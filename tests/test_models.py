"""The models: shapes, what a GPT must not see, its cache, its grouped heads, and that a ViT learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.data import load_digits
from models.gpt import GPT, SIZES, GPTConfig, rope
from models.images import ImageTask
from models.step import init_state, make_optimizer, make_train_step
from models.vit import SIZES as VIT_SIZES
from models.vit import ViT
from pallas_fa.cache import KeyValueCache

NANO = SIZES["nano"]  # 4 query heads on 2 key heads


def tokens_of(seed, batch, length):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 256, (batch, length)), jnp.int32)


@nnx.jit
def logits_of(model, tokens):
    return model(tokens)[0]


def parameter_count(model):
    return sum(param.size for param in jax.tree.leaves(nnx.state(model)))


@pytest.mark.parametrize(
    ("size", "millions"), [("tiny", 0.62), ("gpt2-small", 85.2), ("gpt2-medium", 302.7), ("1b", 1007.2)]
)
def test_sizes_have_the_parameters_they_are_named_for(size, millions):
    config = SIZES[size]
    model = nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0)))
    assert parameter_count(model) / 1e6 == pytest.approx(millions, rel=0.01)
    logits = nnx.eval_shape(lambda m, x: m(x)[0], model, jax.ShapeDtypeStruct((2, config.context), jnp.int32))
    assert logits.shape == (2, config.context, 256) and logits.dtype == jnp.float32


def test_gpt_sees_no_later_byte():
    model = GPT(NANO, nnx.Rngs(0))
    tokens = tokens_of(0, 2, 20)
    logits = logits_of(model, tokens)
    changed = logits_of(model, tokens.at[:, 12].set((tokens[:, 12] + 1) % 256))
    np.testing.assert_array_equal(logits[:, :12], changed[:, :12])
    assert jnp.abs(logits[:, 12:] - changed[:, 12:]).max(axis=(0, 2)).min() > 1e-4  # and every later one reads it


def test_gpt_is_untrained_at_first():
    """Uniform predictions: the loss starts at log2(256) = 8 bits, so no initial weight is off by much."""
    logits = logits_of(GPT(SIZES["tiny"], nnx.Rngs(0)), tokens_of(0, 4, 64))
    bits = -jax.nn.log_softmax(logits)[:, :-1] / jnp.log(2.0)
    picked = jnp.take_along_axis(bits, tokens_of(0, 4, 64)[:, 1:, None], axis=-1)
    assert 7.9 < picked.mean() < 8.2


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("chunks", [[1] * 11, [5, 1, 1, 4]])
def test_decoding_with_a_cache_gives_the_logits_of_the_whole(implementation, chunks):
    config = dataclasses.replace(NANO, implementation=implementation, sinks=len(chunks) < 5)
    model = GPT(config, nnx.Rngs(1))
    tokens = tokens_of(1, 3, sum(chunks))
    whole = logits_of(model, tokens)
    step = nnx.jit(lambda model, tokens, caches: model(tokens, caches))
    empty = functools.partial(KeyValueCache.empty, 3, 16, config.kv_heads, config.head_dim, dtype=config.dtype)
    caches = tuple(empty() for _ in range(config.layers))  # larger than needed: empty places must not be seen
    parts = []
    for part in jnp.split(tokens, np.cumsum(chunks)[:-1], axis=1):
        logits, caches = step(model, part, caches)
        parts.append(logits)
    assert all((cache.lengths == sum(chunks)).all() for cache in caches)
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=2e-5, rtol=0)


def test_grouped_heads_equal_repeated_ones():
    """A model whose key heads are copied out to one for each query head computes the same."""
    grouped = GPT(NANO, nnx.Rngs(2))
    full = GPT(dataclasses.replace(NANO, kv_heads=NANO.heads), nnx.Rngs(3))
    params = nnx.to_pure_dict(nnx.state(grouped))
    for block in params["blocks"].values():
        for name in ("key", "value"):
            kernel = block["attention"][name]["kernel"].reshape(NANO.width, NANO.kv_heads, NANO.head_dim)
            repeated = jnp.repeat(kernel, NANO.heads // NANO.kv_heads, axis=1)
            block["attention"][name]["kernel"] = repeated.reshape(NANO.width, -1)
    full = nnx.merge(nnx.graphdef(full), params)
    tokens = tokens_of(2, 2, 24)
    np.testing.assert_allclose(logits_of(full, tokens), logits_of(grouped, tokens), atol=2e-5, rtol=0)
    assert parameter_count(full) > parameter_count(grouped)


@pytest.mark.parametrize("layers", (1, 2, 5))
def test_the_first_block_and_all_others_are_gathered_once(layers):
    gathered = []

    def gather(x, first, rest):
        gathered.append((len(first), len(rest)))
        return x, first, rest

    config = GPTConfig(layers=layers, width=16, heads=2, kv_heads=2, hidden=16, context=8)
    plain = GPT(config, nnx.Rngs(0))
    model = GPT(dataclasses.replace(config, gather=gather), nnx.Rngs(0))
    tokens = jnp.arange(8)[None]
    np.testing.assert_array_equal(model(tokens)[0], plain(tokens)[0])
    assert gathered == [(1, layers - 1)]


def test_rope_turns_by_position_alone():
    x, y = jax.random.normal(jax.random.key(0), (2, 1, 6, 3, 8))
    np.testing.assert_allclose(rope(x, jnp.zeros(6, jnp.int32), 100.0), x)
    positions = jnp.arange(6, dtype=jnp.int32)

    def products(shift):
        turned = (rope(z, positions + shift, 100.0) for z in (x, y))
        return jnp.einsum("btnh,bsnh->bnts", *turned)

    np.testing.assert_allclose(products(0), products(40), atol=1e-4)  # only distances matter
    assert jnp.abs(products(0) - jnp.einsum("btnh,bsnh->bnts", x, y)).max() > 0.1


def test_bfloat16_computes_near_float32_on_float32_parameters():
    model = GPT(NANO, nnx.Rngs(0))
    graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(dataclasses.replace(NANO, dtype=jnp.bfloat16), nnx.Rngs(0))))
    half = nnx.merge(graph, nnx.to_pure_dict(nnx.state(model)))
    assert {param.dtype for param in jax.tree.leaves(nnx.state(half))} == {jnp.dtype("float32")}
    tokens = tokens_of(4, 2, 16)
    logits, low = logits_of(model, tokens), logits_of(half, tokens)
    assert low.dtype == jnp.float32
    error = jnp.abs(low - logits).max()
    assert 1e-5 < error < 0.03 * jnp.abs(logits).max()  # not 0: it did compute in bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [({"heads": 5}, "heads=5"), ({"kv_heads": 3}, "kv_heads=3"), ({"heads": 32, "kv_heads": 2}, "even head dim")],
)
def test_gpt_config_refuses_what_cannot_be(change, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(NANO, **change)


@pytest.mark.parametrize("size", VIT_SIZES)
def test_vit_shapes(size):
    model = ViT(VIT_SIZES[size])
    images = jax.ShapeDtypeStruct((3, 8, 8, 1), jnp.float32)
    logits, variables = jax.eval_shape(model.init_with_output, jax.random.key(0), images)
    assert logits.shape == (3, 10) and logits.dtype == jnp.float32
    assert variables["params"]["position"].shape == (16, VIT_SIZES[size].width)


def test_vit_attention_goes_through_pallas_fa():
    config = dataclasses.replace(VIT_SIZES["nano"], implementation="nonsense")
    with pytest.raises(ValueError, match="nonsense"):
        jax.eval_shape(ViT(config).init, jax.random.key(0), jnp.zeros((1, 8, 8, 1)))


def test_vit_learns_digits_in_a_few_steps():
    task = ImageTask(VIT_SIZES["nano"], load_digits(), batch=64, seed=0)
    optimizer = make_optimizer("adamw", 5e-3)
    state = init_state(task.init(), optimizer)
    train_step = make_train_step(task.loss, optimizer)
    before = task.validate(state.params)
    for step in range(100):
        state, _ = train_step(state, task.batch(step))
    after = task.validate(state.params)
    assert before["validation_accuracy"] < 0.3  # ten classes
    assert after["validation_accuracy"] > 0.5
    assert after["validation_loss"] < 0.8 * before["validation_loss"]
