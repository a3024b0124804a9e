"""The compiled kernels by mma.sync, named on any CUDA GPU: the table against float64 truth, reruns, forms of tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.backends.mma.config import Config, ForwardConfig
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
