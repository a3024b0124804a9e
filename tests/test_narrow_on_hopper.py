"""Keys and values of 8 bits in Hopper's forward kernel, whose load warpgroup converts them: more than 32 rows of a tile."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.shared_memory import swizzle
from pallas_fa.backends.hopper.config import Config, ForwardConfig
from pallas_fa.backends.hopper.decode.choose import applies
from pallas_fa.backends.hopper.decode.decode import decode
from pallas_fa.backends.hopper.forward.convert import convert
from pallas_fa.backends.hopper.forward.forward import forward
from pallas_fa.backends.hopper.support import reads_narrow
from pallas_fa.backends.mma import config as mma
from pallas_fa.backends.mma.copies import Copies
from pallas_fa.operands.pages import Paged
from pallas_fa.problem import normalise
from tests import test_paged_attention
from tests.abstract import problem_of_types
from tests.lowering import kernels
from tests.test_kernel_interpreted import assert_right_and_free_of_races, interpreted
from tests.test_mma_copies import emulate
from tests.test_mma_narrow import numbers

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
BOTTOM_RIGHT = masks.Causal(align="bottom_right")
RNG = np.random.default_rng(0)
B, S, N, K = 2, 328, 4, 2
LENGTHS = np.array([70, 323], np.int32)


def inputs(T, dtype=E4M3, wide=jnp.bfloat16, S=S, N=N, H=64, Hv=None):
    normal = lambda *shape: jnp.asarray(RNG.standard_normal(shape), jnp.float32)
    return normal(B, T, N, H).astype(wide), normal(B, S, K, H).astype(dtype), normal(B, S, K, Hv or H).astype(dtype)


PAIRS = Config(ForwardConfig(1, 64, q_block_pairs=1))
PERSISTENT = Config(ForwardConfig(2, 64, persistent_ctas=3, ping_pong=True, rescale_under_qk=True))
TOO_LARGE = "persistent", 256  # head dim, at which shared memory does not hold these tiles
# (queries, sizes and dtypes, keywords)
CALLS = {
    "causal": (200, {}, {"mask": masks.Causal()}),
    "lengths, float16": (
        130,
        dict(wide=jnp.float16, dtype=E5M2),
        {"key_value_seq_lengths": LENGTHS, "mask": BOTTOM_RIGHT},
    ),
    "H=128, Hv=64, no keys": (72, dict(H=128, Hv=64), {"key_value_seq_lengths": np.array([0, 300], np.int32)}),
    "H=64, Hv=128, an odd number of queries": (71, dict(Hv=128, dtype=E5M2), {"mask": BOTTOM_RIGHT}),
    "pairs, empty rows": (200, {}, {"mask": BOTTOM_RIGHT, "key_value_seq_lengths": LENGTHS, "config": PAIRS}),
    "persistent": (260, {}, {"key_value_seq_lengths": LENGTHS, "config": PERSISTENT}),
    "every kind of array": (
        72,
        {},
        {
            "bias": RNG.standard_normal((N, 72, S)).astype(np.float32),
            "score": scores.SoftCap(20.0).then(scores.Alibi(np.linspace(0.01, 0.1, N, dtype=np.float32))),
            "mask": masks.Segments(np.arange(72) // 30 + 1, np.arange(S) // 100),
        },
    ),
    "dropout and sinks": (
        72,
        {},
        {"dropout_rate": 0.2, "dropout_key": jax.random.key(3), "sinks": np.arange(N, dtype=np.float32)},
    ),
    "rows of heads, in parts": (20, {}, {"mask": BOTTOM_RIGHT, "key_value_seq_lengths": LENGTHS}),
    "16 queries": (16, {}, {"mask": BOTTOM_RIGHT, "key_value_seq_lengths": LENGTHS}),
}


@pytest.mark.parametrize("name", CALLS)
def test_kernel_is_right_and_free_of_races(name):
    T, sizes, keywords = CALLS[name]
    problem, operands = normalise(*inputs(T, **sizes), **keywords)
    assert reads_narrow(problem, Gpu.visible())
    assert_right_and_free_of_races(problem, operands, decode if applies(problem) else forward)


@pytest.mark.parametrize(
    ("page", "layout", "T"), [(16, "PSKH", 20), (32, "KPSH", 100), (64, "PSKH", 300), (256, "KPSH", 72)]
)
def test_kernel_in_pages(page, layout, T, rng):
    (q, *pages, table, lengths), _ = test_paged_attention.call_in_bfloat16(rng, page, layout, T, 512)
    pages = test_paged_attention.checked(q, *(jnp.asarray(x).astype(E4M3) for x in pages), table, layout)
    problem, operands = normalise(q, *pages, key_value_seq_lengths=lengths, mask=BOTTOM_RIGHT)
    assert reads_narrow(problem, Gpu.visible())
    assert_right_and_free_of_races(problem, operands, decode if applies(problem) else forward)


def test_kernel_of_interleaved_pages(rng):
    q = jnp.asarray(rng.standard_normal((2, 100, 4, 64)), jnp.bfloat16)
    pages = jnp.asarray(rng.standard_normal((8, 64, 4, 64))).astype(E4M3)
    keys, values = (Paged(pages, jnp.arange(8, dtype=jnp.int32).reshape(2, 4), interleaved=i) for i in (0, 1))
    lengths = np.array([110, 256], np.int32)
    assert_right_and_free_of_races(
        *normalise(q, keys, values, mask=BOTTOM_RIGHT, key_value_seq_lengths=lengths), forward
    )


def test_padding_may_hold_nan():
    q, k, v = inputs(72)
    padded = [x.at[0, LENGTHS[0] :].set(jnp.nan) for x in (k, v)]
    of = lambda k, v: interpreted(*normalise(q, k, v, key_value_seq_lengths=LENGTHS), forward)[0]
    for x, y in zip(of(*padded), of(k, v), strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.parametrize("wide", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(("rows", "dim", "first", "columns"), [(64, 64, 0, 64), (128, 128, 0, 128), (64, 192, 128, 64)])
def test_where_each_converted_number_lies(wide, rows, dim, first, columns):
    """As the lowered kernel computes addresses, and as Pallas reads tiles."""
    dtype, source_width, wide = ml_dtypes.float8_e4m3fn, 64 if dim % 128 else 128, np.dtype(wide)
    x, out = numbers(dtype, rows, dim), np.zeros((rows, columns), wide)

    def body(x, out, smem, narrow_smem):
        copies = Copies()
        copies.tile(x, narrow_smem, source_width)
        copies.wait()
        convert(narrow_smem, smem, first, source_width, 128, interpret=False)
        out[...] = plgpu.load(smem, layout=plgpu.Layout.SMEM_GMEM_COPY((rows, columns), wide, 128))

    of = lambda shape, dtype, width: plgpu.SMEM(shape, dtype, transforms=swizzle(dtype, width))
    emulate(body, 1, x, out, of(out.shape, wide, 128), narrow_smem=of(x.shape, dtype, source_width))
    np.testing.assert_array_equal(out, x[:, first : first + columns].astype(wide))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
@pytest.mark.parametrize("H, Hv", [(64, 64), (128, 256), (256, 256), (192, 128)])
def test_lowers(dtype, wide, H, Hv):
    attend = functools.partial(pallas_fa.dot_product_attention, implementation="mosaic_gpu", mask=BOTTOM_RIGHT)
    q, k, v = inputs(72, dtype, H=H, Hv=Hv)
    assert kernels(attend, q.astype(wide), k, v) == 1
    assert reads_narrow(problem_of_types(q, k, v), Gpu.visible())
    assert "converts" not in pallas_fa.explain(q, k, v)


@pytest.mark.parametrize(
    "sizes",
    [dict(S=330), dict(H=80), dict(H=512), dict(wide=jnp.float32), dict(dtype=jnp.float8_e4m3fnuz)],
    ids=str,
)
def test_what_the_kernel_does_not_read(sizes):
    """XLA converts it, or does the call."""
    q, k, v = inputs(72, **sizes)
    assert not reads_narrow(problem_of_types(q, k, v), Gpu.visible())
    assert "converts keys and values to" in pallas_fa.explain(q, k, v) or "H" in sizes


@pytest.mark.parametrize("tiles", [ForwardConfig(3, 64), ForwardConfig(2, 80)], ids=str)
def test_tiles_that_the_kernel_cannot_convert_are_given_converted_keys(tiles):
    q, k, v = inputs(72)
    attend = functools.partial(pallas_fa.dot_product_attention, implementation="mosaic_gpu", config=Config(tiles))
    assert not reads_narrow(problem_of_types(q, k, v, config=Config(tiles)), Gpu.visible())
    assert kernels(attend, q, k, v) == 1


@pytest.mark.parametrize("tiles", [ForwardConfig(3, 64), ForwardConfig(2, 80)], ids=str)
def test_such_tiles_are_refused_in_pages(tiles):
    q, pages = jnp.zeros((B, 72, N, 64), jnp.bfloat16), jnp.zeros((8, 64, K, 64), E4M3)
    table, lengths = np.zeros((B, 4), np.int32), np.full(B, 200, np.int32)
    attend = functools.partial(pallas_fa.paged_attention, q, pages, pages, table, lengths, implementation="mosaic_gpu")
    with pytest.raises(
        NotImplementedError, match="float8_e4m3fn keys in pages; it converts them for tiles of one or two"
    ):
        jax.eval_shape(functools.partial(attend, config=Config(tiles)))


def test_tiles_of_other_kernels_are_refused_as_elsewhere():
    said = pallas_fa.explain(*inputs(72), config=mma.Config(forward=mma.ForwardConfig(1, 64, 64)))
    assert said.startswith("mosaic_gpu: cannot") and "it takes a pallas_fa.mosaic_gpu.config.Config" in said


def test_few_rows_are_left_to_mma():
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(8))
    assert "few queries by mma.sync" in pallas_fa.explain(q, k, v)
    assert "few queries by mma.sync" not in pallas_fa.explain(*inputs(20))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "H"), [(name, H) for name in CALLS for H in (64, 128, 256) if (name, H) != TOO_LARGE])
def test_the_compiled_kernel_is_accurate(name, H):
    T, _, keywords = CALLS[name]
    config = keywords.get("config")
    keywords = {key: x for key, x in keywords.items() if key != "config" and not key.startswith("dropout")}
    for dtype, wide in ((E4M3, jnp.bfloat16), (E5M2, jnp.float16)):
        q, k, v = inputs(T, dtype, wide, H=H, Hv=H)
        attend = functools.partial(pallas_fa.dot_product_attention, return_residual=True, **keywords)
        want = attend(*(x.astype(jnp.float32) for x in (q, k, v)), implementation="reference")
        got = attend(q, k, v, implementation="mosaic_gpu", config=config)
        for x, y in zip(got, want, strict=True):
            np.testing.assert_allclose(np.asarray(x, np.float32), np.asarray(y, np.float32), atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [16, 20, 300])
@pytest.mark.parametrize(("page", "layout"), [(16, "PSKH"), (64, "KPSH"), (256, "PSKH")])
def test_the_compiled_kernel_is_accurate_in_pages(page, layout, T, rng):
    (q, *pages, table, lengths), (_, k, v) = test_paged_attention.call_in_bfloat16(rng, page, layout, T, 1024, H=128)
    pages = [jnp.asarray(x).astype(E4M3) for x in pages]
    got = pallas_fa.paged_attention(
        q, *pages, table, lengths, mask=BOTTOM_RIGHT, page_layout=layout, implementation="mosaic_gpu"
    )
    k, v = (x.astype(E4M3).astype(jnp.float32) for x in (k, v))
    want = pallas_fa.dot_product_attention(
        q.astype(jnp.float32), k, v, mask=BOTTOM_RIGHT, key_value_seq_lengths=lengths, implementation="reference"
    )
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2)
