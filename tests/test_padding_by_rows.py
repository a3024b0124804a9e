"""The backward kernel for Hopper tests no element for sequence lengths: rows of zeros do for padding, whatever it holds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa import masks
from pallas_fa.backends.hopper.backward.choose import choose
from pallas_fa.backends.hopper.backward.plan import passes
from pallas_fa.backends.hopper.config import BackwardConfig, Config
from pallas_fa.problem import normalise
from tests.cases import Case
from tests.interpreted_backward import GPU, as_float32, interpreted, residuals_of, xla_gradients

BASE = Case(150, 203, dtype="bfloat16", N=2, K=2, H=64, Hv=64, batch=(2,))
Q_LENGTHS, KV_LENGTHS = np.array([61, 150]), np.array([0, 133])
BOTH = {"query_seq_lengths": Q_LENGTHS, "key_value_seq_lengths": KV_LENGTHS}
PER_HEAD = (np.array([[0, 150], [130, 7]])[..., None, None], np.array([[203, 1], [128, 150]])[..., None, None])


def config(*tiles, **options):
    return {"config": Config(backward=BackwardConfig(*tiles, **options))}


CASES = {
    "both": (BASE, BOTH),
    "keys": (BASE, {"key_value_seq_lengths": KV_LENGTHS}),
    "queries, keys to the end": (BASE, {"query_seq_lengths": Q_LENGTHS}),
    "grouped heads, H=128": (dataclasses.replace(BASE, N=4, H=128, Hv=128), BOTH),
    "keys, a warpgroup without any": (
        dataclasses.replace(BASE, H=128, Hv=128),
        {"key_value_seq_lengths": np.array([150, 64])},
    ),
    "per head": (BASE, {"mask": masks.Lengths(*PER_HEAD)}),
    "causal": (BASE, BOTH | {"mask": masks.Causal("bottom_right")}),
    "window": (BASE, BOTH | {"mask": masks.Window(40, 20)}),
    "segments": (
        BASE,
        BOTH | {"mask": masks.Segments(*(np.arange(n, dtype=np.int32)[None].repeat(2, 0) // 80 for n in (150, 203)))},
    ),
    "statistics first": (BASE, BOTH | config(2, 128)),
    "several blocks": (BASE, BOTH | config(2, 128, (1, 1), 1, persistent_ctas=3, statistics_last=True)),
    "blocks start at tiles of their own": (BASE, BOTH | config(1, 64, stagger=1)),
    "dropout": (BASE, BOTH | {"dropout_rate": 0.3, "dropout_key": jax.random.key(3)}),
    "deterministic": (BASE, BOTH | {"deterministic_gradients": True}),
    "sinks of large logits": (BASE, BOTH | {"sinks": np.array([-300.0, 5.0], np.float32)}),
    "float16": (dataclasses.replace(BASE, dtype="float16"), BOTH),
    "float32": (dataclasses.replace(BASE, dtype="float32", N=1, K=1), BOTH),
}


def lengths_of(keywords, batch):
    """Lengths [*B, N|1] of queries and of keys."""
    if "mask" in keywords and isinstance(keywords["mask"], masks.Lengths):
        return PER_HEAD[0][..., 0, 0], PER_HEAD[1][..., 0, 0]
    sizes = dict(query_seq_lengths=BASE.T, key_value_seq_lengths=BASE.S)
    return tuple(np.broadcast_to(keywords.get(name, size), (batch,))[:, None] for name, size in sizes.items())


def is_padding(x, lengths):
    """[B, positions, heads] like x, [B, positions, heads, ...]."""
    found = np.arange(x.shape[1])[None, :, None] >= lengths[:, None, :]
    return np.broadcast_to(found, x.shape[:3]).reshape(*x.shape[:3], *(1,) * (x.ndim - 3))


@pytest.mark.parametrize("name", CASES)
def test_padding_of_nan_changes_nothing_and_gets_zeros(name):
    case, keywords = CASES[name]
    inputs = case.inputs()
    lengths = lengths_of(keywords, case.batch[0])
    of_each = (lengths[0], lengths[1], lengths[1])
    problem, operands = normalise(*inputs.qkv, **keywords)
    assert all(choose(problem, kind, GPU).padding.by_rows == kind.keys_stationary for kind in passes(problem))
    out, lse, d_out, d_lse = residuals_of(case, problem, operands)
    poison = lambda x, n: jnp.where(is_padding(x, n), jnp.nan, x).astype(x.dtype)
    q, k, v = (poison(jnp.asarray(x), n) for x, n in zip(inputs.qkv, of_each, strict=True))
    _, poisoned = normalise(q, k, v, **keywords)
    d_out_nan, d_lse_nan = poison(d_out, lengths[0]), poison(d_lse, lengths[0])
    ours, races = interpreted(problem, poisoned, out, lse, d_out_nan, d_lse_nan)
    assert not races
    exact = dataclasses.replace(problem, dtype=np.dtype(np.float32), precision=jax.lax.Precision.HIGHEST, config=None)
    truth = xla_gradients(exact, as_float32(operands), *as_float32((out, lse, d_out, d_lse)))
    for x, true, n in zip(ours[:3], truth[:3], of_each, strict=True):
        x, true = np.asarray(x, np.float32), np.asarray(true, np.float32)
        assert not np.where(is_padding(x, n), x, 0).any()
        assert np.linalg.norm(x - true) / np.linalg.norm(true) < 4e-3


def test_lengths_that_no_row_of_zeros_can_stand_for_are_tested():
    """Query heads that share keys but not their lengths; logits that a score makes of zeros."""
    case = dataclasses.replace(BASE, K=1)
    for keywords in ({"mask": masks.Lengths(*PER_HEAD)}, BOTH | {"logits_soft_cap": 3.0}):
        problem, _ = normalise(*case.inputs().qkv, **keywords)
        padding = choose(problem, passes(problem)[0], GPU).padding
        assert padding.behind_mask
        assert not padding.by_rows


@pytest.mark.parametrize("options", [{}, {"statistics_last": True}], ids=["first", "last"])
def test_padded_keys_are_harmless_where_all_logits_are_very_negative(options, rng):
    """Keys of zeros have the largest logits there: exp(0 - lse) is infinite."""
    T, length = 100, 70
    q = jnp.asarray(8 + 0.01 * rng.standard_normal((1, T, 1, 64)), jnp.bfloat16)
    k = -q
    assert float(q[0, 0, 0] @ k[0, 0, 0]) / 8 < -500
    v, d_out = (jnp.asarray(rng.standard_normal((1, T, 1, 64)), jnp.bfloat16) for _ in range(2))
    keywords = {"key_value_seq_lengths": np.array([length])} | config(2, 128, **options)
    problem, operands = normalise(q, k, v, **keywords)
    assert choose(problem, passes(problem)[0], GPU).statistics_last == bool(options)
    case = Case(T, T, dtype="bfloat16", N=1, K=1, H=64, Hv=64, batch=(1,))
    out, lse, _, d_lse = residuals_of(case, problem, operands)
    residuals = operands, out, lse, d_out, d_lse
    ours, races = interpreted(problem, *residuals)
    assert not races
    for x, true in zip(ours, xla_gradients(problem, *residuals), strict=True):
        x, true = np.asarray(x, np.float32), np.asarray(true, np.float32)
        assert np.isfinite(x).all()
        assert np.linalg.norm(x - true) / np.linalg.norm(true) < 2e-2
