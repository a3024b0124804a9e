"""The XLA path as it is on GPUs, whole rows of logits, run on the CPU: its results, its rule, its intervals, its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import masks
from pallas_fa.backends.xla import intervals_of_keys, plan
from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.context_parallel import ring_attention
from pallas_fa.masks.lengths import bind
from pallas_fa.operands.dims import Dims
from pallas_fa.problem import normalise
from tests.cases import TABLE, Case
from tests.layers import representatives


@pytest.fixture
def as_on_gpu(monkeypatch):
    """The rule of GPUs, whatever the platform."""
    monkeypatch.setattr(plan, "_on_gpu", lambda: True)


@pytest.fixture
def small_rows(as_on_gpu, monkeypatch):
    """Also chunks of 32 queries, the last ones overlapping, with intervals in multiples of 8 keys, chosen at run time."""
    monkeypatch.setattr(plan, "_LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(plan, "_SHORT_LOGITS_AT_ONCE", 1)
    monkeypatch.setattr(plan, "_FEW", 32)
    monkeypatch.setattr(intervals_of_keys, "_ALIGNMENT", 8)
    monkeypatch.setattr(intervals_of_keys, "_WORTH_A_CHOICE", 0)


@pytest.fixture
def few_heads(as_on_gpu, monkeypatch):
    """Also at least two chunks, of heads where that can be."""
    monkeypatch.setattr(plan, "_SHORT", 0)
    monkeypatch.setattr(plan, "_FEW", 1)
    monkeypatch.setattr(plan, "_FEWEST_CHUNKS", 2)


_CASES = pytest.mark.parametrize("case", sorted(representatives(TABLE), key=str), ids=str)


@_CASES
@pytest.mark.usefixtures("small_rows", "quick_compilation")
def test_table_in_chunks_of_rows(case, check):
    check(case, "xla", gradients=True)


@_CASES
@pytest.mark.usefixtures("as_on_gpu", "quick_compilation")
def test_table_with_all_rows_at_once(case, check):
    check(case, "xla", gradients=True)


@pytest.mark.parametrize(
    "case",
    [
        Case(64, 64),
        Case(113, 203, "dense_keys", "bias", dtype="bfloat16", N=6, K=2),
        Case(113, 203, "dense_keys", "bias", dtype="float16", N=6, K=3),  # three chunks: a loop, and its ends apart
        Case(64, 64, N=3, K=3),
        Case(113, 203, "dense_head_rows", "bias_head_rows", sinks="heads"),
        Case(113, 203, "dense_partial_batch", "bias_shared", dtype="float16", sinks="batch", batch=(2, 3)),
    ],
    ids=str,
)
@pytest.mark.usefixtures("few_heads", "quick_compilation")
def test_in_chunks_of_heads(case, check):
    inputs = case.inputs()
    assert plan.whole_rows(normalise(*inputs.qkv, **inputs.keywords(inputs.arrays))[0]).axis == 1
    check(case, "xla", gradients=True)


@pytest.mark.parametrize("rows", ["as_on_gpu", "few_heads", "small_rows"])
@pytest.mark.parametrize(("dtype", "d_lse"), [("float16", 65536.0), ("bfloat16", 3.4e38), ("float16", np.nan)])
def test_the_cotangent_of_the_log_sum_exp_may_be_anything_in_empty_rows(rows, dtype, d_lse, request):
    """Also what is finite, but not in the dtype of the matmuls."""
    request.getfixturevalue(rows)
    x = jax.random.normal(jax.random.key(0), (1, 64, 3, 8), dtype)
    mask = masks.Dense(jnp.ones((64, 64), jnp.bool_).at[1].set(False))
    attend = functools.partial(pallas_fa.dot_product_attention, mask=mask, return_residual=True, implementation="xla")
    cotangent = jnp.ones((1, 64, 3))
    pull_back = lambda d: jax.vjp(attend, x, x, x)[1]((jnp.ones_like(x), cotangent.at[:, 1].set(d)))
    for a, b in zip(pull_back(d_lse), pull_back(0), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("rows", ["as_on_gpu", "few_heads", "small_rows"])
def test_a_mask_may_answer_with_one_bool(rows, request):
    request.getfixturevalue(rows)
    x, everything = jax.random.normal(jax.random.key(0), (1, 64, 3, 8)), jnp.bool_(True)
    attend = functools.partial(pallas_fa.dot_product_attention, x, x, x)
    for mask in (
        masks.Custom(lambda b, n, t, s: everything),
        masks.Lengths(None, None),
        masks.Lengths() & masks.Lengths(),
    ):
        np.testing.assert_allclose(
            attend(mask=mask, implementation="xla"), attend(implementation="reference"), atol=1e-6
        )


@pytest.mark.parametrize("form", ["whole rows", "all at once"])
def test_a_ring_takes_probabilities_from_the_log_sum_exp_of_all_keys(form, request):
    """Those of a hop's keys alone would be too large in its backward."""
    if form == "whole rows":
        request.getfixturevalue("as_on_gpu")
    mesh = jax.make_mesh((2,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v, d_out = jax.random.normal(jax.random.key(0), (4, 1, 32, 2, 8))
    in_a_ring = functools.partial(ring_attention, axis_name="context", placement="contiguous", implementation="xla")
    specs = {"in_specs": P(None, "context"), "out_specs": P(None, "context")}
    have = jax.jit(lambda *qkv: jax.vjp(jax.shard_map(in_a_ring, mesh=mesh, **specs), *qkv)[1](d_out))(q, k, v)
    attend = functools.partial(pallas_fa.dot_product_attention, implementation="reference")
    for x, y in zip(have, jax.vjp(attend, q, k, v)[1](d_out), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


def _told(B, S, N, dtype=jnp.float32, **keywords):
    x = jax.ShapeDtypeStruct((B, S, N, 64), dtype)
    told = pallas_fa.explain(x, x, x, implementation="xla", **keywords)
    return next(line for line in told.splitlines() if line.startswith("xla: "))


@pytest.mark.parametrize(
    ("B", "S", "N", "words"),
    [
        (8, 1024, 16, "1024 queries by 1024 keys at a time, 512 MiB"),  # all at once
        (64, 1024, 16, "1024 queries by 1024 keys at a time, 4.1e+03 MiB"),  # likewise, where sequences are short
        (128, 1024, 16, "1024 queries by 1024 keys at a time, for 2 of 16 heads, 1.02e+03 MiB"),
        (2, 4096, 16, "4096 queries by 4096 keys at a time, for 2 of 16 heads, 256 MiB"),  # an eighth
        (2, 4096, 15, "4096 queries by 4096 keys at a time, for 1 of 15 heads, 128 MiB"),
        (2, 4096, 7, "512 queries by 4096 keys at a time, 112 MiB"),  # an eighth
        (1, 2**17, 16, "128 queries by 131072 keys at a time, 1.02e+03 MiB"),  # 512 bytes for each key and head
    ],
)
@pytest.mark.usefixtures("as_on_gpu")
def test_explain_says_which_logits_are_in_memory(B, S, N, words):
    assert words in _told(B, S, N)


@pytest.mark.usefixtures("as_on_gpu")
def test_positions_that_a_mask_rules_out_make_chunks_of_queries():
    assert "512 queries by 4096 keys at a time, 256 MiB" in _told(2, 4096, 16, is_causal=True)
    assert "128 queries by 1024 keys at a time, 1.02e+03 MiB" in _told(128, 1024, 16, is_causal=True)
    assert "256 queries by 2048 keys at a time, 512 MiB" in _told(16, 2048, 16, local_window_size=(256, 0))
    assert "2048 queries by 2048 keys at a time, 4.1e+03 MiB" in _told(16, 2048, 16, is_causal=True)
    assert "1024 queries by 1024 keys at a time, 4.1e+03 MiB" in _told(64, 1024, 16, local_window_size=(256, 0))


def test_other_platforms_chunk_keys_too():
    assert "512 queries by 512 keys at a time" in _told(2, 4096, 16)


@pytest.mark.usefixtures("as_on_gpu")
def test_memory_is_that_of_the_rule():
    """A fifth of what one array of all logits takes, which jax.nn has several of."""
    x = jax.ShapeDtypeStruct((1, 4096, 2, 64), jnp.float32)
    attend = lambda *qkv: pallas_fa.dot_product_attention(*qkv, implementation="xla", is_causal=True)
    gradients = jax.jit(lambda q, k, v, d_out: jax.vjp(attend, q, k, v)[1](d_out))
    temporary = gradients.lower(x, x, x, x).compile().memory_analysis().temp_size_in_bytes
    assert temporary < 0.6 * 4 * 2 * 4096**2


_MASKS = {
    "causal": (masks.Causal(), [1024, 2048, 3072, 4096]),
    "window": (masks.Causal() & masks.Window(1023, None), [1024, 1536]),
    "keys from 3000 after the query": (masks.Window(0, None, offset=3000), [1152, 128]),
}


@pytest.mark.parametrize("name", _MASKS)
def test_intervals_hold_all_that_a_mask_allows_in_few_widths(name):
    mask, widths = _MASKS[name]
    T = S = 4096
    bound = bind(mask, Dims((1,), T, S, 1))
    queries = Chunks(2, T, 512)
    groups = intervals_of_keys.groups(bound, queries, S)
    assert [group.keys[0].chunk for group in groups] == widths
    seen = {
        group.first + n: (int(start), group.keys[0].chunk)
        for group in groups
        for n, start in enumerate(group.starts[0])
    }
    for i in range(queries.count):
        lo, hi = bound.kv_range(i * 512, (i + 1) * 512)
        lo, hi = max(lo, 0), min(hi, S)
        if lo < hi:
            start, width = seen[i]
            assert 0 <= start <= lo and hi <= start + width <= S


def test_intervals_that_arrays_give_are_the_shortest_choice_that_holds_them():
    lengths = jnp.array([700, 2100])
    bound = bind(masks.Lengths(None, lengths), Dims((2,), 4096, 4096, 1))
    (group,) = intervals_of_keys.groups(bound, Chunks(2, 4096, 512), 4096)
    assert [keys.chunk for keys in group.keys] == [512, 1024, 2048, 4096]
    np.testing.assert_array_equal(group.choice, np.full(8, 3), "2100 keys, of the longest sequence")
