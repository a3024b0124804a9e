"""Positions in a cache: t in masks and scores is that in the sequence, however its queries are cut into calls."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks, scores
from tests.test_cache import B, H, K, N, S, contiguous, normal, paged, rows_of

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(1)
SLOPES, TABLE = np.geomspace(0.5, 0.05, N).astype(np.float32), np.asarray(normal(N, 2 * S - 1))
BIAS, SEEN, IDS = np.asarray(normal(1, N, S, S)), RNG.random((B, 1, S, S)) < 0.7, RNG.integers(0, 2, (B, S))
GAIN = np.asarray(normal(S))


def by_offset(offset):
    return jnp.asarray(TABLE)[:, offset + S - 1]


def near(b, n, t, s):
    return (t - s < 3) | (s % 4 == b % 2)


def near_by_head(b, n, t, s, width):
    return t - s < width


def warmer(x, b, n, t, s):
    return x * (1 + t / 8) - jnp.abs(t - s) / (n + 2)


def warmer_by_array(x, b, n, t, s, of_key, of_query):
    return x * jnp.cos(t / 3) + of_key + of_query * (s - t)


def at_rows(x, first, T):
    """Of x [B|1, .., S queries, keys], those of T queries of each sequence."""
    rows = np.minimum(first[:, None] + np.arange(T), S - 1)
    x = np.broadcast_to(x, (B, *x.shape[1:]))
    return np.take_along_axis(x, rows.reshape(B, *(1,) * (x.ndim - 3), T, 1), axis=-2)


def rows_of_call(x):
    """What makes an array over queries: of a call, whose T queries of each sequence start at `first`."""
    return lambda first, T: jnp.asarray(at_rows(x, first, T))


def as_they_are(x):
    return lambda first, T: x


# A function (the first positions, how many queries) -> arguments. Whatever is no array is the same in every call.
POSITIONS = {
    "alibi": as_they_are({"score": scores.Alibi(SLOPES)}),
    "alibi from the end": as_they_are({"score": scores.Alibi(SLOPES, align="bottom_right")}),
    "alibi moved on": as_they_are({"score": scores.Alibi(SLOPES, 2, align="bottom_right")}),
    "relative": as_they_are({"score": scores.RelativeBias(by_offset)}),
    "relative for a batch": as_they_are({"score": scores.RelativeBias(lambda x: by_offset(x)[None] * GAIN[:B, None, None])}),
    "chain": as_they_are({"score": scores.SoftCap(3.0).then(scores.Alibi(SLOPES)).then(scores.RelativeBias(by_offset))}),
    "custom score": as_they_are({"score": scores.Custom(warmer)}),
    "custom score of arrays": lambda first, T: {
        "score": scores.Custom(warmer_by_array, GAIN, rows_of_call(BIAS[..., :1])(first, T))
    },
    "bias score": lambda first, T: {"score": scores.Bias(rows_of_call(BIAS)(first, T))},
    "bias": lambda first, T: {"bias": rows_of_call(BIAS)(first, T), "logits_soft_cap": 3.0},
    "causal": as_they_are({"mask": masks.Causal()}),
    "causal from the end": as_they_are({"mask": masks.Causal("bottom_right", 1)}),
    "window": as_they_are({"mask": masks.Window(3, 0)}),
    "window of arrays": as_they_are({"mask": masks.Window(np.array([2, 3, 4]), 1)}),
    "both windows": as_they_are({"mask": masks.Window(3, 0), "local_window_size": (4, None)}),
    "custom mask": as_they_are({"mask": masks.Custom(near)}),
    "custom mask with ranges": as_they_are(
        {"mask": masks.Custom(near_by_head, np.arange(1, 1 + N).reshape(N, 1, 1), ranges=masks.Window(5, None))}
    ),
    "either": as_they_are({"mask": masks.Window(2, None) | masks.Custom(near) & masks.Causal(), "sinks": GAIN[:N]}),
    "dense": lambda first, T: {"mask": rows_of_call(SEEN)(first, T), "score": scores.Alibi(SLOPES)},
    "documents": lambda first, T: {
        "query_segment_ids": rows_of_call(IDS[..., None])(first, T)[..., 0],
        "key_value_segment_ids": IDS,
    },
    "segments": lambda first, T: {"mask": masks.Segments(rows_of_call(IDS[..., None])(first, T)[..., 0], IDS)},
    "intervals": lambda first, T: {
        "mask": masks.KeyIntervals(*(rows_of_call(x)(first, T)[..., 0] for x in (IDS[..., None], S - IDS[..., None])))
    },
    "sinks": as_they_are({"sinks": GAIN[:N], "score": scores.Alibi(SLOPES), "local_window_size": (3, 0)}),
}  # fmt: skip


def step(cache, query, key, value, lengths, arguments):
    cache = cache.append(key, value, lengths)
    return cache.attend(query, lengths=lengths, **arguments), cache


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("name", POSITIONS)
def test_steps_are_the_whole_sequences_whatever_counts_positions(name, make):
    """Prompts of different lengths, a chunk, then single tokens: t is the position in the sequence in all of them."""
    cache, arguments_of = make(), POSITIONS[name]
    q, k, v = normal(B, S, N, H), normal(B, S, K, H), normal(B, S, K, 2 * H)
    arguments = arguments_of(np.zeros(B, int), S) | {"is_causal": True, "implementation": "reference"}
    whole = jax.jit(functools.partial(pallas_fa.dot_product_attention, **arguments))(q, k, v)
    first = np.zeros(B, int)
    for T, real in ((5, (5, 2, 4)), (3, None), (1, None)):
        lengths = None if real is None else jnp.array(real)
        new = [jnp.asarray(at_rows(np.reshape(x, (B, S, -1)), first, T)).reshape(B, T, *x.shape[2:]) for x in (q, k, v)]
        arguments = arguments_of(first, T)
        out, cache = jax.jit(lambda *x: step(*x, arguments))(cache, *new, lengths)  # noqa: B023
        count = np.full(B, T) if real is None else np.array(real)
        for b in range(B):
            np.testing.assert_allclose(out[b, : count[b]], whole[b, first[b] : first[b] + count[b]], atol=2e-6)
            assert not np.any(out[b, count[b] :])
        first = first + count
    assert first.tolist() == [9, 6, 8] and not cache.dropped.any()


@pytest.mark.parametrize("make", [contiguous, paged])
def test_one_program_for_all_positions(make):
    """What the function of a score closes over gets gradients."""
    cache = make().append(normal(B, 7, K, H), normal(B, 7, K, 2 * H), jnp.array([7, 3, 5]))
    q = normal(B, 1, N, H)

    @jax.jit
    def attend(cache, table):
        return cache.attend(q, score=scores.RelativeBias(lambda x: table[:, x + S - 1]))

    out = attend(cache, jnp.asarray(TABLE))
    for b, length in enumerate((7, 3, 5)):
        key, value = (x[b : b + 1, :length] for x in rows_of(cache))
        bias = TABLE[:, np.arange(length) - (length - 1) + S - 1][:, None]
        want = pallas_fa.dot_product_attention(q[b : b + 1], key, value, bias)
        np.testing.assert_allclose(out[b : b + 1], want, atol=1e-6)
    if make is contiguous:
        d_table = jax.grad(lambda table: attend(cache, table)[..., 0].sum())(jnp.asarray(TABLE))
        assert np.any(d_table[:, S - 7]) and not np.any(d_table[:, : S - 7]) and not np.any(d_table[:, S:])


NOT_OF_A_CACHE = {
    "offset": (dict(score=scores.Alibi(SLOPES, 5)), r"offset 5 of Alibi\(align='top_left'\).*Leave the offset out"),
    "offsets": (dict(mask=masks.Causal(offset=np.arange(B))), r"offset of shape \(3,\) of Causal.*align='bottom_right'"),
    "window": (dict(mask=masks.Dense(SEEN[:, :, :1]) | masks.Window(1, 0, 3)), "offset 3 of Window"),
    "lengths": (dict(mask=masks.Causal() & masks.Lengths(None, np.arange(B))), "a Lengths, but a cache knows.*lengths="),
    "blocks": (dict(mask=masks.block_mask(masks.Causal(), 1, S)), "BlockMask of a mask.*without blocks"),
    "score": (dict(score=np.zeros(S)), "score is a ndarray"),
    "page layout": (dict(page_layout="KPSH"), "page_layout='KPSH' cannot be given here"),
    "dropout": (dict(dropout_rate=0.5, dropout_key=jax.random.key(0)), "dropout_rate=0.5 cannot be given here"),
}  # fmt: skip


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("name", NOT_OF_A_CACHE)
def test_what_has_no_meaning_in_a_cache(name, make):
    arguments, message = NOT_OF_A_CACHE[name]
    with pytest.raises((ValueError, TypeError), match=message):
        make().attend(normal(B, 1, N, H), **arguments)


@pytest.mark.usefixtures("small_chunks")  # also of an array of so few rows, which else is taken all at once
def test_blocks_of_queries_and_rows():
    """Blocks alone are an array over these queries and all rows."""
    cache = contiguous().append(normal(B, 6, K, H), normal(B, 6, K, 2 * H))
    blocks = np.array([[[True, False, True]]])
    out = cache.attend(q := normal(B, 2, N, H), masks.BlockMask(blocks, (2, 4)))
    np.testing.assert_array_equal(out, cache.attend(q, jnp.asarray(np.repeat(blocks, 4, axis=-1))[None]))
