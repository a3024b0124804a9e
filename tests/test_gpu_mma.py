"""The compiled kernels by mma.sync, named on any CUDA GPU: the table against float64 truth, reruns, forms of tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.backends.mma.config import Config, DecodeConfig, ForwardConfig
from tests import test_decode, test_paged_attention
from tests.cases import Case
from tests.test_gpu import KERNEL_CASES, LONG_CASES, RELATIVE_CASES, WIDE_CASES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", KERNEL_CASES + WIDE_CASES + LONG_CASES + RELATIVE_CASES, ids=str)
def test_kernels_are_accurate(case, check):
    check(case, "mma", gradients=True)


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
