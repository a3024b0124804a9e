"""Rows with nothing to attend to, and padding: what lies past the sequence lengths touches nothing, whatever it holds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks, scores

IMPLEMENTATIONS = ("xla", "reference")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
pytestmark = pytest.mark.usefixtures("small_chunks")

B, T, S, N, K, H = 2, 70, 90, 4, 2, 8
Q_LENGTHS, KV_LENGTHS = np.array([41, 70]), np.array([67, 21])


def runner(implementation, keywords):
    """A jitted function of (q, k, v, arrays, cotangents) -> {name: result or gradient}; `keywords(arrays)` is the rest."""

    @jax.jit
    def both(q, k, v, arrays, cotangents):
        def attend(q, k, v, arrays):
            return pallas_fa.dot_product_attention(
                q, k, v, **keywords(arrays), implementation=implementation, return_residual=True
            )

        (out, lse), pullback = jax.vjp(attend, q, k, v, arrays)
        dq, dk, dv, d_arrays = pullback(cotangents)
        return {"out": out, "lse": lse, "query": dq, "key": dk, "value": dv, **d_arrays}

    return lambda *x: jax.tree.map(np.asarray, both(*x))


def normal(rng, *shape):
    return rng.standard_normal(shape, np.float32)


def inputs(rng, batch=B):
    q, k, v = normal(rng, batch, T, N, H), normal(rng, batch, S, K, H), normal(rng, batch, S, K, H)
    return q, k, v, (normal(rng, batch, T, N, H), normal(rng, batch, T, N))


# ---- empty rows -----------------------------------------------------------------------------------------------------

_EMPTY = {
    # name: (keyword arguments, which rows [B, N, T] are empty)
    "everything masked": ({"mask": np.zeros((1, 1), bool)}, np.ones((B, N, T), bool)),
    "row masked": ({"mask": (np.arange(T) != 3)[:, None]}, np.broadcast_to(np.arange(T) == 3, (B, N, T))),
    "head masked": (
        {"mask": (np.arange(N) != 1)[:, None, None]},
        np.broadcast_to((np.arange(N) == 1)[:, None], (B, N, T)),
    ),
    "no keys": (
        {"key_value_seq_lengths": np.array([0, 5])},
        np.broadcast_to(np.array([True, False])[:, None, None], (B, N, T)),
    ),
    "no queries": (
        {"query_seq_lengths": np.array([T, 0])},
        np.broadcast_to(np.array([False, True])[:, None, None], (B, N, T)),
    ),
    "window past the end": (
        {"local_window_size": (0, 0), "key_value_seq_lengths": np.array([30, S])},
        np.stack([np.broadcast_to(np.arange(T) >= 30, (N, T)), np.zeros((N, T), bool)]),
    ),
    "causal from before the start": ({"mask": masks.Causal(offset=-10)}, np.broadcast_to(np.arange(T) < 10, (B, N, T))),
    "no such segment": (
        {"query_segment_ids": np.full((B, T), 7), "key_value_segment_ids": np.zeros((B, S), int)},
        np.ones((B, N, T), bool),
    ),
}


@every_implementation
@pytest.mark.parametrize("name", _EMPTY)
def test_empty_rows_give_zero_and_minus_infinity_and_no_gradients(name, implementation, rng):
    keywords, empty = _EMPTY[name]
    q, k, v, cotangents = inputs(rng)
    arrays = {"bias": normal(rng, B, N, T, 1), "slopes": abs(normal(rng, N))}
    score = lambda a: {"score": scores.Alibi(a["slopes"]), "bias": a["bias"], "logits_soft_cap": 3.0, **keywords}
    run = runner(implementation, score)
    found = run(q, k, v, arrays, cotangents)
    empty = empty.swapaxes(1, 2)  # [B, T, N]
    assert (found["out"][empty] == 0).all()
    assert (found["lse"][empty] == -np.inf).all()
    assert (found["query"][empty] == 0).all()
    assert (found["bias"].swapaxes(1, 2)[empty] == 0).all()
    for name, x in found.items():
        assert not np.isnan(x).any(), name
    assert np.isfinite(found["lse"][~empty]).all() and (found["out"][~empty] != 0).all()

    # And nothing of these rows reaches the keys: other queries, cotangents and biases there change no gradient.
    there = empty[..., None]
    q, d_out = (np.where(there, 100 * x, x) for x in (q, cotangents[0]))
    again = run(q, k, v, arrays, (d_out, np.where(empty, np.float32(-50), cotangents[1])))
    for name, x in found.items():
        np.testing.assert_array_equal(again[name], x, name)


@every_implementation
def test_rows_past_the_query_length_are_zero(implementation, rng):
    q, k, v, _ = inputs(rng)
    for keywords in ({"query_seq_lengths": Q_LENGTHS}, {"mask": masks.Lengths(Q_LENGTHS)}):
        out = pallas_fa.dot_product_attention(q, k, v, **keywords, implementation=implementation)
        for i, length in enumerate(Q_LENGTHS):
            assert (out[i, length:] == 0).all() and (out[i, :length] != 0).all()


# ---- padding --------------------------------------------------------------------------------------------------------


def _given(how):
    """Keyword arguments that give the lengths."""
    per_head = lambda x: np.broadcast_to(x[:, None, None, None], (B, N, 1, 1))
    return {
        "keywords": {"query_seq_lengths": Q_LENGTHS, "key_value_seq_lengths": KV_LENGTHS},
        "mask": {"mask": masks.Lengths(Q_LENGTHS, KV_LENGTHS), "is_causal": True},
        "head lengths": {"mask": masks.Lengths(per_head(Q_LENGTHS), per_head(KV_LENGTHS)) & masks.Window(60, 20)},
        "bottom right": {
            "mask": masks.Causal("bottom_right"),
            "query_seq_lengths": Q_LENGTHS,
            "key_value_seq_lengths": KV_LENGTHS,
        },
    }[how]


def _keywords(how):
    def keywords(arrays):
        score = scores.Bias(arrays["row_bias"]).then(scores.Bias(arrays["key_bias"]))
        return {"bias": arrays["bias"], "logits_soft_cap": 4.0, "score": score, **_given(how)}

    return keywords


def _arrays(rng):
    return {"bias": normal(rng, B, N, T, S), "row_bias": normal(rng, B, 1, T, 1), "key_bias": normal(rng, B, N, 1, S)}


def _padding():
    """{name: where that array is padding}"""
    t, s = np.arange(T) >= Q_LENGTHS[:, None], np.arange(S) >= KV_LENGTHS[:, None]
    rows, keys = t[:, None, :, None], s[:, None, None, :]
    return {
        "query": t[..., None, None],
        "key": s[..., None, None],
        "value": s[..., None, None],
        "out": t[..., None, None],
        "lse": t[..., None],
        "bias": rows | keys,
        "row_bias": rows,
        "key_bias": keys,
    }


@every_implementation
@pytest.mark.parametrize("how", ("keywords", "mask", "head lengths", "bottom right"))
def test_padding_may_hold_anything(how, implementation, rng):
    """NaN and Inf in q, k, v, bias and cotangents: every result is bitwise what it was, padded gradients exactly 0."""
    q, k, v, cotangents = inputs(rng)
    arrays, padding = _arrays(rng), _padding()
    names = ("query", "key", "value", "out", "lse", *arrays)
    clean = dict(zip(names, (q, k, v, *cotangents, *arrays.values()), strict=True))
    run, results = runner(implementation, _keywords(how)), []
    for poison in (None, np.nan, np.inf, -np.inf):
        x = {name: a if poison is None else np.where(padding[name], np.float32(poison), a) for name, a in clean.items()}
        arguments = (x["query"], x["key"], x["value"], {name: x[name] for name in arrays}, (x["out"], x["lse"]))
        results.append(run(*arguments))
    for name, want in results[0].items():
        where = np.broadcast_to(padding[name], want.shape)
        assert (want[where] == (-np.inf if name == "lse" else 0)).all(), name
        assert np.abs(want[~where]).max() > 0, f"{name}: the test would see nothing"
        for other, poison in zip(results[1:], ("NaN", "Inf", "-Inf"), strict=True):
            np.testing.assert_array_equal(other[name], want, f"{name} with {poison} in the padding")


@every_implementation
def test_padding_may_hold_anything_in_second_derivatives(implementation, rng):
    q, k, v, (d_out, _) = inputs(rng, batch=B)
    padding = _padding()

    @jax.jit
    def second(q, k, v, d_out):
        def loss(q, k, v):
            out = pallas_fa.dot_product_attention(q, k, v, **_given("keywords"), implementation=implementation)
            return jnp.sum(jnp.where(padding["out"], 0, out) * d_out**2)

        squared = lambda *x: sum(jnp.sum(g**2) for g in jax.grad(loss, (0, 1, 2))(*x))
        return jax.grad(squared, (0, 1, 2))(q, k, v)

    names = ("query", "key", "value", "out")
    x = dict(zip(names, (q, k, v, d_out), strict=True))
    clean = second(*x.values())
    dirty = second(*(np.where(padding[n], np.nan if n != "out" else 0, a) for n, a in x.items()))
    for name, want, got in zip(names, clean, dirty, strict=False):
        np.testing.assert_array_equal(got, want, name)
        assert (np.asarray(got)[np.broadcast_to(padding[name], got.shape)] == 0).all()


@every_implementation
def test_padding_of_a_key_head_is_past_the_longest_of_its_group(implementation, rng):
    """Lengths per query head under grouped heads: the shorter heads' keys are still read by the longer ones."""
    q, k, v, cotangents = inputs(rng, batch=1)
    lengths = np.array([30, 50, 90, 10]).reshape(1, N, 1, 1)
    keywords = lambda a: {"mask": masks.Lengths(None, lengths)}
    run = runner(implementation, keywords)
    clean = run(q, k, v, {}, cotangents)
    for n in range(N):
        one = slice(n, n + 1)
        cut = lengths[0, n, 0, 0]
        alone = (q[:, :, one], k[:, :cut, [n // 2]], v[:, :cut, [n // 2]], {}, tuple(x[:, :, one] for x in cotangents))
        want = runner("reference", lambda a: {})(*alone)
        np.testing.assert_allclose(clean["out"][:, :, one], want["out"], atol=1e-5)
        np.testing.assert_allclose(clean["query"][:, :, one], want["query"], atol=1e-5)
    k[:, 50:, 0], v[:, 50:, 0] = np.nan, np.inf
    dirty = run(q, k, v, {}, cotangents)
    for name, want in clean.items():
        np.testing.assert_array_equal(dirty[name], want, name)
    assert (dirty["key"][:, 50:, 0] == 0).all() and (dirty["value"][:, 50:, 0] == 0).all()
