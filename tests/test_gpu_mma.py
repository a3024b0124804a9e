"""The compiled kernels by mma.sync, named on any CUDA GPU: the table against float64 truth, reruns, forms of tiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.backends.mma.config import BackwardConfig, Config, DecodeConfig, ForwardConfig, FusedBackwardConfig
from tests import test_decode, test_paged_attention
from tests.cases import Case
from tests.test_gpu import KERNEL_CASES, LONG_CASES, RELATIVE_CASES, WIDE_CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", KERNEL_CASES + WIDE_CASES + LONG_CASES + RELATIVE_CASES, ids=str)
def test_kernels_are_accurate(case, check):
    check(case, "mma", gradients=True)


@pytest.mark.parametrize("case", KERNEL_CASES[::5] + WIDE_CASES[::3], ids=str)
def test_gradients_in_a_fixed_order_are_accurate(case, check):
    check(case, "mma", gradients=True, deterministic_gradients=True)


FUSED_TILES = [FusedBackwardConfig(wgs, rows, width, stages) for wgs, rows, width in ((1, 64, 32), (1, 128, 32),
               (1, 64, 64), (2, 128, 16), (2, 64, 32), (2, 128, 32)) for stages in (1, 2)]  # fmt: skip
FUSED_TILES += [FusedBackwardConfig(2, rows, 16, stages, values_in_registers=True) for rows in (64, 128)
                for stages in (1, 2)]  # fmt: skip


@pytest.mark.parametrize("tiles", FUSED_TILES, ids=str)
@pytest.mark.parametrize("mask, score", [("causal", "plain"), ("packed", "soft_cap"), ("lengths", "plain")])
def test_every_form_of_one_pass_is_accurate(tiles, mask, score, check):
    case = Case(333, 517, mask, score, "bfloat16", N=4, K=2, H=128, Hv=128)
    check(case, "mma", gradients=True, config=Config(backward=tiles))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("mask, score", [("causal", "plain"), ("lengths", "bias")])
def test_values_in_registers_are_accurate_at_wide_heads(stages, mask, score, check):
    case = Case(333, 517, mask, score, "bfloat16", N=4, K=2, H=256, Hv=256)
    tiles = FusedBackwardConfig(2, 64, 16, stages, values_in_registers=True)
    check(case, "mma", gradients=True, config=Config(backward=tiles))


# Query heads of a key head in parts, each with CTAs of its own: (mask, score, dtype), (K, H, Hv), tiles.
HEAD_PARTS = {
    "H=64": (("causal", "plain", "bfloat16"), (1, 64, 64), FusedBackwardConfig(1, 128, 32, 1, head_parts=8)),
    "shared columns": (("packed", "soft_cap", "bfloat16"), (2, 128, 128), FusedBackwardConfig(2, 128, 32, head_parts=2)),
    "values in registers": (
        ("lengths", "plain", "float16"), (1, 256, 256), FusedBackwardConfig(2, 64, 16, 1, True, head_parts=4),
    ),
    "two passes": (("causal", "bias", "bfloat16"), (1, 128, 100), BackwardConfig(2, 64, 32, head_parts=8)),
    "three passes": (("full", "plain", "bfloat16"), (1, 192, 128), BackwardConfig(1, 64, 32, 1, head_parts=4)),
}  # fmt: skip


@pytest.mark.parametrize("name", HEAD_PARTS)
def test_head_parts_are_accurate(name, check):
    call, (K, H, Hv), tiles = HEAD_PARTS[name]
    case = Case(1000, 1024, *call, N=8, K=K, H=H, Hv=Hv)
    check(case, "mma", gradients=True, config=Config(backward=tiles))


TILES = [ForwardConfig(wgs, rows, block_kv, stages) for wgs in (1, 2) for rows in (64, 128) for block_kv in (32, 64)
         for stages in (1, 2)]  # fmt: skip


@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("mask, score", [("causal", "plain"), ("packed", "bias"), ("lengths", "everything")])
def test_every_form_of_tiles_is_accurate(tiles, mask, score, check):
    check(Case(333, 517, mask, score, "bfloat16", N=4, K=2), "mma", gradients=False, config=Config(forward=tiles))


@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("name", test_decode.CALLS)
def test_few_queries_are_accurate(name, H):
    test_decode.is_accurate(name, H, "mma")


DECODE_TILES = [DecodeConfig(rows, block_kv, stages, kv_splits) for rows, block_kv in ((16, 64), (16, 128), (32, 32),
                (32, 64), (64, 16), (64, 64)) for stages, kv_splits in ((2, 1), (3, 5))]  # fmt: skip


@pytest.mark.parametrize("tiles", DECODE_TILES, ids=str)
@pytest.mark.parametrize("mask, score", [("bottom_right", "plain"), ("dense", "bias"), ("lengths", "everything")])
def test_every_form_of_tiles_for_few_queries_is_accurate(tiles, mask, score, check):
    check(Case(7, 517, mask, score, "bfloat16", N=4, K=2), "mma", gradients=False, config=Config(decode=tiles))


@pytest.mark.parametrize("H, Hv", [(256, 256), (72, 40), (128, 192), (100, 59)])
def test_few_queries_of_any_head_dims_are_accurate(H, Hv, check):
    check(Case(5, 517, "bottom_right", "soft_cap", "float16", N=8, K=2, H=H, Hv=Hv), "mma", gradients=False)


@pytest.mark.parametrize("H", [64, 128])
@pytest.mark.parametrize("name", test_paged_attention.CALLS)
def test_keys_in_pages_are_those_of_one_piece(name, H, rng):
    test_paged_attention.reads_what_it_reads_of_one_piece(name, H, rng, "mma")


@pytest.mark.parametrize("mask", ["full", "causal", "packed"])
def test_reruns_give_the_same_bits(mask):
    case = Case(1000, 1000, mask, "plain", "bfloat16", N=16, K=4, H=128, Hv=128)
    inputs = dataclasses.replace(case).inputs()
    call = dict(inputs.keywords({}), implementation="mma", return_residual=True)
    attention = jax.jit(lambda *qkv: pallas_fa.dot_product_attention(*qkv, **call))
    first = attention(*map(jnp.asarray, inputs.qkv))
    for _ in range(100):
        for x, y in zip(attention(*map(jnp.asarray, inputs.qkv)), first, strict=True):
            np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True], ids=["one pass", "deterministic"])
def test_gradients_of_a_thousand_reruns(H, deterministic):
    """All of them bitwise equal in a fixed order; in one pass those of keys and values are, and dQ but for its rounding."""
    inputs = Case(1000, 1100, "packed", "plain", "bfloat16", N=8, K=4, H=H, Hv=H).inputs()
    call = functools.partial(
        pallas_fa.dot_product_attention, implementation="mma", deterministic_gradients=deterministic
    )

    @jax.jit
    def gradients(qkv, arrays, d_out):
        return jax.vjp(lambda *qkv: call(*qkv, **inputs.keywords(arrays)), *qkv)[1](d_out)

    @jax.jit
    def differences(one, other):
        """Of each gradient, over its norm."""
        norm = lambda x: jnp.linalg.norm(x.astype(jnp.float32))
        return jnp.stack([norm(a.astype(jnp.float32) - b) / norm(b) for a, b in zip(one, other, strict=True)])

    given = inputs.qkv, inputs.arrays, inputs.d_out
    first, largest = gradients(*given), jnp.zeros(3)
    for _ in range(1000):
        largest = jnp.maximum(largest, differences(gradients(*given), first))
    of_q, *of_keys = map(float, largest)
    assert of_keys == [0, 0]
    assert of_q == 0 if deterministic else of_q < 1e-3
