"""Few queries: the kernel on rows of grouped heads with split keys, interpreted, and lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa import dot_product_attention, explain, masks, scores
from pallas_fa.backends.gpu import few_queries
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.config import Config, ForwardConfig
from pallas_fa.backends.hopper.decode import choose
from pallas_fa.backends.hopper.decode.decode import decode
from pallas_fa.problem import normalise
from tests.lowering import kernels
from tests.test_kernel_interpreted import assert_right_and_free_of_races, interpreted

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
    "window of lengths": (
        3,
        {"mask": BOTTOM_RIGHT & masks.Window(65, None, LENGTHS - 3), "key_value_seq_lengths": LENGTHS},
    ),
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
# With more than few queries, whose heads are rows of a tile all the same.
MORE = {
    "20 queries": (20, {"mask": BOTTOM_RIGHT, "key_value_seq_lengths": LENGTHS}),
    "17 queries, a window and sinks": (
        17,
        {"mask": BOTTOM_RIGHT & masks.Window(65, None, S - 17), "sinks": RNG.standard_normal(N).astype(np.float32)},
    ),
    "18 queries, a soft cap, some padded": (
        18,
        {"logits_soft_cap": 20.0, "query_seq_lengths": np.array([18, 5], np.int32)},
    ),
}


@pytest.mark.parametrize("name", CALLS | MORE)
def test_interpreted_kernel_is_right_and_free_of_races(name):
    T, keywords = (CALLS | MORE)[name]
    problem, operands = normalise(*inputs(T), **keywords)
    assert few_queries.applies(problem) == (name in CALLS) and choose.applies(problem)
    assert_right_and_free_of_races(problem, operands, decode)


def test_interpreted_rows_of_two_warpgroups():
    problem, operands = normalise(*inputs(20, N=16), mask=BOTTOM_RIGHT, key_value_seq_lengths=LENGTHS)
    config = choose.choose(problem, Gpu.visible(), interpret=True).config
    assert config.compute_wgs == 2 and config.kv_splits > 1
    assert_right_and_free_of_races(problem, operands, decode)


def assert_alike_in_both_layouts(kernel, K, **keywords):
    """The interpreted `kernel` gives the same in both layouts, free of races in BNTH."""
    q, k, v = inputs(3, K=K)
    keywords |= {"mask": BOTTOM_RIGHT, "sinks": jnp.zeros(N)}
    (out, lse), _ = interpreted(*normalise(q, k, v, **keywords), kernel)
    transposed = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    (other, other_lse), races = interpreted(*normalise(*transposed, layout="BNTH", **keywords), kernel)
    assert not races
    np.testing.assert_array_equal(np.asarray(jnp.swapaxes(other, 1, 2), np.float32), np.asarray(out, np.float32))
    np.testing.assert_allclose(other_lse, lse, rtol=1e-6)


@pytest.mark.parametrize("K", [2, N])
def test_the_other_layout(K):
    assert_alike_in_both_layouts(decode, K)


def test_padding_may_hold_nan():
    q, k, v = inputs(2, N=2, K=1)
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


@pytest.mark.parametrize(
    ("T", "options", "reason"),
    [
        (17, {}, "T=17 queries; .* with more at least 1"),
        (16, {"split_heads": 1}, "T=16 queries; with few queries .* must be 0"),
        (17, {"split_heads": 9}, "split_heads=9 of 2 x 4 heads"),
        (17, {"split_heads": 5}, "up to 4, or a multiple of 4"),
    ],
)
def test_tiles_that_split_keys_where_they_cannot_say_why(T, options, reason):
    config = Config(ForwardConfig(1, 64, kv_splits=2, **options))
    with pytest.raises(NotImplementedError, match=reason):
        dot_product_attention(*inputs(T), implementation="mosaic_gpu", config=config)


@pytest.mark.parametrize(
    "mask", [masks.Causal(), BOTTOM_RIGHT & masks.Window(100, None, 660)], ids=["causal", "window"]
)
def test_interpreted_parts_without_keys_of_two_warpgroups(mask):
    """Where one warpgroup has no queries, and fewer key blocks are visited than there are parts."""
    shape = lambda heads, length: jnp.asarray(RNG.standard_normal((1, length, heads, H)), jnp.bfloat16)
    problem, operands = normalise(shape(4, 40), shape(1, 700), shape(1, 700), mask=mask)
    plan = choose.choose(problem, Gpu.visible(), interpret=True)
    assert plan.config.compute_wgs == 2 and plan.config.kv_splits > 1 and plan.skips_steps
    assert_right_and_free_of_races(problem, operands, decode)


@pytest.mark.parametrize(
    ("T", "changed", "expected"),
    [
        (17, {}, True),
        (32, {}, True),
        (64, {}, True),  # 256 rows of a key head are 2 tiles of 128; those of its heads one by one are 4
        (65, {}, False),  # 3 tiles, and 4
        (17, {"S": 271}, False),
        (17, {"K": 8}, False),
        (17, {"dtype": "float32"}, False),
        (17, {"config": Config(ForwardConfig(2))}, False),
        (17, {"config": Config()}, True),
        (17, {"dropout_rate": 0.1, "dropout_key": np.zeros(2, np.uint32)}, False),
        (17, {"key_value_seq_lengths": LENGTHS}, True),
        (17, {"score": scores.SoftCap(20.0)}, True),
        (17, {"score": scores.Alibi(np.ones(8, np.float32))}, False),
        (17, {"bias": np.ones((17, 2000), np.float32)}, False),
        (17, {"bias": np.ones((1, 2000), np.float32)}, True),
    ],
)
def test_more_queries_share_tiles_where_these_are_fewer(T, changed, expected):
    sizes = dict(S=2000, N=8, K=2)
    sizes, dtype = {x: changed.pop(x, sizes[x]) for x in sizes}, changed.pop("dtype", "bfloat16")
    problem, _ = normalise(*(x.astype(dtype) for x in inputs(T, **sizes)), **changed)
    assert choose.applies(problem) == expected
    q, k, v = (jax.ShapeDtypeStruct(x.shape, dtype) for x in inputs(T, **sizes))
    assert ("share a tile" in explain(q, k, v, **changed)) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("name", CALLS | MORE)
def test_the_compiled_kernel_is_accurate(name, H):
    is_accurate(name, H, "mosaic_gpu")


def is_accurate(name, H, kernels):
    """At most twice the error of xla, and one rounding, against the same in float32; and the same twice."""
    T, keywords = (CALLS | MORE)[name]
    q, k, v = inputs(T, H=H)

    def call(implementation, dtype):
        arrays = (x.astype(dtype) for x in (q, k, v))
        taken = {name: x for name, x in keywords.items() if name != "config" or implementation == "mosaic_gpu"}
        fn = jax.jit(lambda *x: dot_product_attention(*x, implementation=implementation, return_residual=True, **taken))
        return [np.asarray(x, np.float64) for x in fn(*arrays)]

    truth, xla = call("reference", jnp.float32), call("xla", jnp.bfloat16)
    ours, again = call(kernels, jnp.bfloat16), call(kernels, jnp.bfloat16)
    for want, theirs, got, same in zip(truth, xla, ours, again, strict=True):
        np.testing.assert_array_equal(got, same)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        got, want, theirs = (x[np.isfinite(want)] for x in (got, want, theirs))
        if want.size:
            assert abs(got - want).max() <= 2 * abs(theirs - want).max() + 2.0**-8 * abs(want).max()


@pytest.mark.parametrize("T", [1, 16, 32])
@pytest.mark.parametrize("H", [64, 128, 256])
def test_lowers(T, H):
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(T, 8, 2, H, S=5000))

    def fn(q, k, v, lengths):
        return dot_product_attention(
            q, k, v, mask=BOTTOM_RIGHT, key_value_seq_lengths=lengths, implementation="mosaic_gpu"
        )

    assert kernels(fn, q, k, v, jax.ShapeDtypeStruct((B,), jnp.int32)) == 1
