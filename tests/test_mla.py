"""Latent attention with absorbed weights: against its definition, the kernel interpreted, lowered for CUDA, and on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import mla, mla_decode_attention
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper.mla import mla as kernel
from pallas_fa.backends.hopper.mla.plan import MlaPlan
from tests import test_paged_attention
from tests.lowering import kernels
from tests.test_kernel_interpreted import assert_right_and_free_of_races

RNG = np.random.default_rng(0)
SCALE = 192**-0.5
H, HV = 576, 512


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def defined(query, cache, lengths, value_dim):
    """(out, lse) of [B, T, N, H] and [B, S, H], row by row in float64, with queries at the ends of the lengths."""
    query, cache = (np.asarray(x, np.float64) for x in (query, cache))
    out, lse = np.zeros((*query.shape[:-1], value_dim)), np.full(query.shape[:-1], -np.inf)
    for b, t, n in np.ndindex(lse.shape):
        seen = cache[b, : max(0, lengths[b] - query.shape[1] + t + 1)]
        if len(seen):
            x = SCALE * (seen @ query[b, t, n])
            lse[b, t, n] = np.log(np.exp(x).sum())
            out[b, t, n] = np.exp(x - lse[b, t, n]) @ seen[:, :value_dim]
    return out, lse


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("T", [1, 3])
def test_is_its_definition(implementation, T):
    lengths = np.array([7, 40, 0], np.int32)
    query, cache = normal(3, T, 4, 24), normal(3, 40, 24)
    padding = np.arange(40)[None, :, None] >= lengths[:, None, None]
    options = dict(scale=SCALE, value_dim=16, implementation=implementation, return_residual=True)
    call = jax.jit(functools.partial(mla_decode_attention, **options))
    out, lse = call(query, jnp.where(padding, jnp.nan, cache), lengths=lengths)
    for got, want in zip((out, lse), defined(query, cache, lengths, 16), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)
    # Without batch dims, and without lengths.
    alone = call(query[1], cache[1])
    for got, want in zip(alone, (out, lse), strict=True):
        np.testing.assert_allclose(got, want[1], atol=2e-6)


def test_the_cache_gets_the_gradients_of_keys_and_of_values():
    query, cache = normal(2, 2, 4, 24), normal(2, 10, 24)

    def gradients(implementation):
        call = dict(scale=SCALE, value_dim=16, lengths=jnp.array([4, 10]), implementation=implementation)
        return jax.jit(jax.grad(lambda *x: jnp.sin(mla_decode_attention(*x, **call)).sum(), (0, 1)))(query, cache)

    for got, want in zip(gradients(None), gradients("reference"), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


# (B, T, S, N, lengths, parts of the keys)
INTERPRETED = {
    "one part": (1, 1, 200, 16, None, 1),
    "two parts, no keys": (2, 1, 384, 72, [0, 300], 2),
    "queries, lengths": (2, 2, 200, 8, [70, 200], 1),
    "fewer keys than parts": (1, 3, 256, 8, [100], 3),
}


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted_kernel_is_right_and_free_of_races(name, monkeypatch):
    B, T, S, N, lengths, splits = INTERPRETED[name]
    query, cache = normal(B, T, N, H, dtype=jnp.bfloat16), normal(B, S, H, dtype=jnp.bfloat16)
    if lengths is not None:
        padding = np.arange(S)[None, :, None] >= np.array(lengths)[:, None, None]
        cache, lengths = jnp.where(padding, jnp.nan, cache), np.array(lengths, np.int32)
    monkeypatch.setattr(MlaPlan, "of", lambda problem, gpu, interpret: MlaPlan(problem, splits, interpret))
    problem, operands = mla._normalise(query, cache, scale=SCALE, lengths=lengths)
    assert_right_and_free_of_races(problem, operands, kernel.attention)


def in_pages(rng, cache, lengths, page):
    """Pages of a cache and their table, as in `test_paged_attention`: NaN and no page's number past the lengths."""
    pages, _, table = test_paged_attention.in_pages(rng, *[np.asarray(cache)[:, :, None]] * 2, lengths, page)
    return jnp.asarray(pages[:, :, 0]), table


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("page", [4, 16])
def test_in_pages_it_is_the_same(implementation, page, rng, small_chunks):
    lengths = np.array([7, 48, 0], np.int32)
    query, cache = normal(3, 2, 4, 24), normal(3, 48, 24)
    pages, table = in_pages(rng, cache, lengths, page)
    options = dict(scale=SCALE, value_dim=16, implementation=implementation, return_residual=True)
    call = jax.jit(functools.partial(mla_decode_attention, **options))
    got, want = call(query, pages, lengths=lengths, page_table=table), call(query, cache, lengths=lengths)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6)


