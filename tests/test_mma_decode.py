"""Few queries by mma.sync: the kernel interpreted, for keys in one piece and in pages, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.few_queries import taken_by_mma
from pallas_fa.backends.mma.config import Config, DecodeConfig, ForwardConfig
from pallas_fa.backends.mma.decode.choose import choose
from pallas_fa.backends.mma.decode.decode import decode
from pallas_fa.problem import normalise
from tests import test_decode as of_hopper
from tests import test_paged_attention as paged
from tests.abstract import problem_of_types
from tests.lowering import kernels
from tests.test_kernel_interpreted import assert_right_and_free_of_races, interpreted

RNG = np.random.default_rng(0)
# Each query of up to 16, 32, 64 in four, two, one part of a key block; None: those of the table, with keys in parts.
TILES = DecodeConfig(16, 64, 2), DecodeConfig(32, 64, 2, kv_splits=3), DecodeConfig(64, 32, 3), None
CALLS = {
    name: (call, TILES[i % 4]) for i, (name, call) in enumerate(of_hopper.CALLS.items()) if "config" not in call[1]
}


def is_right_and_free_of_races(problem, operands):
    assert taken_by_mma(problem)
    assert_right_and_free_of_races(problem, operands, decode)


@pytest.mark.parametrize("name", CALLS)
def test_keys_in_one_piece(name):
    (T, keywords), tiles = CALLS[name]
    keywords = keywords if name == "relative bias" else {**keywords, "config": Config(decode=tiles)}
    is_right_and_free_of_races(*normalise(*of_hopper.inputs(T, H=72, Hv=40), **keywords))


PAGED = paged.CALLS | {
    "40": (40, "PSKH", 1, {}),
    "8, a prompt": (8, "KPSH", 70, {"mask": of_hopper.BOTTOM_RIGHT}),
}


@pytest.mark.parametrize("name", PAGED)
def test_keys_in_pages(name, rng):
    page, layout, T, keywords = PAGED[name]
    S = 1024 if "bias" in keywords else -(-(2 * 64 + 16) // page) * page
    (q, *pages, lengths), _ = paged.call_in_bfloat16(rng, page, layout, T, S)
    is_right_and_free_of_races(
        *normalise(q, *paged.checked(q, *pages, layout), key_value_seq_lengths=lengths, **keywords)
    )


def test_many_rows_are_several_query_blocks():
    q, k, v = of_hopper.inputs(16, N=6, K=1)
    is_right_and_free_of_races(*normalise(q, k, v, mask=of_hopper.BOTTOM_RIGHT))


@pytest.mark.parametrize("K", [2, of_hopper.N])
def test_the_other_layout(K):
    of_hopper.assert_alike_in_both_layouts(decode, K, config=Config(decode=TILES[0]))


def test_padding_may_hold_nan():
    q, k, v = of_hopper.inputs(2, N=2, K=1)
    padded = [x.at[0, of_hopper.LENGTHS[0] :].set(jnp.nan) for x in (k, v)]
    common = {"key_value_seq_lengths": of_hopper.LENGTHS, "config": Config(decode=TILES[0])}
    of = lambda k, v: interpreted(*normalise(q, k, v, **common), decode)[0]
    for x, y in zip(of(*padded), of(k, v), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


def test_lowers():
    """With arrays of every kind of shape, and in pages of rows that are fewer than those of a part."""
    shape = jax.ShapeDtypeStruct
    q, k, v = (shape(x.shape, x.dtype) for x in of_hopper.inputs(2, H=128, Hv=256))
    call = lambda *x: pallas_fa.dot_product_attention(*x, implementation="mma", **of_hopper.CALLS["by head"][1])
    assert kernels(call, q, k, v) == 1
    pages = shape((40, 40, 2, 128), jnp.bfloat16)
    call = lambda *x: pallas_fa.paged_attention(*x, implementation="mma")
    assert kernels(call, q, pages, pages, shape((2, 16), jnp.int32), shape((2,), jnp.int32)) == 1


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32"])
@pytest.mark.parametrize("tiles", TILES[:3], ids=str)
def test_arrays_of_every_width_lower(dtype, tiles):
    """Pallas loads no tiles whose rows have 16 bytes."""
    x = RNG.standard_normal((3, of_hopper.S))
    keywords = {"mask": x < 0.5} if dtype == "bool" else {"bias": jnp.asarray(x, dtype)}
    config = Config(decode=tiles)
    call = lambda *x: pallas_fa.dot_product_attention(*x, implementation="mma", config=config, **keywords)
    assert kernels(call, *of_hopper.inputs(3)) == 1


@pytest.mark.parametrize("capability, memory", [("8.0", 163), ("8.6", 99), ("9.0", 227)])
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("heads", [1, 8, 48])
def test_some_tiles_fit_every_gpu(capability, memory, H, heads):
    from pallas_fa.backends.gpu.shared_memory import fits
    from pallas_fa.backends.mma.decode.scratch import on_gpu

    gpu = Gpu(capability, 100, memory * 1024)
    q, k, v = of_hopper.inputs(1, N=heads, K=1, H=H, Hv=H)
    plan = choose(normalise(q, k, v)[0], gpu)
    assert fits(on_gpu(plan), gpu)
    assert plan.config.rows >= min(heads, 64)
    assert plan.config.kv_splits > 1  # two sequences do not fill a GPU


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(page=20), "pages of 20 rows; it loads pages of a multiple of 8"),
        (dict(H=60), "H=60 and Hv=60; it takes multiples of 8 of keys in pages"),
        (dict(config=Config(forward=ForwardConfig())), "and keys in pages; its kernel for them takes DecodeConfig"),
    ],
)
def test_what_the_kernel_does_not_take(changed, message):
    sizes = dict(page=16, T=1, H=64, config=None) | changed
    q = jnp.zeros((1, sizes["T"], 1, sizes["H"]), jnp.bfloat16)
    pages = jnp.zeros((2, sizes["page"], 1, sizes["H"]), jnp.bfloat16)
    arguments = q, pages, pages, jnp.zeros((1, 2), int), jnp.ones(1, int)
    with pytest.raises(NotImplementedError, match=message):
        pallas_fa.paged_attention(*arguments, implementation="mma", config=sizes["config"])


@pytest.mark.parametrize(("B", "stages"), [(64, 2), (32, 3), (1, 3)])
def test_many_sequences_have_three_ctas_on_a_multiprocessor(B, stages):
    q, k = (jax.ShapeDtypeStruct((B, *shape, 128), jnp.bfloat16) for shape in ((1, 32), (4096, 8)))
    assert choose(problem_of_types(q, k, k), Gpu("9.0", 132, 227 * 1024)).config.stages == stages


def test_more_queries_do_not_split_keys():
    with pytest.raises(NotImplementedError, match="T=17 is more than 16 queries"):
        pallas_fa.dot_product_attention(*of_hopper.inputs(17), implementation="mma", config=Config(decode=TILES[0]))
