"""Keys and values of 8 bits: what their conversion to the queries' dtype gives, on every backend, in caches and kernels."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import context_parallel, masks
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.mma import support as mma
from pallas_fa.backends.mma.config import Config, DecodeConfig
from pallas_fa.backends.mma.decode.decode import decode
from pallas_fa.cache import KeyValueCache, PagedCache
from pallas_fa.operands.pages import Paged
from pallas_fa.problem import normalise
from tests import test_decode, test_paged_attention
from tests.abstract import problem_of_types
from tests.lowering import kernels
from tests.test_kernel_interpreted import assert_right_and_free_of_races, interpreted

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
TILES = DecodeConfig(16, 64, 2), DecodeConfig(32, 64, 2, kv_splits=3), DecodeConfig(64, 32, 3), None
BOTTOM_RIGHT = masks.Causal(align="bottom_right")


def inputs(T, dtype=E4M3, **sizes):
    q, k, v = test_decode.inputs(T, **sizes)
    return q, k.astype(dtype), v.astype(dtype)


def float32(*arrays):
    return [np.asarray(x, np.float32) for x in arrays]


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2, jnp.float8_e4m3fnuz])
@pytest.mark.parametrize("wide", ["bfloat16", "float16", "float32"])
def test_is_attention_to_what_they_convert_to(implementation, dtype, wide, small_chunks):
    q, k, v = inputs(3, dtype, Hv=24)
    q = q.astype(wide)
    attend = functools.partial(
        pallas_fa.dot_product_attention,
        mask=BOTTOM_RIGHT,
        key_value_seq_lengths=test_decode.LENGTHS,
        return_residual=True,
    )
    want = attend(*float32(q, k, v), implementation="reference")
    got = attend(q, k, v, implementation=implementation)
    assert got[0].dtype == wide and got[1].dtype == jnp.float32
    for x, y in zip(float32(*got), want, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-6 if wide == "float32" else 2e-2)


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(key=E4M3), "key.dtype=float8_e4m3fn and value.dtype=bfloat16 differ.*both one of 8 bits"),
        (dict(key=E4M3, value=E5M2), "value.dtype=float8_e5m2 differ"),
        (dict(query=E4M3), "query.dtype=float8_e4m3fn, key.dtype=bfloat16"),
        (dict(query=E5M2, key=E4M3, value=E4M3), "query.dtype=float8_e5m2, key.dtype=float8_e4m3fn"),
        (dict(query=jnp.float32), "query.dtype=float32, key.dtype=bfloat16"),
    ],
)
def test_other_mixtures_are_refused(changed, message):
    arrays = dict(zip(("query", "key", "value"), test_decode.inputs(1), strict=True))
    with pytest.raises(ValueError, match=message):
        pallas_fa.dot_product_attention(**{name: x.astype(changed.get(name, x.dtype)) for name, x in arrays.items()})


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_gradients_are_refused(implementation):
    q, k, v = inputs(1)
    attend = lambda q: pallas_fa.dot_product_attention(q, k, v, implementation=implementation).sum()
    with pytest.raises(
        NotImplementedError, match="float8_e4m3fn keys and values are for inference.*of the queries' dtype"
    ):
        jax.grad(attend)(q)
    with pytest.raises(ValueError, match="forward_mode=True cannot be given with .*key.dtype=float8_e4m3fn"):
        pallas_fa.dot_product_attention(q, k, v, forward_mode=True)
    assert "because float8_e4m3fn keys and values are for inference" in pallas_fa.explain(q, k, v)


# ---- the kernel -----------------------------------------------------------------------------------------------------

CALLS = {
    name: (call, TILES[i % 4]) for i, (name, call) in enumerate(test_decode.CALLS.items()) if "config" not in call[1]
}


@pytest.mark.parametrize("name", CALLS)
def test_kernel_is_right_and_free_of_races(name):
    (T, keywords), tiles = CALLS[name]
    keywords = keywords if name == "relative bias" else {**keywords, "config": Config(decode=tiles)}
    dtype = E5M2 if T == 3 else E4M3
    assert_right_and_free_of_races(*normalise(*inputs(T, dtype, H=80, Hv=48), **keywords), decode)


PAGED = test_paged_attention.CALLS | {"16, a prompt": (16, "PSKH", 50, {"mask": BOTTOM_RIGHT})}


@pytest.mark.parametrize("name", PAGED)
def test_kernel_in_pages(name, rng):
    page, layout, T, keywords = PAGED[name]
    S = 1024 if "bias" in keywords else -(-(2 * 64 + 16) // page) * page
    (q, *pages, table, lengths), _ = test_paged_attention.call_in_bfloat16(rng, page, layout, T, S)
    pages = test_paged_attention.checked(q, *(jnp.asarray(x).astype(E4M3) for x in pages), table, layout)
    problem, operands = normalise(q, *pages, key_value_seq_lengths=lengths, **keywords)
    assert_right_and_free_of_races(problem, operands, decode)


def test_kernel_of_interleaved_pages(rng):
    q = jnp.asarray(rng.standard_normal((2, 3, 4, 64)), jnp.bfloat16)
    pages, table = (
        jnp.asarray(rng.standard_normal((6, 64, 4, 64))).astype(E4M3),
        jnp.arange(6, dtype=jnp.int32).reshape(2, 3),
    )
    keys, values = (Paged(pages, table, interleaved=i) for i in (0, 1))
    lengths = np.array([70, 192], np.int32)
    assert_right_and_free_of_races(
        *normalise(q, keys, values, mask=BOTTOM_RIGHT, key_value_seq_lengths=lengths), decode
    )


def test_padding_may_hold_nan():
    q, k, v = inputs(2, N=2, K=1)
    padded = [x.at[0, test_decode.LENGTHS[0] :].set(jnp.nan) for x in (k, v)]
    common = {"key_value_seq_lengths": test_decode.LENGTHS, "config": Config(decode=TILES[0])}
    of = lambda k, v: interpreted(*normalise(q, k, v, **common), decode)[0]
    for x, y in zip(of(*padded), of(k, v), strict=True):
        np.testing.assert_array_equal(*float32(x, y))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
@pytest.mark.parametrize("H, Hv", [(64, 64), (128, 256), (80, 48)])
def test_lowers(dtype, wide, H, Hv):
    q, k, v = inputs(2, dtype, H=H, Hv=Hv)
    for implementation in ("mma", "mosaic_gpu"):
        attend = functools.partial(pallas_fa.dot_product_attention, implementation=implementation)
        assert kernels(attend, q.astype(wide), k, v) == 1


# What is not read as it is, and why: (compute capability, sizes, reason).
CONVERTED = {
    "an older GPU": ("8.6", {}, "on a GPU of compute capability 8.6; it reads them from 8.9 on"),
    "GPUs that differ": ("9.0, 8.0", {}, "on a GPU of compute capability 9.0, 8.0; it reads them from 8.9 on"),
    "another dtype": ("8.9", dict(dtype=jnp.float8_e4m3fnuz), "float8_e4m3fnuz .*reads float8_e4m3fn and float8_e5m2"),
    "many queries": ("8.9", dict(T=65), "only its kernel for few queries reads them"),
    "head dims": ("8.9", dict(H=24), "head dims H=24 and Hv=24; it reads multiples of 16"),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_what_is_not_read_is_converted_once_but_in_pages(name):
    capability, sizes, reason = CONVERTED[name]
    given, gpu = dict(T=1, dtype=E4M3, H=64) | sizes, Gpu(capability, 100, 99 * 1024)
    shape = lambda *x: jax.ShapeDtypeStruct((*x, given["H"]), given["dtype"])
    q, k = jax.ShapeDtypeStruct((2, given["T"], 4, given["H"]), jnp.bfloat16), shape(2, 64, 2)
    found = mma.supports(problem_of_types(q, k, k), gpu)
    assert found.remark.startswith("converts keys and values to bfloat16 once") if mma.runs_on(gpu) else found.forward
    pages = Paged(shape(8, 16, 2), jax.ShapeDtypeStruct((2, 4), jnp.int32))
    in_pages = mma.supports(problem_of_types(q, pages, pages), gpu)
    if name == "many queries":  # which the kernel takes there
        assert in_pages.forward is None and "converts" not in (in_pages.remark or "")
    else:
        assert re.search(reason, in_pages.forward)


def test_many_queries_run_on_kernels():
    """A chunk of a prompt, against a cache of 8 bits."""
    q, k, v = inputs(200, H=20, Hv=20)
    for implementation in ("mma", "mosaic_gpu"):
        attend = functools.partial(pallas_fa.dot_product_attention, implementation=implementation, mask=BOTTOM_RIGHT)
        assert kernels(attend, q, k, v) == 1
    said = pallas_fa.explain(q, k, v).splitlines()[0]
    assert "mosaic_gpu: runs this call" in said and "converts keys and values to bfloat16 once" in said
    assert "converts" not in pallas_fa.explain(*inputs(1))


@pytest.mark.gpu
@pytest.mark.parametrize("H", [64, 128, 256])
@pytest.mark.parametrize("name", test_decode.CALLS)
def test_the_compiled_kernel_is_accurate(name, H):
    T, keywords = test_decode.CALLS[name]
    keywords = {key: x for key, x in keywords.items() if key != "config"}
    for dtype, wide in ((E4M3, "bfloat16"), (E5M2, "float16")):
        q, k, v = inputs(T, dtype, H=H, Hv=H)
        attend = functools.partial(pallas_fa.dot_product_attention, return_residual=True, **keywords)
        want = attend(*float32(q, k, v), implementation="reference")
        got = attend(q.astype(wide), k, v, implementation="mosaic_gpu")
        for x, y in zip(float32(*got), float32(*want), strict=True):
            np.testing.assert_allclose(x, y, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tiles", [*filter(None, TILES), DecodeConfig(16, 128, 3, kv_splits=5), DecodeConfig(64, 16, 2)], ids=str
)
@pytest.mark.parametrize("H, Hv", [(128, 64), (64, 64), (80, 48), (192, 256)])
def test_every_form_of_tiles_is_accurate(tiles, H, Hv):
    q, k, v = inputs(7, H=H, Hv=Hv)
    attend = functools.partial(pallas_fa.dot_product_attention, mask=BOTTOM_RIGHT)
    want = attend(*float32(q, k, v), implementation="reference")
    got = attend(q, k, v, implementation="mma", config=Config(decode=tiles))
    np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, jnp.float8_e4m3fnuz])
def test_keys_that_are_converted_once(dtype):
    q, k, v = inputs(200, dtype, H=72, Hv=40)
    attend = functools.partial(pallas_fa.dot_product_attention, mask=BOTTOM_RIGHT)
    want = attend(*float32(q, k, v), implementation="reference")
    for implementation in ("mosaic_gpu", "mma"):
        got = attend(q, k, v, implementation=implementation)
        np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2)


# ---- caches ---------------------------------------------------------------------------------------------------------

B, S, N, K, H, PAGE = 2, 16, 4, 2, 16, 4


def contiguous(**keywords):
    return KeyValueCache.empty(B, S, K, H, **keywords)


def paged(**keywords):
    cache = PagedCache.empty(B, S // PAGE, B * S // PAGE, PAGE, K, H, **keywords)
    return dataclasses.replace(cache, page_table=jnp.arange(B * S // PAGE, dtype=jnp.int32).reshape(B, -1))


def rows(cache, count):
    """Keys and values [B, count, K, H] of either cache."""
    names = ("key", "value") if isinstance(cache, KeyValueCache) else ("key_pages", "value_pages")
    return [getattr(cache, name).reshape(B, S, K, H)[:, :count] for name in names]


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("scales", [{}, dict(key_scale=0.25, value_scale=np.float32(0.01))])
def test_a_cache_divides_rows_and_multiplies_results(make, scales, rng):
    draw = lambda heads, size: jnp.asarray(size * rng.standard_normal((B, 5, heads, H)), jnp.bfloat16)
    q, k, v = draw(N, 1), draw(K, 100), draw(K, 5)
    key_scale, value_scale = (np.float32(scales.get(name, 1)) for name in ("key_scale", "value_scale"))
    cache = jax.jit(lambda cache, *rows: cache.append(*rows), donate_argnums=0)(make(dtype=E4M3, **scales), k, v)
    for kept, x, scale in zip(rows(cache, 5), (k, v), (key_scale, value_scale), strict=True):
        np.testing.assert_array_equal(*float32(kept, (x.astype(jnp.float32) / scale).clip(-448, 448).astype(E4M3)))
    wide = [x * scale for x, scale in zip(float32(*rows(cache, 5)), (key_scale, value_scale), strict=True)]
    for given in ({}, {"scale": 0.01}, {"scale": jnp.float32(0.01), "logits_soft_cap": 5.0}):
        got, lse = jax.jit(lambda cache, q, given=given: cache.attend(q, return_residual=True, **given))(cache, q)
        want, want_lse = pallas_fa.dot_product_attention(
            *float32(q), *wide, is_causal=True, implementation="reference", return_residual=True, **given
        )
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float32), want, atol=2e-2 * float(abs(want).max()))
        np.testing.assert_allclose(lse, want_lse, rtol=1e-3, atol=1e-3)


def test_a_scale_for_both_may_be_donated():
    scale = jnp.float32(2)
    cache = contiguous(dtype=E4M3, key_scale=scale, value_scale=scale)
    rows = jnp.ones((B, 1, K, H))
    cache = jax.jit(lambda cache: cache.append(rows, rows), donate_argnums=0)(cache)
    assert cache.key[0, 0, 0, 0] == 0.5 and scale == 2


def test_rows_past_the_largest_number_become_it():
    x = jnp.array([1e6, -jnp.inf, jnp.nan, 3.0] * 4)[None, None, None].repeat(B, 0).repeat(K, 2)
    cache = contiguous(dtype=E4M3).append(x, x)
    np.testing.assert_array_equal(np.asarray(cache.key[0, 0, 0, :4], np.float32), [448, -448, np.nan, 3])
    as_they_are = contiguous(dtype=E4M3, key_scale=2.0).append(x.astype(E4M3), x.astype(E4M3))  # of 8 bits already
    np.testing.assert_array_equal(*float32(as_they_are.key[:, :1], x.astype(E4M3)))


def test_what_append_gives_may_be_donated():
    cache, x = contiguous(dtype=E4M3, key_scale=2.0), jnp.ones((B, 1, K, H))
    jax.jit(lambda cache: cache.append(x, x), donate_argnums=0)(cache.append(x, x))
    assert (rows(cache.append(x, x), 1)[0] == 0.5).all()


def test_a_scale_of_an_empty_prompt_is_one(rng):
    k = jnp.asarray(rng.standard_normal((B, 2, K, H)), jnp.float32)
    scaled = contiguous(dtype=E4M3, key_scale=abs(0 * k).max(), value_scale=jnp.float32(1e-45)).append(k, k)
    plain = contiguous(dtype=E4M3).append(k, k)
    q = jnp.ones((B, 1, N, H))
    np.testing.assert_allclose(scaled.attend(q), plain.attend(q), rtol=1e-6)


@pytest.mark.parametrize("scale", [0.5, np.float16(0.5), np.int64(1), jnp.bfloat16(0.5), np.array(0.5, np.float32)])
def test_strict_promotion(scale):
    with jax.numpy_dtype_promotion("strict"):
        cache, x = contiguous(dtype=E4M3, key_scale=0.5, value_scale=0.5), jnp.ones((B, 1, K, H), jnp.bfloat16)
        cache.append(x, x).attend(jnp.ones((B, 1, N, H), jnp.bfloat16), scale=scale)


def test_float64_keeps_its_digits(rng):
    with jax.enable_x64(True):
        q, x = (jnp.asarray(rng.standard_normal((1, 4, heads, 24))) for heads in (2, 1))
        cache = KeyValueCache.empty(1, 4, 1, 24, dtype=E4M3).append(x, x)
        scaled = dataclasses.replace(cache, key_scale=1.0, value_scale=1.0).attend(q)
        np.testing.assert_allclose(scaled, cache.attend(q), rtol=1e-14)


def test_output_of_8_bits_is_saturated():
    x = jnp.full((B, 1, K, H), 300.0)
    out = contiguous(dtype=E4M3, value_scale=10.0).append(x, 10 * x).attend(jnp.ones((B, 1, N, H), E4M3))
    assert (np.asarray(out, np.float32) == 448).all()


@pytest.mark.parametrize("dtype", [ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn])
def test_fewer_bits_are_refused(dtype):
    """Without an operation on them, which XLA may not have."""
    x = np.zeros((B, 1, K, H), dtype)
    with pytest.raises(ValueError, match=f"key.dtype={np.dtype(dtype)} .*both one of 8 bits"):
        pallas_fa.dot_product_attention(np.zeros((B, 1, N, H), np.float32), x, x)
    none = np.zeros(B, np.int32)
    with pytest.raises(ValueError, match="nothing is converted silently"):
        KeyValueCache(key=x, value=x, lengths=none, dropped=none).append(*[np.zeros((B, 1, K, H), np.float32)] * 2)


def test_symbolic_sizes_and_wrong_tiles_are_refused_as_elsewhere():
    (T,) = jax.export.symbolic_shape("t")
    q, k = jax.ShapeDtypeStruct((2, T, 4, 16), jnp.bfloat16), jax.ShapeDtypeStruct((2, 32, 2, 16), E4M3)
    export = lambda **keywords: jax.export.export(
        jax.jit(lambda q, k: pallas_fa.dot_product_attention(q, k, k, **keywords)), platforms=["cpu", "cuda"]
    )(q, k)
    export()
    with pytest.raises(NotImplementedError, match="a symbolic size; its kernels are made for sizes that are known"):
        export(implementation="mosaic_gpu")
    q, k, v = inputs(1)
    assert "config=5; it takes a" in pallas_fa.explain(q, k, v, implementation="xla", config=5)
    assert "config=DecodeConfig" in pallas_fa.explain(q, k, v, implementation="mma", config=TILES[0])


WRONG_SCALES = {
    "of 16 bits": (
        dict(key_scale=1.0),
        ValueError,
        "key_scale=1.0 is for caches of 8 bits, and this one holds bfloat16",
    ),
    "negative": (
        dict(dtype=E4M3, value_scale=-1),
        ValueError,
        "value_scale=-1 must be positive, and normal and finite",
    ),
    "infinite": (dict(dtype=E4M3, value_scale=float("inf")), ValueError, "value_scale=inf must be positive"),
    "too small": (dict(dtype=E4M3, key_scale=1e-50), ValueError, "key_scale=1e-50 must be positive, and normal"),
    "a shape": (dict(dtype=E4M3, key_scale=jax.ShapeDtypeStruct((), np.float32)), TypeError, "key_scale=.*no values"),
    "by head": (dict(dtype=E5M2, key_scale=jnp.ones(K)), TypeError, "must be a number or a scalar float array"),
    "text": (dict(dtype=E5M2, key_scale="1"), TypeError, "key_scale='1' must be a number"),
}


@pytest.mark.parametrize("make", [contiguous, paged])
@pytest.mark.parametrize("name", WRONG_SCALES)
def test_wrong_scales(make, name):
    keywords, error, message = WRONG_SCALES[name]
    with pytest.raises(error, match=message):
        make(**keywords)


def test_a_wrong_factor_of_logits_is_an_error():
    cache = contiguous(dtype=E4M3, key_scale=2.0)
    for wrong in (float("nan"), "1", jnp.ones(2)):
        with pytest.raises((ValueError, TypeError), match="scale="):
            cache.attend(jnp.ones((B, 1, N, H)), scale=wrong)
    with pytest.raises(ValueError, match="different head dims H"):
        cache.attend(jnp.ones((B, 1, N, 0)))


# ---- over devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attend", [context_parallel.ring_attention, context_parallel.all_to_all_attention])
def test_training_over_devices_refuses_them(attend):
    mesh, spec = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)), P(None, "x")
    run = jax.shard_map(
        functools.partial(attend, axis_name="x", placement="contiguous"),
        mesh=mesh,
        in_specs=(spec,) * 3,
        out_specs=spec,
        check_vma=False,
    )
    q, k = jnp.ones((1, 8, 2, 8), jnp.bfloat16), jnp.ones((1, 8, 2, 8), E4M3)
    with pytest.raises(ValueError, match="key.dtype=float8_e4m3fn must be query.dtype=bfloat16 here.*decode_attention"):
        run(q, k, k)


def test_a_sharded_cache():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    q, k, v = inputs(1, S=64)
    cut = P(None, "x")
    run = jax.shard_map(
        functools.partial(context_parallel.decode_attention, axis_name="x"),
        mesh=mesh,
        in_specs=(P(), cut, cut),
        out_specs=P(),
        check_vma=False,
    )
    want = pallas_fa.dot_product_attention(*float32(q, k, v), implementation="reference")
    np.testing.assert_allclose(*float32(run(q, k, v), want), atol=2e-2)
