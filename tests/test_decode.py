"""Few queries: the kernel on rows of grouped heads with split keys, interpreted, and lowered for CUDA."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa import dot_product_attention, explain, masks, scores
from pallas_fa.backends import reference
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.stream_k import StreamK
from pallas_fa.backends.hopper.config import Config, ForwardConfig
from pallas_fa.backends.hopper.decode import choose
from pallas_fa.backends.hopper.decode.decode import decode
from pallas_fa.problem import normalise
from tests.lowering import kernels
from tests.test_kernel_interpreted import interpreted

RNG = np.random.default_rng(0)
B, S, N, K, H = 2, 330, 4, 2, 64
LENGTHS = np.array([70, 330], np.int32)
BOTTOM_RIGHT = masks.Causal(align="bottom_right")


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.bfloat16)


def inputs(T, N=N, K=K, H=H, Hv=H, S=S):
    return normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, Hv)


# (queries, keywords)
CALLS = {
    "one query": (1, {}),
    "lengths": (1, {"key_value_seq_lengths": LENGTHS}),
    "no keys": (1, {"key_value_seq_lengths": np.array([0, 1], np.int32)}),
    "one part": (1, {"key_value_seq_lengths": LENGTHS, "config": Config(ForwardConfig(1, 64))}),
    "window": (3, {"mask": BOTTOM_RIGHT & masks.Window(65, None, S - 3)}),
    "drafts": (5, {"mask": BOTTOM_RIGHT, "key_value_seq_lengths": LENGTHS}),
    "padded queries": (3, {"query_seq_lengths": np.array([1, 2], np.int32)}),
    "by head": (
        2,
        {
            "bias": RNG.standard_normal((N, 1, S)).astype(np.float32),
            "score": scores.SoftCap(20.0).then(scores.Alibi(np.linspace(0.01, 0.1, N, dtype=np.float32))),
            "mask": masks.Custom(lambda b, n, t, s, far: (s < 200) | (far & (n != 1)), np.array([[[True]], [[False]]] * 2)),
        },
    ),
    "relative bias": (3, {"score": scores.RelativeBias(RNG.standard_normal((N, S + 2)).astype(np.float32))}),
    "sinks": (1, {"sinks": RNG.standard_normal((B, N)).astype(np.float32), "key_value_seq_lengths": LENGTHS}),
    "lengths by head": (1, {"mask": masks.Lengths(None, RNG.integers(0, S, (B, N, 1, 1)).astype(np.int32))}),
}  # fmt: skip


# The config of a call: None for the library's choice. `STREAM_K` has more CTAs than units in some calls, fewer in others.
STREAM_K = Config(ForwardConfig(1, 64, pin_softmax=False, stream_k=5))
FORMS = [(name, None) for name in CALLS] + [(name, STREAM_K) for name in CALLS if name != "one part"]
FORM_IDS = [f"{name}{', stream-K' * bool(x)}" for name, x in FORMS]


@pytest.mark.parametrize(("name", "config"), FORMS, ids=FORM_IDS)
def test_interpreted_kernel_is_right_and_free_of_races(name, config):
    T, keywords = CALLS[name]
    keywords = keywords if config is None else keywords | {"config": config}
    problem, operands = normalise(*inputs(T), **keywords)
    assert choose.applies(problem)
    (out, lse), races = interpreted(problem, operands, decode)
    assert not races
    true_out, true_lse = (np.asarray(x, np.float32) for x in reference.attention(problem, operands))
    np.testing.assert_allclose(np.asarray(out, np.float32), true_out, rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("K", [2, N])
def test_the_other_layout(K):
    q, k, v = inputs(3, K=K)
    keywords = {"mask": BOTTOM_RIGHT, "sinks": jnp.zeros(N)}
    (out, lse), _ = interpreted(*normalise(q, k, v, **keywords), decode)
    transposed = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    (other, other_lse), races = interpreted(*normalise(*transposed, layout="BNTH", **keywords), decode)
    assert not races
    np.testing.assert_array_equal(np.asarray(jnp.swapaxes(other, 1, 2), np.float32), np.asarray(out, np.float32))
    np.testing.assert_allclose(other_lse, lse, rtol=1e-6)


def test_padding_may_hold_nan():
    q, k, v = inputs(2)
    padded = [x.at[0, LENGTHS[0] :].set(jnp.nan) for x in (k, v)]
    (out, lse), _ = interpreted(*normalise(q, *padded, key_value_seq_lengths=LENGTHS), decode)
    (true_out, true_lse), _ = interpreted(*normalise(q, k, v, key_value_seq_lengths=LENGTHS), decode)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(true_out, np.float32))
    np.testing.assert_array_equal(lse, true_lse)


def test_keys_are_split_until_the_gpu_is_full():
    def splits(batch, length):
        shape = jax.ShapeDtypeStruct
        q, k = shape((batch, 1, 32, 128), jnp.bfloat16), shape((batch, length, 8, 128), jnp.bfloat16)
        found = []

        def see(q, k):
            problem, _ = normalise(q, k, k)
            found.append(choose.choose(problem, Gpu.visible()).config.kv_splits)

        jax.eval_shape(see, q, k)
        return found[0]

    assert splits(1, 65536) >= 16
    assert splits(512, 8192) == 1
    assert splits(1, 64) == 1


@pytest.mark.parametrize("ctas", [1, 3, 132])
@pytest.mark.parametrize("units", [1, 7, 40])
def test_stream_k_shares_every_visit_once(units, ctas):
    counts = np.where(RNG.random(units) < 0.5, 1, RNG.integers(1, 30, units))
    stream_k = StreamK(ctas, units, None)
    starts = stream_k.table(counts)
    found, seen = [[] for _ in counts], [[] for _ in counts]
    for cta, ((unit, first), end) in enumerate(itertools.pairwise(map(tuple, starts))):
        while (unit, first) < end:  # as `for_segments` does
            last = end[1] if unit == end[0] else counts[unit]
            whole = first == 0 and last == counts[unit]
            found[unit].append(unit if whole else units + 2 * cta + (first == 0))
            seen[unit] += range(first, last)
            unit, first = unit + 1, 0
    assert [sorted(x) for x in seen] == [list(range(count)) for count in counts]
    assert len(set(sum(found, []))) == len(sum(found, [])) and max(sum(found, [])) < stream_k.entries
    most = stream_k.most_results(30, 1)
    assert max(map(len, found)) <= most
    for given in (counts, jnp.asarray(counts)):  # known while tracing, and not
        table = stream_k.table(given)
        np.testing.assert_array_equal(table, starts)
        entries, is_another = map(np.asarray, stream_k.contributions(table, most))
        assert [list(x[flags]) for x, flags in zip(entries, is_another, strict=True)] == found


def test_more_queries_do_not_split_keys():
    with pytest.raises(NotImplementedError, match="T=17 is more than 16 queries"):
        dot_product_attention(*inputs(17), implementation="mosaic_gpu", config=STREAM_K)


def test_stream_k_is_taken_where_the_config_says_so():
    assert "mosaic_gpu: runs this call" in explain(*inputs(1), config=STREAM_K)


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize(("name", "config"), FORMS, ids=FORM_IDS)
def test_the_compiled_kernel_is_accurate(name, config, H):
    """At most twice the error of xla, and one rounding, against the same in float32; and the same twice."""
    T, keywords = CALLS[name]
    q, k, v = inputs(T, H=H)

    def call(implementation, dtype):
        arrays = (x.astype(dtype) for x in (q, k, v))
        call = {"implementation": implementation, "return_residual": True} | keywords
        call |= {"config": config} if implementation == "mosaic_gpu" else {}
        fn = jax.jit(lambda *x: dot_product_attention(*x, **call))
        return [np.asarray(x, np.float64) for x in fn(*arrays)]

    keywords = {name: x for name, x in keywords.items() if name != "config"}
    truth, xla = call("reference", jnp.float32), call("xla", jnp.bfloat16)
    ours, again = call("mosaic_gpu", jnp.bfloat16), call("mosaic_gpu", jnp.bfloat16)
    for want, theirs, got, same in zip(truth, xla, ours, again, strict=True):
        np.testing.assert_array_equal(got, same)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        got, want, theirs = (x[np.isfinite(want)] for x in (got, want, theirs))
        if want.size:
            assert abs(got - want).max() <= 2 * abs(theirs - want).max() + 2.0**-8 * abs(want).max()


@pytest.mark.parametrize("config", [None, STREAM_K], ids=["parts", "stream-K"])
@pytest.mark.parametrize("T", [1, 16])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_lowers(T, H, config):
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(T, 8, 2, H, S=5000))

    def fn(q, k, v, lengths):
        return dot_product_attention(
            q, k, v, mask=BOTTOM_RIGHT, key_value_seq_lengths=lengths, implementation="mosaic_gpu", config=config
        )

    assert kernels(fn, q, k, v, jax.ShapeDtypeStruct((B,), jnp.int32)) == 1
