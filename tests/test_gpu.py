"""The compiled kernels on a GPU: the table against float64 truth, reruns, memory. Run with `pytest -m gpu`.

On one GPU, several workers need `XLA_PYTHON_CLIENT_PREALLOCATE=false`.
"""

import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks
from pallas_fa.backends.hopper.config import BackwardConfig, Config, ForwardConfig
from tests.cases import TABLE, Case
from tests.hopper_tiles import BY_TICKETS, PAIRS_IN_TURN

pytestmark = pytest.mark.gpu
DTYPES = ("bfloat16", "float16")
KERNEL_CASES = tuple(dict.fromkeys(dataclasses.replace(case, dtype=DTYPES[i % 2]) for i, case in enumerate(TABLE)))
WIDE_CASES = tuple(
    Case(333, 517, mask, score, DTYPES[i % 2], N=4, K=2, H=H, Hv=Hv)
    for i, (mask, score, H, Hv) in enumerate(
        (mask, score, H, Hv)
        for H, Hv in (
            *((64, 64), (128, 128), (256, 256), (192, 128), (72, 72), (64, 128), (128, 64)),
            *((59, 100), (100, 100), (200, 59)),
        )
        for mask, score in (("packed", "plain"), ("dense", "bias"), ("lengths", "soft_cap"), ("causal", "everything"))
    )
)
# Head dims past 256, whose tiles are cut into chunks.
LARGE_CASES = tuple(
    Case(T, S, mask, score, DTYPES[i % 2], N=4, K=2, H=H, Hv=Hv)
    for i, (T, S, mask, score, H, Hv) in enumerate(
        (
            (1024, 1024, "causal", "plain", 512, 512),
            (1000, 900, "full", "plain", 512, 512),
            (333, 517, "dense", "bias", 512, 512),
            (333, 517, "lengths", "soft_cap", 512, 512),
            (512, 512, "packed", "everything", 512, 512),
            (700, 900, "computed_blocks", "relative_bias_shared", 512, 512),
            (333, 517, "bottom_right", "alibi", 264, 320),
            (517, 333, "window_causal", "plain", 320, 64),
            (600, 600, "blocks", "everything", 128, 512),
            (300, 300, "causal", "plain", 300, 511),
            (1, 1000, "full", "plain", 512, 512),
            (7, 517, "lengths", "plain", 512, 384),
        )
    )
) + (Case(333, 517, "causal", "plain", "bfloat16", N=4, K=2, H=512, Hv=512, dropout=0.3),)
# Ids whose ranges come from blocks of them; all blocks add to one tile of dQ; tiles of dQ that nothing is added to.
LONG_CASES = tuple(
    Case(T, S, mask, "plain", "bfloat16", N=4, K=2, H=H, Hv=H)
    for T, S, mask in ((1500, 1500, "packed"), (100, 5000, "full"), (2000, 300, "bottom_right"))
    for H in (64, 128, 256)
) + (
    Case(1024, 1024, "causal", "plain", "bfloat16", N=16, K=2, H=64, Hv=64),
    Case(1024, 1024, "causal", "plain", "bfloat16", N=16, K=2, H=128, Hv=128),
    Case(1000, 900, "full", "soft_cap", "bfloat16", N=4, K=2, H=128, Hv=128),
    *(
        Case(1500, 1300, mask, score, "bfloat16", N=4, K=2, H=H, Hv=H)
        for mask, score in (("blocks", "plain"), ("computed_blocks", "plain"), ("blocks", "everything"))
        for H in (64, 128, 256)
    ),
    *(  # head dims that are not padded to 128
        Case(1000, 904, mask, score, DTYPES[i % 2], N=4, K=2, H=H, Hv=Hv)
        for i, (mask, score, H, Hv) in enumerate(
            (
                ("causal", "plain", 96, 96),
                ("lengths", "plain", 80, 80),
                ("packed", "everything", 80, 96),
                ("dense", "bias", 96, 80),
                ("full", "plain", 96, 128),
            )
        )
    ),
)
# Long and short rows of tiles, rows past the end, and a gradient that all batch entries and heads add to.
RELATIVE_CASES = tuple(
    Case(T, S, mask, score, "bfloat16", N=4, K=2, H=H, Hv=H)
    for H in (64, 128, 256)
    for T, S, mask, score in (
        (1000, 700, "causal", "relative_bias"),
        (333, 1517, "window_causal", "relative_bias_shared"),
        (129, 65, "lengths", "relative_bias"),
    )
)

