"""`pallas_fa.nn` with a cache: a step for each token gives what the whole sequence gives, and reads what the cache holds."""

import dataclasses
import functools

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_fa
import pallas_fa.nn
from pallas_fa import attention, masks, scores
from pallas_fa.backends.xla import chunks
from pallas_fa.backends.xla.visits import visited_interval
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.nn import attention_fn
from tests.flax_layers import FRAMEWORKS, IDS, D, H, N, T, assert_close, decoder, normal


def decoded(step, state, x, mask=None, **segments):
    """What `step` gives position by position, with that position's row of `mask`, or a whole `Mask`."""
    outs = []
    for t in range(x.shape[-2]):
        kwargs = {"mask": mask[..., t : t + 1, :] if isinstance(mask, jax.Array) else mask}
        kwargs |= {k: v[..., t : t + 1] if k.startswith("query") else v for k, v in segments.items()}
        out, state = step(state, x[..., t : t + 1, :], kwargs)
        outs.append(out)
    return jnp.concatenate(outs, axis=-2)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_decode_with_flaxs_module(framework, batch):
    cls = flax.linen.MultiHeadDotProductAttention if framework == "linen" else nnx.MultiHeadAttention
    x = normal(1, *batch, T, D)
    causal = flax.linen.make_causal_mask(jnp.ones((*batch, T)))
    call, *cached = decoder(framework, cls, x, attention_fn=attention_fn, normalize_qk=True)
    assert_close(decoded(*cached, x), call(x, mask=causal))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("batch", [(), (2, 1)])
