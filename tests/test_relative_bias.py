"""`scores.RelativeBias`: equal to the `Bias` of T x S that has the same diagonals, with the gradient of its strip."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.backends.gpu.skewed import Skewed
from pallas_fa.operands import diagonals

pytestmark = pytest.mark.usefixtures("quick_compilation")
N, K = 4, 2


def qkv(T, S, dtype=jnp.float32):
    rng = np.random.default_rng(T)
    shapes = (2, T, N, 8), (2, S, K, 8), (2, S, K, 8)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def strip_of(T, S, *lead):
    return jnp.asarray(np.random.default_rng(S).standard_normal((*lead, T + S - 1)), jnp.float32)


def dense(strip, T, S):
    """The bias [.., T, S], by the definition: entry i of the strip is for s - t = i - (T - 1)."""
    return strip[..., np.arange(S) - np.arange(T)[:, None] + T - 1]


def results(strip, q, k, v, score, implementation):
    """Out and the gradients of strip, q, k and v; `score(strip)` may make any score of it."""

    def loss(strip, q, k, v):
        out, lse = pallas_fa.dot_product_attention(
            q, k, v, score=score(strip), implementation=implementation, return_residual=True
        )
        return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.sin(lse)), out

    gradients, out = jax.jit(jax.grad(loss, (0, 1, 2, 3), has_aux=True))(strip, q, k, v)
    return out, *gradients


def close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("implementation", ("xla", "reference"))
@pytest.mark.parametrize(
    ("T", "S", "lead"), [(1, 1, ()), (1, 9, (N,)), (7, 1, (2, 1)), (137, 83, (N,)), (83, 137, (2, N))], ids=str
)
def test_is_the_bias_with_the_same_diagonals(T, S, lead, implementation, small_chunks):
    strip, arrays = strip_of(T, S, *lead), qkv(T, S)
    want = results(strip, *arrays, lambda strip: scores.Bias(dense(strip, T, S)), "reference")
    close(results(strip, *arrays, scores.RelativeBias, implementation), want)


@pytest.mark.parametrize("implementation", ("xla", "reference"))
def test_a_strip_of_numpy_is_taken_under_jit(implementation):
    strip, arrays = strip_of(3, 9, N), qkv(3, 9)
    call = lambda strip: pallas_fa.dot_product_attention(
        *arrays, score=scores.RelativeBias(strip), implementation=implementation
    )
    close(jax.jit(lambda: call(np.asarray(strip)))(), call(strip))


def buckets(offset):
    """As T5 counts them for decoders: 8 of them, up to 16 back."""
    back = jnp.maximum(-offset, 0)
    far = 4 + jnp.log(jnp.maximum(back, 1) / 4) / np.log(16 / 4) * 4
    return jnp.where(back < 4, back, jnp.minimum(far.astype(jnp.int32), 7))


def test_a_table_of_buckets_gets_its_gradient(small_chunks):
    """As a strip that is gathered outside, and as a function of the offsets."""
    T, S = 70, 84
    table, arrays = strip_of(4, 5, N), qkv(T, S)  # [N, 8]
    index = jnp.arange(S) - jnp.arange(T)[:, None]
    as_bias = lambda table: scores.Bias(table[:, buckets(index)])
    as_strip = lambda table: scores.RelativeBias(table[:, buckets(jnp.arange(1 - T, S))])
    as_function = lambda table: scores.RelativeBias(lambda offset: table[:, buckets(offset)])
    want = results(table, *arrays, as_bias, "reference")
    assert not np.isclose(want[1], 0).all()
    for score in (as_strip, as_function):
        close(results(table, *arrays, score, "xla"), want)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, None), (None, 0, None, 0)], ids=str)
def test_vmap(axes, small_chunks):
    T, S = 69, 76
    # In float64: compilers may add in another order, which float32 shows in single elements.
    with jax.enable_x64(True):
        mapped = strip_of(T, S, 3, N), *(jnp.stack([x, 2 * x, -x]) for x in qkv(T, S))
        args = [(x if axis == 0 else x[0]).astype(jnp.float64) for x, axis in zip(mapped, axes, strict=True)]
        run = jax.jit(functools.partial(results, score=scores.RelativeBias, implementation="xla"))
        one_by_one = [run(*(x[i] if axis == 0 else x for x, axis in zip(args, axes, strict=True))) for i in range(3)]
        together = jax.vmap(run, axes)(*args)
        assert together[0].dtype == jnp.float64
        close(together, jax.tree.map(lambda *x: jnp.stack(x), *one_by_one))


def test_it_composes(small_chunks):
    """After a soft cap, below another score, and masked."""
    T, S = 71, 75
    strip, arrays = strip_of(T, S, N), qkv(T, S)
    composed = lambda relative: scores.SoftCap(3.0).then(relative).then(scores.Alibi(jnp.ones(N)))
    want = results(strip, *arrays, lambda strip: composed(scores.Bias(dense(strip, T, S))), "reference")
    close(results(strip, *arrays, lambda strip: composed(scores.RelativeBias(strip)), "xla"), want)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 200), (64, 64), (65, 1), (200, 70), (130, 129)])
def test_the_form_that_kernels_read_has_every_tile(rows, columns):
    """Of 64 rows, also of those that a CTA of three warpgroups holds past the end. Its gradient is the sum of all tiles'."""
    x = strip_of(rows, columns, 2)
    skewed = Skewed(rows, columns)
    form = np.asarray(skewed.in_memory(x))
    assert form.shape == (2, 64, skewed.width) and skewed.width % 64 == 0
    padded = np.zeros((2, -(-rows // 192) * 192, -(-columns // 64) * 64), np.float32)
    padded[:, :rows, :columns] = diagonals.tile(x, rows)
    d_form, d_tiles = np.zeros_like(form), np.random.default_rng(0).standard_normal((2, rows, columns))
    for row in range(0, padded.shape[1], 64):
        for column in range(0, columns, 64):
            start = skewed.start(row, column)
            assert start % 64 == 0 <= start
            there = np.s_[:, row : min(row + 64, rows), column : min(column + 64, columns)]
            want = padded[there]
            got = form[:, : want.shape[1], start : start + want.shape[2]]
            np.testing.assert_array_equal(got, want)
            d_form[:, : want.shape[1], start : start + want.shape[2]] += d_tiles[there]
    index = np.arange(columns) - np.arange(rows)[:, None] + rows - 1
    want = np.zeros(x.shape)
    np.add.at(want, (..., index), d_tiles)
    np.testing.assert_allclose(skewed.gradient(jnp.asarray(d_form)), want, rtol=1e-4, atol=1e-4)


def test_the_kernels_hold_no_array_of_T_x_S():
    """Nothing in the program is as large as one head's bias, forward or backward."""
    T, heads = 8192, 2
    x = jax.ShapeDtypeStruct((1, T, heads, 64), jnp.bfloat16)
    strip = jax.ShapeDtypeStruct((heads, 2 * T - 1), jnp.float32)

    def loss(strip, q, k, v):
        score = scores.RelativeBias(strip)
        return pallas_fa.dot_product_attention(q, k, v, score=score, implementation="mosaic_gpu").sum()

    lowered = jax.jit(jax.grad(loss, (0, 1, 2, 3))).trace(strip, x, x, x).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("custom_call @mosaic_gpu") == 2
    shapes = re.findall(r"tensor<((?:[0-9]+x)+)", text)
    assert max(math.prod(map(int, shape.split("x")[:-1])) for shape in shapes) < T * T / 8


@pytest.mark.parametrize("lengths", (None, "of sequences", "of heads"))
@pytest.mark.parametrize("T, S", [(7, 20), (20, 7), (1, 5)])
def test_aligned_to_the_end_the_last_query_is_at_the_last_key(T, S, lengths, small_chunks):
    """The bias that each sequence, or each head, gets by hand; with the gradient of what the function closes over."""
    kv_lengths, mask = np.full((2, N), S), None
    if lengths is not None:
        kv_lengths = np.random.default_rng(3).integers(1, S + 1, (2, N if lengths == "of heads" else 1), np.int32)
        mask = masks.Lengths(kv_lengths=kv_lengths[..., None, None] if lengths == "of heads" else kv_lengths[:, 0])
    table, arrays, head = strip_of(2 * (S + T), 1, N), qkv(T, S), np.arange(N)[:, None, None]
    offset = np.arange(S) - (np.arange(T)[:, None] + kv_lengths[..., None, None] - T)  # [B, N, T, S]

    def loss(score):
        attend = lambda table: pallas_fa.dot_product_attention(*arrays, mask=mask, score=score(table))
        return jax.jit(jax.value_and_grad(lambda table: jnp.sum(jnp.sin(3 * attend(table)))))(table)

    found = loss(lambda table: scores.RelativeBias(lambda x: table[:, x + S + T], align="bottom_right"))
    close(found, loss(lambda table: scores.Bias(table[head, offset + S + T])))


@pytest.mark.parametrize(
    ("strip", "error", "words"),
    [
        (
            np.zeros(12, np.float32),
            ValueError,
            ["strip.shape=(12,)", "T + S - 1]=(2, 4, 13)", "-(T - 1)=-6 to S - 1=6"],
        ),
        (np.zeros((3, 13), np.float32), ValueError, ["strip.shape=(3, 13)"]),
        (np.zeros(13, np.int32), TypeError, ["strip.dtype=int32", "float"]),
        (lambda offset: offset, TypeError, ["strip(offsets).dtype=int32"]),
        (lambda offset: jnp.float32(0), ValueError, ["strip.shape=()"]),
        (lambda offset: jnp.zeros((13, 4)), ValueError, ["strip.shape=(13, 4)", "Swap its last two dims"]),
        (lambda offset: offset + jnp.zeros(3), TypeError, ["strip=<function", "int32 [13]", "before attention"]),
        (lambda offset: None, TypeError, ["strip(offsets)=None", "float array"]),
    ],
)
def test_wrong_strips_are_explained(strip, error, words):
    with pytest.raises(error) as found:
        jax.eval_shape(lambda *x: pallas_fa.dot_product_attention(*x, score=scores.RelativeBias(strip)), *qkv(7, 7))
    assert all(word in str(found.value) for word in words), found.value


def test_deterministic_gradients_come_from_xla():
    x, strip = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16), jnp.zeros(255)
    said = pallas_fa.explain(x, x, x, score=scores.RelativeBias(strip), deterministic_gradients=True)
    assert "xla computes its gradients" in said and "of a RelativeBias, in no fixed order" in said


def test_an_array_has_nothing_to_align():
    with pytest.raises(ValueError, match=r"strip of shape \(9,\) with align='bottom_right'.*Pass a function"):
        scores.RelativeBias(strip_of(5, 5), align="bottom_right")
    with pytest.raises(ValueError, match="align='end' is not a way to align RelativeBias"):
        scores.RelativeBias(jnp.cos, align="end")  # pyright: ignore[reportArgumentType]