@pytest.mark.parametrize("page, T, S, splits", [(16, 2, 208, 1), (64, 1, 320, 2), (192, 1, 384, 1)])
def test_interpreted_kernel_in_pages(page, T, S, splits, rng, monkeypatch):
    lengths = np.array([S - 30, 70], np.int32)
    query, cache = normal(2, T, 8, H, dtype=jnp.bfloat16), normal(2, S, H, dtype=jnp.bfloat16)
    pages, table = in_pages(rng, cache, lengths, page)
    monkeypatch.setattr(MlaPlan, "of", lambda problem, gpu, interpret: MlaPlan(problem, splits, interpret))
    problem, operands = mla._normalise(query, pages, scale=SCALE, lengths=lengths, page_table=table)
    assert_right_and_free_of_races(problem, operands, kernel.attention)


def growing(growth, B, S, N):
    """(query, cache) whose logits, in base 2, grow from one block of 64 keys to the next that is visited.

    Pairs of blocks are visited from right to left; the left one of a pair is the first warpgroup's. It has the larger
    logits for heads 0 and 1 of each four, the other for 2 and 3; for odd heads logits grow only so far as the middle. The
    columns that say so are no values.
    """
    query, cache = (np.array(normal(*shape)) for shape in ((B, 1, N, H), (B, S, H)))
    visit = np.arange(S)[::-1] // 64
    rises = [x ^ swapped for swapped in (0, 1) for x in (visit, np.minimum(visit, visit[0] - visit))]
    query[..., -4:] = np.eye(4)[np.arange(N) % 4] / SCALE
    cache[..., -4:] = growth * np.log(2) * np.stack(rises, axis=-1)
    return tuple(jnp.asarray(x, jnp.bfloat16) for x in (query, cache))


@pytest.mark.parametrize("growth", [11, 25, 62, 300])
def test_maxima_that_grow(growth, monkeypatch):
    """By less than `LAG` a block, which adds up, and by more; where probabilities would overflow, too."""
    monkeypatch.setattr(MlaPlan, "of", lambda problem, gpu, interpret: MlaPlan(problem, 1, interpret))
    problem, operands = mla._normalise(*growing(growth, 1, 512, 8), scale=SCALE)
    assert_right_and_free_of_races(problem, operands, kernel.attention)


SHAPES = jax.ShapeDtypeStruct((64, 1, 128, H), jnp.bfloat16), jax.ShapeDtypeStruct((64, 8192, H), jnp.bfloat16)
LENGTHS = jax.ShapeDtypeStruct((64,), jnp.int32)


def test_the_kernel_reads_one_array():
    def call(implementation):
        return lambda q, c, lengths: mla_decode_attention(
            q, c, scale=SCALE, lengths=lengths, implementation=implementation
        )

    assert kernels(call("mosaic_gpu"), *SHAPES, LENGTHS) == kernels(call(None), *SHAPES, LENGTHS) == 1
    told = mla.explain(*SHAPES, scale=SCALE)
    assert "mosaic_gpu: runs this call where it is lowered for a CUDA GPU" in told


def test_parts_fill_the_gpu():
    def splits(B, S):
        problems = []
        shapes = jax.ShapeDtypeStruct((B, 1, 128, H), jnp.bfloat16), jax.ShapeDtypeStruct((B, S, H), jnp.bfloat16)
        jax.eval_shape(lambda *x: problems.append(mla._normalise(*x, scale=SCALE)[0]), *shapes)
        return MlaPlan.of(problems[0], Gpu("9.0", 132, 0)).kv_splits

    assert splits(64, 8192) == 1
    assert splits(1, 8192) > 16
    assert splits(1, 64) == 1


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"cache": normal(2, 8, 1, H)}, ValueError, r"cache.shape=\(2, 8, 1, 576\).*no dim of heads"),
        ({"cache": normal(2, 8, HV)}, ValueError, "the same"),
        ({"query": normal(2, 4, H)}, ValueError, "must be"),
        ({"scale": jnp.float32(1)}, TypeError, "known while tracing"),
        ({"value_dim": 577}, ValueError, "value_dim=577"),
        ({"lengths": np.array([3], np.int32)}, ValueError, r"^lengths.shape=\(1,\) must be \[\*B\] = \(2,\)"),
        ({"cache": normal(2, 8, H).astype(jnp.float16)}, ValueError, "query.dtype=float32 and cache.dtype=float16"),
        ({"scale": float("nan")}, ValueError, "scale=nan must be finite in the dtype of logits.* Pass"),
        ({"scale": 1e300}, ValueError, r"scale=1e\+300 must be finite in the dtype of logits.* Pass"),
        ({"return_residual": 1}, TypeError, "return_residual=1 must be True or False"),
        ({"cache": None}, TypeError, r"cache=None is a NoneType; it must be a float array \[\*B, S, H\]"),
        ({"value_dim": True}, ValueError, "value_dim=True"),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "float32 inputs"),
        ({"implementation": "mosaic_gpu", "value_dim": 64}, NotImplementedError, "it takes 576 and 512"),
    ],
)
def test_errors_teach(changes, error, match):
    call = dict(query=normal(2, 1, 4, H), cache=normal(2, 8, H), scale=SCALE) | changes
    with pytest.raises(error, match=match):
        pallas_fa.mla_decode_attention(call.pop("query"), call.pop("cache"), **call)


