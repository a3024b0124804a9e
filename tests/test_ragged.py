"""Queries of many sequences behind one another, each against its own dense attention, and against JAX's definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_fa import masks, ragged_paged_attention
from pallas_fa.backends.hopper.decode.decode import decode
from pallas_fa.backends.mma.decode.decode import decode as decode_by_mma
from pallas_fa.cache.ragged_blocks import Blocks
from pallas_fa.operands.pages import Paged
from pallas_fa.problem import normalise
from tests.lowering import kernels
from tests.test_kernel_interpreted import assert_right_and_free_of_races
from tests.test_sharding import mesh_of

PAGE, N, K, H, TOKENS, SEQUENCES = 16, 4, 2, 16, 70, 7
NOTHING = 99999  # in the places of sequences that are not there


def arguments(rng, lengths, dtype=np.float32, tokens=TOKENS, pages=40):
    """The positional arguments for sequences of (queries, keys), in a batch with room for more."""
    q_lens, kv_lens = np.full(SEQUENCES, NOTHING), np.full(SEQUENCES, NOTHING)
    for i, (queries, keys) in enumerate(lengths):
        q_lens[i], kv_lens[i] = queries, keys
    table = np.full((SEQUENCES, pages // 5), -1)
    unused = iter(rng.permutation(pages))
    for row, (_, keys) in zip(table, lengths, strict=False):
        count = -(-keys // PAGE)
        row[:count] = [next(unused) for _ in range(count)]
    used = np.zeros((pages, PAGE, 1, 1), bool)
    for row, (_, keys) in zip(table, lengths, strict=False):
        for s in range(keys):
            used[row[s // PAGE], s % PAGE] = True
    kv = np.where(used, rng.standard_normal((pages, PAGE, 2 * K, H)), np.nan)
    q = rng.standard_normal((tokens, N, H))
    q[sum(queries for queries, _ in lengths) :] = np.nan  # tokens of no sequence
    ints = kv_lens, table, np.concatenate([[0], np.cumsum(q_lens)]), np.array([len(lengths)])
    return *(jnp.asarray(x, dtype) for x in (q, kv)), *(jnp.asarray(x, jnp.int32) for x in ints)


BATCHES = {
    "decoding": [(1, 64), (1, 9), (1, 128), (1, 1), (1, 17)],
    "prefill": [(37, 37), (16, 16), (17, 17)],
    "both": [(1, 64), (37, 37), (1, 9), (16, 100), (5, 128)],
    "none between": [(3, 9), (0, 20), (40, 41)],
    "full": [(10, 20)] * SEQUENCES,
    "nothing": [],
}
EVERYTHING = dict(sm_scale=0.25, sliding_window=7, soft_cap=3.0, k_scale=0.5, v_scale=2.0)


# Compiled once for all batches, as in a server.
PLAIN, WITH_EVERYTHING = (
    jax.jit(functools.partial(ragged_paged_attention, **keywords)) for keywords in ({}, EVERYTHING)
)


def dense(q, pages, table, keys, scale=1.0, window=NOTHING, cap=None, factor=1.0):
    """One sequence in float64."""
    rows = np.asarray(pages, np.float64)[table[: -(-keys // PAGE)]].reshape(-1, K, 2, H)[:keys].repeat(N // K, axis=1)
    x = scale * np.einsum("tnh,snh->nts", np.asarray(q, np.float64), rows[:, :, 0])
    x = x if cap is None else cap * np.tanh(x / cap)
    behind = np.arange(keys - len(q), keys)[:, None] - np.arange(keys)
    p = np.exp(np.where((behind >= 0) & (behind < window), x, -np.inf))
    return factor * np.einsum("nts,snh->tnh", p / p.sum(axis=-1, keepdims=True), rows[:, :, 1])


# Of which some queries are in blocks of 128.
LONG_BATCHES = {
    "prompts": [(128, 128), (257, 260), (15, 15)],
    "a prompt among others": [(1, 64), (1, 9), (400, 520), (1, 77), (3, 3)],
    "one block": [(0, 0), (127, 127), (128, 300), (127, 400)],
    "short prompts": [(100, 100)] * 4,
    "all full": [(128, 300)] * 4,
}


@pytest.mark.parametrize("name", [*BATCHES, *LONG_BATCHES])
def test_is_dense_attention_of_each_sequence(name, rng):
    long = dict(tokens=512, pages=180) if name in LONG_BATCHES else {}
    batch = (BATCHES | LONG_BATCHES)[name]
    q, pages, _, table, *_ = given = arguments(rng, batch, **long)
    got, modified = PLAIN(*given), WITH_EVERYTHING(*given)
    start = 0
    for i, (queries, keys) in enumerate(batch):
        own = slice(start, start + queries)
        np.testing.assert_allclose(got[own], dense(q[own], pages, table[i], keys), atol=1e-5)
        want = dense(q[own], pages, table[i], keys, scale=0.125, window=7, cap=3.0, factor=2.0)
        np.testing.assert_allclose(modified[own], want, atol=1e-5)
        start += queries
    assert got.shape == q.shape and not got[start:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [jnp.bfloat16, jnp.float8_e4m3fn])
@pytest.mark.parametrize("name", [*BATCHES, *LONG_BATCHES])
def test_compiled_kernels_are_accurate(name, kv_dtype, rng):
    batch = (BATCHES | LONG_BATCHES)[name]
    q, pages, _, table, *_ = given = arguments(rng, batch, jnp.bfloat16, tokens=512, pages=180)
    pages = pages.astype(kv_dtype)
    got = jax.jit(functools.partial(ragged_paged_attention, implementation="mosaic_gpu"))(q, pages, *given[2:])
    start = 0
    for i, (queries, keys) in enumerate(batch):
        own = slice(start, start + queries)
        np.testing.assert_allclose(np.asarray(got[own], np.float64), dense(q[own], pages, table[i], keys), atol=3e-2)
        start += queries
    assert not got[start:].any()


@pytest.mark.parametrize(("heads", "blocks"), [(N, 8), (6, 5), (64, 1)])
def test_rows_of_blocks_of_8_bits_are_few(heads, blocks, rng, monkeypatch):
    """Of queries times heads of a key head: 16 at most, or one query."""
    sizes = []
    of = Blocks.of
    monkeypatch.setattr(Blocks, "of", lambda x, size, *rest: sizes.append(size) or of(x, size, *rest))
    q, pages, *rest = arguments(rng, LONG_BATCHES["one block"], tokens=512, pages=180)
    q, narrow = jnp.tile(q, (1, heads // 2, 1))[:, :heads], jnp.nan_to_num(pages).astype(jnp.float8_e4m3fn)
    got = ragged_paged_attention(q, narrow, *rest)
    assert sizes == [128, blocks]
    own = slice(0, 127)
    want = ragged_paged_attention(q, narrow.astype(q.dtype), *rest)
    np.testing.assert_allclose(got[own], want[own], atol=2e-6)


def test_nan_in_queries_does_not_reach_other_sequences(rng):
    """Not their gradients, either, which `reference` has."""
    q, pages, *rest = arguments(rng, [(5, 20), (7, 30)])
    q, pages = q.at[:5].set(jnp.nan), jnp.nan_to_num(pages)
    second = lambda q, pages: ragged_paged_attention(q, pages, *rest, implementation="reference")[5:12].sum()
    for gradient, own in zip(jax.grad(second, argnums=(0, 1))(q, pages), (slice(5, 12), rest[1][1, :2]), strict=True):
        assert jnp.isfinite(gradient[own]).all() and gradient[own].any()


def test_is_what_jax_defines(rng):
    given = arguments(rng, BATCHES["both"])
    without_nan = jnp.nan_to_num(given[1])  # which that definition reads
    want = ref_ragged_paged_attention(given[0], without_nan, *given[2:], **EVERYTHING)
    np.testing.assert_allclose(WITH_EVERYTHING(*given)[: len(want)], want, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_scales_keep_their_digits_and_range(dtype, rng):
    """Numbers of Python and arrays of 16 bits alike: none is rounded to the dtype of the queries, nor is a product."""
    q, pages, *rest = arguments(rng, BATCHES["both"], dtype)
    attend = jax.jit(ragged_paged_attention)
    plain = attend(q, pages / 2**12, *rest)
    for factor in (1.0029, 1e5, np.float64(1e-7)):
        got = attend(q, pages / 2**12, *rest, v_scale=factor)
        want = (np.asarray(plain, np.float32) * np.float32(factor)).astype(dtype)
        np.testing.assert_array_equal(got, want)
        assert got.dtype == dtype and jnp.isfinite(got).all()
    # 1.0078125 has the bits of both dtypes, and its square has not.
    factor = 1.0078125
    want = attend(q, pages, *rest, sm_scale=factor * factor)
    got = attend(q, pages, *rest, sm_scale=jnp.asarray(factor, dtype), k_scale=jnp.asarray(factor, dtype))
    np.testing.assert_array_equal(got, want)
    large = jnp.asarray(2.0**9, dtype)
    assert jnp.isfinite(attend(q / 2**9, pages / 2**9, *rest, sm_scale=large, k_scale=large)).all()


@pytest.mark.parametrize("size", [1, 64, 200])
def test_blocks_of_any_size(size, rng):
    given = arguments(rng, BATCHES["both"])
    options = dict(num_queries_per_block=size, mask_value=-1e30, vmem_limit_bytes=1)
    got = jax.jit(functools.partial(ragged_paged_attention, **options))(*given)
    np.testing.assert_allclose(got, PLAIN(*given), atol=2e-6)


def test_keys_and_values_are_not_copied():
    shape, int32 = jax.ShapeDtypeStruct, jnp.int32
    pages, sequences = shape((32768, 16, 2 * 8, 128), jnp.bfloat16), 8
    given = shape((64, 32, 128), jnp.bfloat16), pages, shape((sequences,), int32), shape((sequences, 512), int32)
    rest = shape((sequences + 1,), int32), shape((1,), int32)
    analysis = jax.jit(ragged_paged_attention).lower(*given, *rest).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 2 * pages.size / 4
    on_gpu = lambda *x: ragged_paged_attention(*x, implementation="mosaic_gpu")
    assert kernels(on_gpu, *given, *rest) == 1
    assert kernels(on_gpu, shape((200, 32, 128), jnp.bfloat16), *given[1:], *rest) == 2  # long blocks, and short ones


@pytest.mark.parametrize("decode", [decode, decode_by_mma])
def test_interpreted_kernel_finds_keys_and_values_between_each_other(decode, rng):
    q, pages, _, table, *_ = arguments(rng, [(2, 60), (2, 128)], jnp.bfloat16)
    lengths = jnp.array([60, 128])
    keys, values = (Paged(pages, table[:2], interleaved=i) for i in (0, 1))
    mask = masks.Causal(align="bottom_right")
    problem, operands = normalise(q[:4].reshape(2, 2, N, H), keys, values, mask=mask, key_value_seq_lengths=lengths)
    assert_right_and_free_of_races(problem, operands, decode)


def test_heads_over_explicit_axes(rng):
    q, pages, *rest = arguments(rng, BATCHES["both"])
    mesh = mesh_of(AxisType.Explicit, data=1, model=2)
    sharded = (jax.device_put(x, NamedSharding(mesh, P(*[None] * (x.ndim - 2), "model", None))) for x in (q, pages))
    out = jax.jit(ragged_paged_attention)(*sharded, *rest)
    assert out.sharding.spec == P(None, "model", None)
    np.testing.assert_allclose(out, PLAIN(q, pages, *rest), atol=2e-6)


WRONG = {
    "q": (0, np.zeros((70, 4), np.float32), r"q.shape=\(70, 4\).*must be \[tokens, N, H\]"),
    "head dims": (0, np.zeros((70, 4, 8), np.float32), "the head dims H=8 and 16 must be equal"),
    "no pages": (1, np.zeros((0, 16, 4, 16), np.float32), r"kv_pages.shape=\(0, 16, 4, 16\) has a dim of 0"),
    "no columns": (3, np.zeros((7, 0), np.int32), r"page_indices.shape=\(7, 0\) must be .*each at least 1"),
    "odd heads": (1, np.zeros((40, 16, 3, 16), np.float32), "keys in the even heads"),
    "dtypes": (1, np.zeros((40, 16, 4, 16), np.float16), "kv_pages.dtype=float16.*nothing is converted silently"),
    "heads": (0, np.zeros((70, 3, 16), np.float32), r"N=3 must be a multiple of that of key heads K=2"),
    "kv_lens": (2, np.zeros(3, np.int32), r"kv_lens.shape=\(3,\) must be \(7,\)"),
    "float table": (3, np.zeros((7, 8), np.float32), "page_indices.dtype=float32 must be an integer"),
    "table": (3, np.zeros(7, np.int32), r"page_indices.shape=\(7,\) must be \[max sequences"),
    "cu_q_lens": (4, np.zeros(7, np.int32), r"cu_q_lens.shape=\(7,\) must be \(8,\)"),
    "num_seqs": (5, np.int32(3), r"num_seqs.shape=\(\) must be \(1,\): how many.*jnp.reshape\(num_seqs, \(1,\)\)"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arrays(name, rng):
    place, array, message = WRONG[name]
    given = list(arguments(rng, BATCHES["both"]))
    given[place] = array
    with pytest.raises((ValueError, TypeError), match=message):
        jax.eval_shape(ragged_paged_attention, *given)


def test_values_of_numpy_that_contradict_each_other(rng):
    """What is not known while tracing is not checked; nor is what `num_seqs` says is not there."""
    q, pages, *ints = arguments(rng, BATCHES["both"])
    ints = [np.array(x) for x in ints]
    jax.eval_shape(lambda q, pages: ragged_paged_attention(q, pages, *ints), q, pages)
    for place, wrong, message in (
        (3, [8], r"num_seqs=\[8\] must be from 0 to 7"),
        (3, [-1], r"num_seqs=\[-1\] must be from 0 to 7"),
        (2, [0, 5, 3, 8, 8, 8, 8, 8], "cu_q_lens=.* from 0 to 70, the tokens of q, and never fall"),
        (2, [0, 1, 2, 3, 4, 71, 71, 71], "cu_q_lens=.* from 0 to 70, the tokens of q"),
        (2, [-1, 1, 2, 3, 4, 5, 5, 5], "cu_q_lens=.* from 0 to 70, the tokens of q"),
        (0, [64, 36, 9, 100, 128, 0, 0], r"kv_lens\[1\]=36 is less than the 37 queries"),
    ):
        given = [np.array(wrong) if i == place else x for i, x in enumerate(ints)]
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda q, pages, given=given: ragged_paged_attention(q, pages, *given), q, pages)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float8_e4m3fn])
def test_no_query_heads(dtype, rng):
    q, pages, *rest = arguments(rng, BATCHES["both"])
    assert ragged_paged_attention(q[:, :0], pages.astype(dtype), *rest).shape == (len(q), 0, q.shape[2])


def test_wrong_numbers(rng):
    given = arguments(rng, BATCHES["both"])
    for wrong in (dict(sliding_window=0), dict(num_queries_per_block=0)):
        with pytest.raises(ValueError, match="must be an int of at least 1"):
            ragged_paged_attention(*given, **wrong)
    with pytest.raises(ValueError, match="^sliding_window=.* must be an int, known while tracing.*static_argnames"):
        jax.eval_shape(lambda window: ragged_paged_attention(*given, sliding_window=window), 5)
    for wrong in (dict(sm_scale=None), dict(k_scale="2"), dict(v_scale=jnp.ones((2, 1, 1, 1)))):
        with pytest.raises(TypeError, match=f"(?s)^{next(iter(wrong))}=.* must be a number"):
            ragged_paged_attention(*given, **wrong)
    for message, wrong in {
        "k_scale=inf must be finite": dict(k_scale=float("inf")),
        r"v_scale=1e\+300 must be finite in float32": dict(v_scale=1e300),
        r"sm_scale \* k_scale=1.0*1e\+60 must be finite": dict(sm_scale=1e30, k_scale=1e30),
        "soft_cap=1e-50 must be positive, and from": dict(soft_cap=1e-50),
        "soft_cap=0 must be positive, .* Use None": dict(soft_cap=0),
    }.items():
        with pytest.raises(ValueError, match=f"^{message}"):
            ragged_paged_attention(*given, **wrong)


def test_no_tokens(rng):
    q, *rest = arguments(rng, BATCHES["both"])
    assert ragged_paged_attention(q[:0], *rest).shape == (0, *q.shape[1:])
