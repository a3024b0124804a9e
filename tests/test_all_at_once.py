"""The XLA path as it is on CPUs where logits are few: all of them at once. Its results, its rule, its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks
from pallas_fa.backends.xla import plan
from pallas_fa.problem import normalise
from tests.cases import TABLE
from tests.layers import representatives


@pytest.fixture
def any_size(monkeypatch):
    """All logits at once, however many."""
    monkeypatch.setattr(plan, "_FEW_LOGITS", 2**40)
    monkeypatch.setattr(plan, "_MANY_KEYS", 2**40)


def _problem(T, S, B=2, N=4, **keywords):
    q, k = jnp.zeros((B, T, N, 64)), jnp.zeros((B, S, N, 64))
    return normalise(q, k, k, **keywords)[0]


@pytest.mark.parametrize("case", sorted(representatives(TABLE), key=str), ids=str)
@pytest.mark.usefixtures("any_size", "quick_compilation")
def test_table(case, check):
    check(case, "xla", gradients=True)


@pytest.mark.parametrize("d_lse", [np.nan, np.inf])
def test_the_cotangent_of_the_log_sum_exp_may_be_anything_in_empty_rows(d_lse):
    x = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
    attend = functools.partial(
        pallas_fa.dot_product_attention, mask=masks.Causal(offset=-4), return_residual=True, implementation="xla"
    )
    cotangent = jnp.ones((1, 16, 2))
    d_lse = cotangent.at[:, :4].set(d_lse)
    have, want = (jax.vjp(attend, x, x, x)[1]((jnp.ones_like(x), d)) for d in (d_lse, cotangent.at[:, :4].set(0)))
    for a, b in zip(have, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("sinks", [None, np.zeros(2, np.float32)], ids=["no sinks", "sinks"])
def test_padding_touches_nothing_whatever_it_holds(sinks):
    lengths = {"query_seq_lengths": jnp.array([5, 16]), "key_value_seq_lengths": jnp.array([16, 9])}
    past = {name: jnp.arange(16) >= x[:, None] for name, x in lengths.items()}
    past_q, past_kv = (past[name][..., None, None] for name in lengths)
    draws = jax.random.normal(jax.random.key(0), (4, 2, 16, 2, 8))
    d_lse = jax.random.normal(jax.random.key(1), (2, 16, 2))

    @jax.jit
    def results(holds):
        q, k, v, d_out = (
            jnp.where(pad, holds, x) for x, pad in zip(draws, (past_q, past_kv, past_kv, past_q), strict=True)
        )
        attend = lambda *qkv: pallas_fa.dot_product_attention(
            *qkv, **lengths, is_causal=True, sinks=sinks, return_residual=True, implementation="xla"
        )
        (out, lse), pullback = jax.vjp(attend, q, k, v)
        return out, lse, *pullback((d_out, jnp.where(past_q[..., 0], holds, d_lse)))

    for with_nan, with_zero in zip(results(np.float32(np.nan)), results(np.float32(0)), strict=True):
        np.testing.assert_array_equal(with_nan, with_zero)
    for gradient, pad in zip(results(np.float32(np.nan))[2:], (past_q, past_kv, past_kv), strict=True):
        assert not np.any(np.where(pad, gradient, 0))


@pytest.mark.parametrize(
    ("problem", "forward", "backward"),
    [
        (_problem(1024, 1024), True, False),
        (_problem(1024, 1025), False, False),
        (_problem(512, 1024), True, True),
        (_problem(512, 1025), True, False),
        (_problem(512, 512, is_causal=True), True, False),
        (_problem(512, 513, is_causal=True), False, False),
        (_problem(256, 512, is_causal=True), True, True),
        (_problem(256, 513, is_causal=True), True, False),
        (_problem(512, 512, B=32, N=8), True, True),  # 256 MiB
        (_problem(512, 512, B=32, N=9), False, False),
        (_problem(128, 128, B=512, N=9), True, True),  # as many as in one chunk
        (_problem(16, 1023), True, True),
        (_problem(16, 1024), False, False),
    ],
    ids=lambda x: f"{x.dims.T}x{x.dims.S}x{x.dims.B * x.dims.N}" if hasattr(x, "dims") else "",
)
def test_rule(problem, forward, backward):
    assert (plan.all_at_once(problem), plan.all_at_once(problem, backward=True)) == (forward, backward)


def _told(B, T, S, N, **keywords):
    q, k = (jax.ShapeDtypeStruct((B, length, N, 8), jnp.float32) for length in (T, S))
    told = pallas_fa.explain(q, k, k, implementation="xla", **keywords)
    return next(line for line in told.splitlines() if line.startswith("xla: "))


def test_explain_says_which_logits_are_in_memory():
    assert "logits of 256 queries by 512 keys at a time, 8 MiB" in _told(2, 256, 512, 8, is_causal=True)
    chunks = (
        "logits of 512 queries by 512 keys at a time, 16 MiB, in the backward 128 queries by 128 keys at a time, 1 MiB"
    )
    assert chunks in _told(2, 512, 512, 8, is_causal=True)
    assert "logits of 128 queries by 128 keys at a time, 32 MiB" in _told(64, 512, 512, 8)


def _temporary_bytes(B, T, S, N):
    q, k = (jax.ShapeDtypeStruct((B, length, N, 8), jnp.float32) for length in (T, S))
    attend = lambda *qkv: pallas_fa.dot_product_attention(*qkv, implementation="xla", is_causal=True)
    gradients = jax.jit(lambda q, k, v, d_out: jax.vjp(attend, q, k, v)[1](d_out))
    return gradients.lower(q, k, k, q).compile().memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_the_rule():
    """Three arrays of all logits where these are few; past the bound less than one."""
    assert _temporary_bytes(2, 256, 512, 8) < 3.2 * 4 * 16 * 256 * 512
    assert _temporary_bytes(64, 512, 512, 8) < 0.5 * 4 * 512 * 512 * 512


@pytest.mark.parametrize("sinks", [None, np.zeros(2, np.float32)], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [0.25, 0.3, 3.0, -0.3, 0.0, 2.0**-60])
@pytest.mark.parametrize("size", [1.0, 2.0**40])
def test_whatever_the_scale_multiplies(size, scale, dtype, sinks):
    """Queries, differences of logits, or logits: by the scale and the dtype. Large logits are no NaN, and pick one value."""
    q, k, v, d_out = jax.random.normal(jax.random.key(0), (4, 2, 16, 2, 8)).astype(dtype)
    results = {}
    for implementation in ("xla", "reference"):
        attend = lambda *qkv, implementation=implementation: pallas_fa.dot_product_attention(
            *qkv, scale=scale, is_causal=True, sinks=sinks, return_residual=True, implementation=implementation
        )
        (out, lse), pullback = jax.vjp(attend, q * jnp.asarray(size, dtype), k, v)
        dq, dk, dv = pullback((d_out, jnp.ones_like(lse)))
        results[implementation] = out, lse, dv, *((dq, dk) if size == 1 else ())
    for have, want in zip(results["xla"], results["reference"], strict=True):
        largest = float(jnp.abs(want).max()) + 1e-30
        np.testing.assert_allclose(have / largest, want / largest, atol=1e-2 if dtype == "bfloat16" else 2e-5)