DROPOUT_CASES = tuple(
    Case(T, S, mask, score, DTYPES[i % 2], N=4, K=2, H=H, Hv=H, dropout=0.3)
    for i, (T, S, mask, score) in enumerate(
        ((333, 517, "full", "plain"), (517, 333, "packed", "soft_cap"), (1024, 1024, "causal", "plain"))
    )
    for H in (64, 128, 256)
) + (
    Case(1024, 1024, "causal", "plain", "bfloat16", N=16, K=2, H=128, Hv=128, dropout=0.3),
    Case(8, 1024, "full", "plain", "bfloat16", N=4, K=2, H=128, Hv=128, dropout=0.3),
)
# Of the heads of a key head as rows, and of a head of its own; queries and keys past the other's end; sinks.
WINDOW_CASES = tuple(
    Case(T, S, mask, "plain", DTYPES[i % 2], N=N, K=2, H=H, Hv=Hv, sinks=sinks)
    for i, (N, H, Hv) in enumerate(((16, 64, 64), (8, 128, 128), (4, 72, 40), (2, 64, 64), (6, 64, 64)))
    for T, S, mask, sinks in (
        (1000, 1000, "window_causal", "none"),
        (1001, 517, "window", "heads"),
        (333, 1517, "window_int", "batch"),
        (1500, 1500, "window_bottom_right", "none"),
    )
)
FLOAT32_CASES = tuple(
    dict.fromkeys(
        dataclasses.replace(case, dtype="float32")
        for case in (*TABLE, *WIDE_CASES, *LONG_CASES, *RELATIVE_CASES)
        if max(case.H, case.Hv) <= 128
    )
)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Outputs of the next call are likely to lie where this NaN lay."""
    for size in (2**12, 2**16, 2**20, 2**24):
        jax.block_until_ready(jnp.full((size,), jnp.nan, jnp.float32)).delete()


@pytest.mark.parametrize(
    "case",
    KERNEL_CASES + WIDE_CASES + LARGE_CASES + LONG_CASES + RELATIVE_CASES + DROPOUT_CASES + WINDOW_CASES,
    ids=str,
)
def test_kernels_are_accurate(case, check):
    check(case, "mosaic_gpu", gradients=True)


@pytest.mark.parametrize("first_query", (0, 48, 40))
@pytest.mark.parametrize(
    ("S", "rate", "dtype"),
    ((64, 0.3, "bfloat16"), (128, 0.3, "bfloat16"), (128, 0.3, "float16"))
    # The threshold is a denormal number, or NaN.
    + ((128, 0.001, "bfloat16"), (128, 0.01, "float16"), (128, 0.998, "bfloat16"), (128, 0.98, "float16")),
)
def test_kernels_drop_the_elements_of_the_definition(S, rate, dtype, first_query):
    """Forward, by equal probabilities and V = 1; backward, by dV of cotangents 1. On shards that start at 48 or 40, too."""
    from pallas_fa.backends.gpu.device import Gpu
    from pallas_fa.backends.hopper.backward.backward import backward
    from pallas_fa.backends.hopper.forward.forward import forward
    from pallas_fa.operands.part import Part
    from pallas_fa.problem import Residuals, normalise
    from tests.case_dropout import multipliers

    B, T, N, words = 2, S, 3, np.array([5, 2**31 + 6], np.uint32)
    zeros, ones = jnp.zeros((B, T, N, S), dtype), jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, N, S))
    ones = ones.astype(dtype)
    _, operands = normalise(zeros, zeros, ones, dropout_rate=rate, dropout_key=words)
    moved = operands.dropout.moved(Part((0, 0, jnp.int32(first_query), 0), (B, N, first_query or T, S)))
    operands = operands._replace(dropout=moved)
    problem = normalise(zeros, zeros, ones)[0].with_operands(operands)
    run = jax.jit(functools.partial(forward, problem, gpu=Gpu.visible()))
    out, lse = run(operands)
    grads = jax.jit(functools.partial(backward, problem, gpu=Gpu.visible()))
    d_v = grads(Residuals(operands, out, lse), ones, jnp.zeros_like(lse))[2]
    t = np.arange(T) + first_query
    want = multipliers(words, rate, *np.ix_(np.arange(B), np.arange(N), t, np.arange(S))) > 0
    np.testing.assert_array_equal(np.asarray(out.astype(jnp.float32)).swapaxes(1, 2) > 0, want)
    np.testing.assert_array_equal(np.asarray(d_v.astype(jnp.float32)).transpose(0, 2, 3, 1) > 0, want)


@pytest.mark.parametrize("case", FLOAT32_CASES, ids=str)
def test_kernels_of_float32_are_accurate(case, check):
    check(case, "mosaic_gpu", gradients=True)


# With so few heads the tables choose no pairs: there would be too few CTAs.
PAIRS = (
    (Case(1000, 1000, "causal", "plain", "bfloat16", H=64, Hv=64), ForwardConfig(3, ping_pong=True, q_block_pairs=3)),
    (Case(1500, 1500, "packed", "plain", "bfloat16", H=64, Hv=64), ForwardConfig(2, ping_pong=True, q_block_pairs=4)),
    (
        Case(1500, 1500, "packed", "plain", "float16", N=4, K=2, H=128, Hv=128),
        ForwardConfig(ping_pong=True, q_block_pairs=2),
    ),
    (Case(1000, 900, "full", "plain", "float16", H=128, Hv=128), ForwardConfig(q_in_registers=True, q_block_pairs=1)),
    (Case(1333, 517, "dense", "bias", "float16", H=128, Hv=128), ForwardConfig(2, 64, q_block_pairs=2)),
    (Case(1333, 517, "lengths", "everything", "bfloat16", H=64, Hv=64), ForwardConfig(2, 64, q_block_pairs=3)),
)


@pytest.mark.parametrize(("case", "config"), PAIRS, ids=[f"{case}-{config.q_block_pairs}" for case, config in PAIRS])
def test_pairs_of_blocks_are_accurate(case, config, check):
    check(case, "mosaic_gpu", gradients=False, config=Config(forward=config))


# So few CTAs that each takes several blocks, of several heads. The last three at H=64: a CTA holds all keys of a head.
PERSISTENT = tuple(
    (
        Case(T, S, mask, score, dtype, N=4, K=2, H=64, Hv=64, **options),
        Config(
            ForwardConfig(wgs, 64 * wgs, persistent_ctas=3, by_tickets=wgs == 2),
            BackwardConfig(wgs, 64 * wgs, (2, 1), persistent_ctas=5, by_tickets=wgs == 2),
        ),
    )
    for wgs, T, S, mask, score, dtype, options in (
        (2, 333, 517, "lengths", "plain", "bfloat16", {}),
        (2, 500, 500, "packed", "plain", "float16", {}),
        (2, 517, 333, "window_causal", "plain", "bfloat16", dict(dropout=0.3)),
        (1, 333, 517, "causal", "everything", "bfloat16", {}),
        (1, 200, 300, "dense", "bias", "float16", {}),
        (1, 200, 300, "causal", "plain", "float32", {}),
        (1, 200, 50, "lengths", "plain", "float32", {}),
        (2, 200, 100, "lengths", "plain", "bfloat16", dict(sinks="heads")),
        (2, 197, 128, "full", "soft_cap", "float16", {}),
    )
) + tuple(
    (
        Case(T, S, "full", "plain", dtype, N=4, K=K, H=H, Hv=128, **options),
        Config(ForwardConfig(ping_pong=True, rescale_under_qk=True, persistent_ctas=3)),
    )
    for T, S, dtype, K, H, options in (
        (333, 517, "bfloat16", 4, 128, {}),
        (1000, 300, "float16", 2, 72, dict(sinks="heads")),
        (333, 517, "bfloat16", 2, 128, dict(dropout=0.3)),
    )
)
# Pairs under causal masks, which are in persistent CTAs in larger calls; and single blocks of more than 4 steps.
PERSISTENT += tuple(
    (
        Case(T, S, mask, score, dtype, N=4, K=K, H=H, Hv=128, **options),
        Config(dataclasses.replace(PAIRS_IN_TURN, persistent_ctas=3, **tiles)),
    )
    for T, S, mask, score, dtype, K, H, options, tiles in (
        (1000, 1000, "causal", "plain", "bfloat16", 4, 128, {}, {}),
        (600, 1500, "bottom_right", "soft_cap", "float16", 2, 96, dict(sinks="heads"), {"q_block_pairs": 2}),
        (1300, 1300, "causal", "alibi", "bfloat16", 2, 128, dict(dropout=0.3), {}),
        (900, 1100, "full", "plain", "bfloat16", 4, 128, {}, {"q_block_pairs": 0, "pin_softmax": True}),
        (1024, 1024, "full", "plain", "float16", 1, 80, {}, {"q_block_pairs": 0, "pin_softmax": True}),
    )
)
# Past H=128 the output is stored in turns.
PERSISTENT += tuple(
    (
        Case(T, S, mask, score, dtype, N=4, K=K, H=H, Hv=Hv, batch=(2,), **options),
        Config(ForwardConfig(2, block_kv, ping_pong=H == 192, rescale_under_qk=True, persistent_ctas=3, **tiles)),
    )
    for T, S, mask, score, dtype, K, H, Hv, options, block_kv, tiles in (
        (1000, 1000, "causal", "plain", "bfloat16", 4, 192, 128, {}, 128, dict(q_block_pairs=1, out_chunks=1)),
        (777, 1024, "bottom_right", "alibi", "float16", 2, 192, 72, dict(dropout=0.3), 128, dict(out_chunks=1)),
        (1024, 1024, "causal", "plain", "bfloat16", 2, 256, 256, {}, 64, dict(q_block_pairs=2, out_chunks=2)),
        (513, 700, "full", "plain", "float16", 4, 200, 256, dict(sinks="heads"), 64, dict(out_chunks=2)),
        (900, 900, "lengths", "plain", "bfloat16", 4, 256, 136, {}, 64, dict(out_chunks=1)),
    )
)
# The tables' tiles of the forward by tickets, which larger calls take.
PERSISTENT += tuple(
    (
        Case(T, S, mask, score, dtype, N=4, K=K, H=H, Hv=Hv, batch=(2,), **options),
        Config(dataclasses.replace(tiles, by_tickets=True, persistent_ctas=5)),
    )
    for H, Hv, tiles, of_head_dim in (
        (
            64,
            64,
            ForwardConfig(3, ping_pong=True, rescale_under_qk=True, pin_softmax=False),
            (
                (1100, 1100, "causal", "plain", "bfloat16", 4, {}),
                (1100, 900, "lengths", "plain", "float16", 2, {}),
                (900, 1300, "window_causal", "alibi", "bfloat16", 4, dict(dropout=0.3)),
                (1000, 1000, "dense", "plain", "bfloat16", 1, dict(sinks="heads")),
            ),
        ),
        (64, 64, ForwardConfig(2, ping_pong=True), ((1100, 1100, "packed", "plain", "bfloat16", 4, {}),)),
        (
            128,
            128,
            ForwardConfig(2, ping_pong=True, rescale_under_qk=True, pin_softmax=False, out_chunks=2),
            (
                (1100, 1100, "causal", "plain", "bfloat16", 4, {}),
                (1100, 900, "lengths", "plain", "float16", 2, {}),
                (900, 1300, "window_causal", "plain", "bfloat16", 1, dict(dropout=0.3)),
                (600, 1000, "bottom_right", "soft_cap", "bfloat16", 4, dict(sinks="heads")),
            ),
        ),
        (
            192,
            128,
            ForwardConfig(2, ping_pong=True, rescale_under_qk=True, out_chunks=1),
            (
                (1100, 900, "lengths", "plain", "bfloat16", 4, {}),
                (1100, 1100, "causal", "plain", "float16", 2, {}),
            ),
        ),
        (
            256,
            256,
            ForwardConfig(2, 64, rescale_under_qk=True, out_chunks=2),
            (
                (1100, 1100, "causal", "plain", "bfloat16", 2, {}),
                (1100, 900, "lengths", "plain", "float16", 4, {}),
                (900, 1300, "window_causal", "plain", "bfloat16", 1, {}),
            ),
        ),
    )
    for T, S, mask, score, dtype, K, options in of_head_dim
)
# The tables' tiles at H=64: by tickets, as CTAs take blocks in larger calls; as the tables have it, past 2048 keys a CTA for
# each block, whose accumulators start at the statistics, and blocks dealt out in turn.
WITH_TICKETS = Config(backward=BY_TICKETS)
AT_64 = (
    (Case(1100, 1100, "causal", "plain", "bfloat16", N=8, K=8, H=64, Hv=64, batch=(3,)), WITH_TICKETS),
    (Case(1500, 1500, "window_causal", "plain", "float16", N=8, K=8, H=64, Hv=64, batch=(2,)), WITH_TICKETS),
    (Case(1000, 900, "lengths", "plain", "bfloat16", N=8, K=8, H=32, Hv=32, batch=(3,)), WITH_TICKETS),
    (Case(3000, 3000, "causal", "plain", "bfloat16", N=4, K=4, H=64, Hv=64, batch=(2,)), WITH_TICKETS),
    (Case(2100, 2500, "full", "plain", "bfloat16", N=4, K=4, H=64, Hv=64), None),
    (Case(1300, 1024, "full", "plain", "bfloat16", N=8, K=4, H=64, Hv=64, batch=(6,)), None),
    (Case(60, 64, "causal", "plain", "bfloat16", N=8, K=8, H=64, Hv=64, batch=(40,)), None),
)
PERSISTENT += AT_64


@pytest.mark.parametrize(("case", "config"), PERSISTENT, ids=[str(case) for case, _ in PERSISTENT])
def test_persistent_ctas_are_accurate(case, config, check):
    check(case, "mosaic_gpu", gradients=True, config=config)


# All three gradients in one pass, or in two where that can't be; several blocks of keys add to each tile of dQ.
AT_192 = (
    *(
        Case(1000, 1024, mask, score, dtype, N=8, K=K, H=192, Hv=Hv, batch=(2,))
        for mask, score, dtype, K, Hv in (
            ("full", "plain", "bfloat16", 8, 128),
            ("causal", "plain", "bfloat16", 8, 128),
            ("causal", "plain", "float16", 2, 128),
            ("lengths", "plain", "bfloat16", 8, 128),
            ("packed", "plain", "bfloat16", 8, 128),
            ("dense", "plain", "float16", 8, 64),
            ("blocks", "plain", "bfloat16", 4, 128),
            ("causal", "soft_cap", "bfloat16", 8, 128),
        )
    ),
    Case(4096, 4096, "window_causal", "plain", "bfloat16", N=16, K=16, H=192, Hv=128),
)


@pytest.mark.parametrize("case", AT_192, ids=str)
def test_head_dim_192_is_accurate(case, check):
    check(case, "mosaic_gpu", gradients=True)


# Query heads of a key head in parts, each with CTAs of its own.
HEAD_PARTS = tuple(
    (Case(1000, 1024, mask, "plain", dtype, N=8, K=K, H=H, Hv=Hv), BackwardConfig(head_parts=parts, **tiles))
    for mask, dtype, K, H, Hv, parts, tiles in (
        ("causal", "bfloat16", 1, 128, 128, 8, {}),
        ("causal", "bfloat16", 2, 128, 96, 2, {}),
        ("causal", "bfloat16", 1, 128, 128, 2, dict(by_tile=True, l2_head_group=3)),
        ("full", "float16", 1, 64, 64, 4, dict(width=128, dk_last=True, store_warps=1)),
        ("lengths", "bfloat16", 1, 192, 128, 4, dict(stages=(2, 1), p_before_dp=True)),
        ("packed", "bfloat16", 1, 256, 256, 4, dict(stages=(1, 1))),
        ("causal", "bfloat16", 1, 320, 320, 4, dict(stages=(1, 1), chunk_slots=4)),
    )
)


@pytest.mark.parametrize(
    ("case", "tiles"), HEAD_PARTS, ids=[f"{case}-{tiles.head_parts}" for case, tiles in HEAD_PARTS]
)
def test_head_parts_are_accurate(case, tiles, check):
    check(case, "mosaic_gpu", gradients=True, config=Config(backward=tiles))


@pytest.mark.parametrize("growth", (2, 9, 62, 300))
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize(("H", "dropout_rate"), ((64, 0.0), (128, 0.0), (128, 0.1), (256, 0.0)))
def test_maxima_that_grow(growth, is_causal, dtype, H, dropout_rate):
    """From one block of 128 keys to the one visited next, in base 2, by more and by less than they may lag behind."""
    T, rng = 1100, np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, T, 1, H)).astype(jnp.dtype(dtype)) for _ in range(3))
    q[..., 0], k[..., 0] = H**0.5, (growth * np.log(2) * (np.arange(T)[::-1] // 128))[:, None]
    options = dict(dropout_rate=dropout_rate, dropout_key=np.array([0, 1], np.uint32)) if dropout_rate else {}
    attend = functools.partial(pallas_fa.dot_product_attention, is_causal=is_causal, return_residual=True, **options)
    out, lse = jax.jit(functools.partial(attend, implementation="mosaic_gpu"))(q, k, v)
    with jax.enable_x64(True):
        true_out, true_lse = attend(*(x.astype(np.float64) for x in (q, k, v)), implementation="reference")
    np.testing.assert_allclose(out, true_out, atol=3e-2 if dtype == "bfloat16" else 5e-3)
    np.testing.assert_allclose(lse, true_lse, rtol=2e-6, atol=1e-5)


SPLIT_HEADS = (
    (Case(333, 517, "full", "plain", "bfloat16", N=6, K=3, H=128, Hv=128), (4, 3, {})),
    (
        Case(1000, 1000, "causal", "soft_cap", "float16", N=6, K=3, H=64, Hv=64, sinks="heads"),
        (6, 4, {"compute_wgs": 3}),
    ),
    (Case(517, 900, "lengths", "bias", "bfloat16", N=4, K=2, H=128, Hv=72, dropout=0.3), (2, 2, {"block_kv": 64})),
    (Case(700, 900, "full", "plain", "bfloat16", N=4, K=2, H=128, Hv=128), (2, 3, {"persistent_ctas": 5})),
    (Case(300, 2000, "packed", "plain", "bfloat16", N=4, K=4, H=256, Hv=256), (3, 5, {"block_kv": 64})),
    (
        Case(300, 2000, "bottom_right", "plain", "float16", N=2, K=1, H=512, Hv=512),
        (2, 4, {"block_kv": 64, "stages": 1, "pin_softmax": False}),
    ),
)


@pytest.mark.parametrize(("case", "tiles"), SPLIT_HEADS, ids=[str(case) for case, _ in SPLIT_HEADS])
def test_heads_with_keys_in_parts_are_accurate(case, tiles, check):
    heads, parts, options = tiles
    config = Config(ForwardConfig(split_heads=heads, kv_splits=parts, **options))
    check(case, "mosaic_gpu", gradients=True, config=config)


FEW_KEYS = tuple(
    Case(T, S, "full", "plain", dtype, N=6, K=2, H=H, Hv=H, **options)
    for T, H in ((1100, 64), (2100, 128))
    for S, dtype, options in ((77, "bfloat16", {}), (100, "float16", dict(sinks="heads")), (200, "bfloat16", {}))
)


@pytest.mark.parametrize("case", FEW_KEYS, ids=str)
def test_few_keys_are_accurate(case, check):
    """Of many queries, in the tiles for it."""
    check(case, "mosaic_gpu", gradients=True)


KEY_BLOCKS = tuple(
    (
        Case(T, S, mask, score, "bfloat16", N=4, K=2, H=H, Hv=H),
        ForwardConfig(block_kv=block_kv, ping_pong=True, rescale_under_qk=True, pin_softmax=H < 256),
    )
    for H, block_kv in ((64, 112), (128, 176), (256, 80))
    for T, S, mask, score in (
        (344, 520, "full", "plain"),
        (1024, 1024, "causal", "plain"),
        (333, 517, "window_causal", "plain"),
        (333, 517, "lengths", "soft_cap"),
    )
)


@pytest.mark.parametrize(
    ("case", "config"), KEY_BLOCKS, ids=[f"{case}-{config.block_kv}" for case, config in KEY_BLOCKS]
)
def test_key_blocks_of_multiples_of_16_are_accurate(case, config, check):
    check(case, "mosaic_gpu", gradients=False, config=Config(forward=config))


@pytest.mark.parametrize("case", WIDE_CASES[:8], ids=str)
def test_tangents_at_the_kernels_values_are_accurate(case, check_tangents):
    check_tangents(case, "mosaic_gpu")


# So many heads that the tables choose pairs of blocks of queries.
MANY_HEADS = tuple(
    Case(1024, 1024, mask, "plain", "bfloat16", N=32, K=32, H=H, Hv=H, batch=(8,))
    for mask, H in (("causal", 64), ("causal", 128), ("packed", 128), ("full", 128))
) + (Case(512, 8192, "bottom_right", "plain", "bfloat16", N=8, K=1, H=128, Hv=128, batch=(1,)),)  # keys in parts


@pytest.mark.parametrize("case", WIDE_CASES[:3] + WIDE_CASES[8:9] + MANY_HEADS, ids=str)
def test_a_thousand_reruns_are_bitwise_equal(case):
    inputs = case.inputs()
    call = functools.partial(pallas_fa.dot_product_attention, implementation="mosaic_gpu", return_residual=True)
    run = jax.jit(lambda q, k, v, arrays: call(q, k, v, **inputs.keywords(arrays)))
    first = run(*inputs.qkv, inputs.arrays)

    @jax.jit
    def differences(one, other):
        return sum(jnp.sum((a != b) & ~((a == -jnp.inf) & (b == -jnp.inf))) for a, b in zip(one, other, strict=True))

    different = jnp.zeros((), jnp.int32)
    for _ in range(1000):
        different += differences(first, run(*inputs.qkv, inputs.arrays))
    assert different == 0


RERUN_GRADIENTS = (
    Case(1024, 1024, "causal", "plain", "bfloat16", N=8, K=8, H=128, Hv=128),
    Case(1000, 1024, "packed", "plain", "bfloat16", N=8, K=2, H=64, Hv=64),
    Case(777, 900, "window_causal", "soft_cap", "float16", N=4, K=4, H=256, Hv=256),
    Case(64, 8192, "full", "plain", "bfloat16", N=4, K=4, H=128, Hv=128),
    Case(2000, 1900, "blocks", "plain", "bfloat16", N=8, K=4, H=128, Hv=128),
    Case(1024, 1024, "full", "plain", "bfloat16", N=8, K=8, H=128, Hv=128),
    Case(1024, 1024, "causal", "plain", "bfloat16", N=64, K=8, H=128, Hv=128, batch=(4,)),
    Case(1024, 1000, "causal", "plain", "bfloat16", N=8, K=8, H=192, Hv=128),
    Case(1536, 1536, "causal", "plain", "bfloat16", N=32, K=4, H=128, Hv=128),  # heads in parts, tile after tile
    Case(1024, 1000, "causal", "plain", "float32", N=8, K=8, H=128, Hv=128),
    Case(1000, 1024, "packed", "plain", "float32", N=8, K=2, H=64, Hv=64),
)
RERUNS = (
    *((case, deterministic, None) for case in RERUN_GRADIENTS for deterministic in (False, True)),
    *((case, False, config) for case, config in AT_64),
)


@pytest.mark.parametrize(
    ("case", "deterministic", "config"), RERUNS, ids=[f"{case}-{('fast', 'deterministic')[x]}" for case, x, _ in RERUNS]
)
def test_gradients_of_a_thousand_reruns(case, deterministic, config):
    """dK and dV bitwise equal, dQ within rounding; in the deterministic mode all bitwise equal."""
    inputs = case.inputs()
    options = dict(implementation="mosaic_gpu", config=config, deterministic_gradients=deterministic)
    call = functools.partial(pallas_fa.dot_product_attention, **options)

    @jax.jit
    def run(q, k, v, arrays):
        out, pullback = jax.vjp(lambda q, k, v: call(q, k, v, **inputs.keywords(arrays)), q, k, v)
        return pullback(jnp.sin(out))

    @jax.jit
    def differences(worst, one, other):
        found = [jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32)).max() for a, b in zip(one, other, strict=True)]
        return jnp.maximum(worst, jnp.stack(found))  # NaN stays

    first = run(*inputs.qkv, inputs.arrays)
    worst = jnp.zeros(3)
    for _ in range(1000):
        worst = differences(worst, first, run(*inputs.qkv, inputs.arrays))
    d_q, d_k, d_v = map(float, worst)
    assert (d_k, d_v) == (0, 0)
    # Sums of float32 in another order, rounded to 16 bits: one unit in the last place of the largest.
    eps = float(jnp.finfo(case.dtype).eps)
    assert d_q <= (0 if deterministic else eps * float(jnp.abs(first[0]).max()))


@pytest.mark.parametrize("shape", [(2, 1024, 8, 128), (2, 799, 4, 72), (3, 1023, 6, 64)], ids=str)
def test_no_copy_of_the_inputs_is_made(shape):
    """In the compiled program nothing pads, copies or transposes q, k or v, and nothing is as large as they are."""
    x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    call = functools.partial(pallas_fa.dot_product_attention, is_causal=True, implementation="mosaic_gpu")
    text = jax.jit(call).lower(x, x, x).compile().as_text() or ""
    sized = ",".join(map(str, shape))
    moved = [
        line
        for line in text.splitlines()
        if re.search(r"= bf16\[.*\b(pad|copy|transpose|fusion|slice)\(", line.split("metadata")[0])
    ]
    assert not moved, moved
    assert f"bf16[{sized}]" in text


def test_a_scan_over_layers_runs_each_kernel_once():
    """XLA can write a kernel's result straight into the stacked residuals; it must not run it again for the others."""
    x = jax.ShapeDtypeStruct((1, 1024, 4, 128), jnp.bfloat16)
    call = functools.partial(pallas_fa.dot_product_attention, is_causal=True, implementation="mosaic_gpu")

    def loss(x, scales):
        out, _ = jax.lax.scan(lambda x, scale: (x + call(scale * x, x, x), None), x, scales)
        return out.astype(jnp.float32).sum()

    scales = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    text = jax.jit(jax.grad(loss)).lower(x, scales).compile().as_text() or ""
    assert len(re.findall('custom_call_target="mosaic_gpu', text)) == 2  # forward and backward, each in its loop