WRONG_PAGES = {
    "a dim of heads": (
        dict(cache=normal(6, 16, 1, H)),
        r"cache.shape=\(6, 16, 1, 576\).* pages \[P, page, H\].*no dim of heads",
    ),
    "no lengths": (dict(lengths=None), "lengths=None with page_table.*jnp.full"),
    "a table of others": (dict(page_table=np.zeros((3, 2), np.int32)), "with B=2 sequences"),
    "two batch dims": (dict(query=normal(1, 2, 1, 4, H)), r"must be \[B, T, N, H\]"),
    "float lengths": (dict(lengths=np.zeros(2)), "^lengths.dtype=float64 must be an integer"),
}


@pytest.mark.parametrize("name", WRONG_PAGES)
def test_errors_of_pages_teach(name):
    changes, match = WRONG_PAGES[name]
    right = dict(query=normal(2, 1, 4, H), cache=normal(6, 16, H), lengths=np.array([3, 20]))
    call = right | dict(page_table=np.zeros((2, 2), np.int32), scale=SCALE) | changes
    with pytest.raises((ValueError, TypeError), match=match):
        mla_decode_attention(call.pop("query"), call.pop("cache"), **call)


def test_pages_are_read_by_the_kernel_where_it_takes_them():
    shape = jax.ShapeDtypeStruct
    query, lengths = shape((2, 1, 128, H), jnp.bfloat16), shape((2,), jnp.int32)
    table = shape((2, 16), jnp.int32)
    for page, told in ((64, "mosaic_gpu: runs this call"), (48, "mosaic_gpu: cannot: pages of 48 rows")):
        pages = shape((40, page, H), jnp.bfloat16)
        assert told in mla.explain(query, pages, scale=SCALE, lengths=lengths, page_table=table)
    call = lambda q, c, n, t: mla_decode_attention(q, c, scale=SCALE, lengths=n, page_table=t)
    assert kernels(call, query, shape((40, 16, H), jnp.bfloat16), lengths, table) == 1
    with pytest.raises(NotImplementedError, match="keys and values in pages are for inference"):
        given = dict(scale=SCALE, lengths=np.array([3]), page_table=np.zeros((1, 1), np.int32), value_dim=8)
        jax.grad(lambda q: mla_decode_attention(q, normal(2, 16, 16), **given).sum())(normal(1, 1, 2, 16))


@pytest.mark.gpu
@pytest.mark.parametrize("page", [16, 64, 256])
def test_compiled_kernel_in_pages(page, rng):
    lengths = np.array([1000, 0, 2048], np.int32)
    query, cache = normal(3, 2, 128, H, dtype=jnp.bfloat16), normal(3, 2048, H, dtype=jnp.bfloat16)
    pages, table = in_pages(rng, cache, lengths, page)
    call = jax.jit(
        functools.partial(mla_decode_attention, scale=SCALE, return_residual=True, implementation="mosaic_gpu")
    )
    got, want = call(query, pages, lengths=lengths, page_table=table), call(query, cache, lengths=lengths)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("B", "T", "S", "N", "lengths"),
    [(64, 1, 2048, 128, None), (2, 1, 4096, 128, [0, 4000]), (3, 4, 1000, 16, [1, 70, 1000]), (1, 2, 64, 72, None)],
)
def test_the_compiled_kernel_is_accurate(B, T, S, N, lengths):
    query, cache = normal(B, T, N, H, dtype=jnp.bfloat16), normal(B, S, H, dtype=jnp.bfloat16)
    lengths = np.array(lengths, np.int32) if lengths else np.full(B, S, np.int32)
    padding = np.arange(S)[None, :, None] >= lengths[:, None, None]
    assert_accurate(query, cache, jnp.where(padding, jnp.nan, cache), lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("growth", [11, 25, 62, 300])
def test_compiled_maxima_that_grow(growth):
    query, cache = growing(growth, 2, 2048, 128)
    assert_accurate(query, cache, cache, None)


def assert_accurate(query, cache, given, lengths):
    """At most twice the error of xla, and one rounding, against the same in float32; and the same twice.

    `given`: the cache that the kernel gets.
    """

    def call(implementation, dtype, cache):
        fn = jax.jit(
            lambda *x: mla_decode_attention(
                *x, scale=SCALE, lengths=lengths, implementation=implementation, return_residual=True
            )
        )
        return [np.asarray(x, np.float64) for x in fn(query.astype(dtype), cache.astype(dtype))]

    truth, xla = call("reference", jnp.float32, cache), call("xla", jnp.bfloat16, cache)
    ours, again = call("mosaic_gpu", jnp.bfloat16, given), call("mosaic_gpu", jnp.bfloat16, given)
    for want, theirs, got, same in zip(truth, xla, ours, again, strict=True):
        np.testing.assert_array_equal(got, same)
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        got, want, theirs = (x[np.isfinite(want)] for x in (got, want, theirs))
        assert abs(got - want).max() <= 2 * abs(theirs - want).max() + 2.0**-8 * abs(want).max()