def test_decode_with_our_module(framework, batch):
    """Window, soft cap, grouped heads, segment ids and masks count from the position in the cache."""
    cls = pallas_fa.nn.linen.MultiHeadAttention if framework == "linen" else pallas_fa.nn.nnx.MultiHeadAttention
    x = normal(1, *batch, T, D)
    ids = jnp.broadcast_to(jnp.arange(T) // 7, (*batch, T))
    mask = jnp.broadcast_to((jnp.arange(T) != 2) | jnp.eye(T, dtype=bool), (*batch, 1, T, T))
    fields = {"num_kv_heads": 2, "is_causal": True, "local_window_size": (3, 0), "logits_soft_cap": 5.0}
    segments = dict.fromkeys(IDS, ids)
    call, *cached = decoder(framework, cls, x, **fields)
    expected = call(x, mask=mask, **segments)
    assert_close(decoded(*cached, x, mask, **segments), expected)
    # A Mask is the same for all steps: the module takes the row of its position.
    rule = masks.Dense(mask) & masks.Segments(ids, ids) & masks.Lengths(kv_lengths=jnp.full(batch, T - 1))
    assert_close(decoded(*cached, x, rule)[..., : T - 1, :], expected[..., : T - 1, :])


def tilted(x, b, n, t, s, slope):
    return x - slope * jnp.abs(t - s) + jnp.sin(t / 2) * jnp.cos(s * (n + 1))


SLOPES = np.geomspace(0.5, 0.05, N).astype(np.float32)
END = {"align": "bottom_right"}
AT_POSITIONS = {
    "alibi": functools.partial(scores.Alibi, SLOPES),
    "relative": functools.partial(scores.RelativeBias, lambda offset: jnp.cos(offset * SLOPES[:, None])),
    "custom": functools.partial(scores.Custom, tilted, SLOPES[:, None, None]),
    "chain": lambda **align: scores.SoftCap(5.0).then(scores.Alibi(SLOPES, **align)),
}


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ours", [False, True], ids=["Flax's module", "our module"])
@pytest.mark.parametrize("name", AT_POSITIONS)
def test_a_bound_score_counts_from_the_position_in_the_cache(framework, ours, name):
    """With align="bottom_right", that is; counted from the start, a step would be position 0, and is refused."""
    flaxs = flax.linen.MultiHeadDotProductAttention if framework == "linen" else nnx.MultiHeadAttention
    cls = getattr(pallas_fa.nn, framework).MultiHeadAttention if ours else flaxs
    x, hook = normal(1, 2, T, D), lambda **align: functools.partial(attention_fn, score=AT_POSITIONS[name](**align))
    causal = flax.linen.make_causal_mask(jnp.ones((2, T)))
    call, *cached = decoder(framework, cls, x, attention_fn=hook(**END))
    assert_close(decoded(*cached, x), expected := call(x, mask=causal))
    call, step, state = decoder(framework, cls, x, attention_fn=hook())
    assert_close(call(x, mask=causal), expected)
    with pytest.raises(ValueError, match="score holds a .* counts positions from the start.*align='bottom_right'"):
        step(state, x[:, :1], {})


def gained(x, b, n, t, s, gain):
    return x * gain


def seen(b, n, t, s, width):
    return t - s < width


def test_of_a_single_query_what_counts_from_the_start_is_refused():
    """Nothing else is: what does not look at t, is aligned to the end, or has been moved to a position."""
    q, kv, wide = normal(1, 2, 1, N, H), normal(2, 2, T, N, H), np.full((2, 1, 1, 1), T)
    refused = [
        {"score": scores.Alibi(SLOPES)},
        {"score": scores.SoftCap(5.0).then(scores.Custom(tilted, SLOPES[:, None, None]))},
        {"mask": masks.Causal()},
        {"mask": masks.Dense(jnp.ones((1, T), bool)) & (masks.Window(1, 0) | masks.Causal("bottom_right"))},
        {"mask": masks.Custom(seen, wide)},
        {"mask": masks.Custom(lambda b, n, t, s: s % 2 == 0, ranges=masks.Window(3, 0))},
        {"mask": masks.block_mask(masks.Causal("bottom_right"), 1, T)},
    ]
    for arguments in refused:
        with pytest.raises(ValueError, match="counts positions from the start.*one query with 12 keys"):
            attention_fn(q, kv, kv, **arguments)
        if not isinstance(arguments.get("mask"), masks.BlockMask):  # of one key it is right
            attention_fn(q, kv[:, :1], kv[:, :1], **({} if "mask" in arguments else arguments))
    taken = [
        {"score": scores.Custom(gained, SLOPES[:, None, None])},
        {"score": scores.Alibi(SLOPES, offset=T - 1)},
        {"score": scores.RelativeBias(normal(3, N, T))},
        {"mask": masks.Causal(offset=jnp.full(2, T - 1)) & masks.Window(3, 0, align="bottom_right")},
        {"mask": masks.Custom(seen, wide, **END)},
        {"mask": masks.Segments(np.zeros((2, 1), int), np.zeros((2, T), int))},
    ]
    for arguments in taken:
        want = pallas_fa.dot_product_attention(q, kv, kv, **arguments)
        np.testing.assert_array_equal(attention_fn(q, kv, kv, **arguments), want)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("ours", [False, True], ids=["Flax's module", "our module"])
def test_decode_reads_the_filled_part_of_the_cache(framework, ours, monkeypatch):
    """What lies past the position may be NaN, and the key chunks visited are those of the filled part and the window."""
    flaxs = flax.linen.MultiHeadDotProductAttention if framework == "linen" else nnx.MultiHeadAttention
    cls = getattr(pallas_fa.nn, framework).MultiHeadAttention if ours else flaxs
    problems, run = [], attention.run

    def spy(problem, operands, implementation):
        problems.append((problem, operands.mask))
        return run(problem, operands, implementation)

    monkeypatch.setattr(attention, "run", spy)
    x, fields = normal(1, 2, 256, D), {"local_window_size": (70, 0)} if ours else {"attention_fn": attention_fn}
    _, step, state = decoder(framework, cls, x, **fields)
    with jax.disable_jit():
        _, state = step(state, x[:, :1], {})
        state = jax.tree_util.tree_map_with_path(_poison_past_150, state)
        out, _ = step(state, x[:, 150:151], {})
    assert np.isfinite(np.asarray(out)).all()
    problem, mask = problems[-1]
    np.testing.assert_array_equal(lengths_of(mask).kv_lengths.ravel(), 151)
    keys = dataclasses.replace(chunks.split_axes(problem)[1], chunk=16)
    first, end = visited_interval(mask, "kv_range", chunks.Chunks(2, 1, 1), keys)(0)
    assert (int(first), int(end)) == (5 if ours else 0, 10)


def _poison_past_150(path, x):
    """Sets a decode cache to position 150, with NaN past it."""
    if "cache_index" in str(path):
        return jnp.full_like(x, 150)
    return x.at[:, 151:].set(jnp.nan) if "cached_" in str(path) else x