def test_padding_may_hold_nan():
    q_lengths, kv_lengths = jnp.array([500, 10, 100, 0]), jnp.array([300, 0, 500, 129])
    q, k, v = (jnp.asarray(np.random.default_rng(i).standard_normal((4, 500, 4, 64)), jnp.bfloat16) for i in range(3))

    def poison(x, lengths):
        return jnp.where((jnp.arange(500) >= lengths[:, None])[..., None, None], jnp.nan, x)

    call = functools.partial(
        pallas_fa.dot_product_attention,
        query_seq_lengths=q_lengths,
        key_value_seq_lengths=kv_lengths,
        implementation="mosaic_gpu",
        return_residual=True,
    )
    clean = call(q, k, v)
    got = call(poison(q, q_lengths), poison(k, kv_lengths), poison(v, kv_lengths))
    for a, b in zip(got, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_large_problems():
    """More than 65535 tiles along an axis, and B * N * T * S past 2^31."""
    x = jax.random.normal(jax.random.key(0), (70_000, 16, 1, 64), jnp.bfloat16)
    got = pallas_fa.dot_product_attention(x, x, x, implementation="mosaic_gpu")
    want = pallas_fa.dot_product_attention(x, x, x, implementation="xla")
    assert jnp.abs(got.astype(jnp.float32) - want).max() < 0.04
    total = lambda x, i: pallas_fa.dot_product_attention(x, x, x, implementation=i).astype(jnp.float32).sum()
    got, want = jax.grad(total)(x, "mosaic_gpu"), jax.grad(total)(x.astype(jnp.float32), "xla")
    assert jnp.abs(got.astype(jnp.float32) - want).max() < 0.1
    q, k, v = (jax.random.normal(jax.random.key(i), (1, 2**17, 1, 64), jnp.bfloat16) for i in range(3))
    mask = masks.Window(1000, 0)
    got = pallas_fa.dot_product_attention(q, k, v, mask=mask, implementation="mosaic_gpu")
    want = pallas_fa.dot_product_attention(q[:, -512:], k[:, -2048:], v[:, -2048:], mask=masks.Custom(_last_window))
    assert jnp.abs(got[:, -512:].astype(jnp.float32) - want).max() < 0.04


def _last_window(b, n, t, s):
    t, s = t + 2**17 - 512, s + 2**17 - 2048
    return (s <= t) & (s >= t - 1000)


@pytest.mark.parametrize("H", [64, 72, 128, 256])
def test_memory_beside_operands_and_results(H):
    """Forward and backward take out, log-sum-exp, dQ in float32 with H rounded up to 64, and four more floats a row."""
    B, T, N = 2, 4096, 4
    x = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    call = functools.partial(pallas_fa.dot_product_attention, is_causal=True, implementation="mosaic_gpu")
    gradients = jax.jit(lambda q, k, v, d_out: jax.vjp(call, q, k, v)[1](d_out)).lower(x, x, x, x).compile()
    memory = gradients.memory_analysis()
    assert memory is not None
    allowed = B * T * N * (2 * H + 4 + 4 * (-(-H // 64) * 64) + 4 * 4) + 2**16
    assert 0 < memory.temp_size_in_bytes <= allowed


def test_layers_share_the_memory_of_their_sums():
    """Of eight layers, inputs and results are kept for the backward, but no sums of dQ in float32 (4 H bytes a row)."""
    layers, (B, T, N, H) = 8, (2, 2048, 4, 128)
    x = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    call = functools.partial(pallas_fa.dot_product_attention, is_causal=True, implementation="mosaic_gpu")

    def loss(x):
        for _ in range(layers):
            x = x + call(x, x, x)
        return x.astype(jnp.float32).sum()

    memory = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis()
    assert memory is not None
    kept = layers * (2 * 2 * H + 4)
    assert memory.temp_size_in_bytes <= B * T * N * (kept + 20 * H)


def test_a_kernel_compiles_in_seconds():
    x = jax.ShapeDtypeStruct((1, 4000, 4, 128), jnp.bfloat16)
    call = functools.partial(pallas_fa.dot_product_attention, is_causal=True, implementation="mosaic_gpu")
    start = time.perf_counter()
    jax.jit(call).lower(x, x, x).compile()
    assert time.perf_counter() - start < 8


def test_the_default_on_hopper_is_the_kernel():
    x = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    assert pallas_fa.explain(x, x, x).startswith("mosaic_gpu: runs this call")
    text = jax.jit(pallas_fa.dot_product_attention).lower(x, x, x).compile().as_text() or ""
    assert "mosaic_gpu" in text
