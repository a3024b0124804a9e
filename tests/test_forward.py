"""What out and log-sum-exp mean, in every implementation; test_table.py has the table of cases."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import pallas_fa
from pallas_fa import masks, scores
from tests import cases
from tests.cases import Case

IMPLEMENTATIONS = ("xla", "reference")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", (*IMPLEMENTATIONS, None))
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_representative_case(dtype, implementation, check, small_chunks):
    check(Case(203, 113, "packed", "everything", dtype, N=4, K=2, H=40, Hv=24), implementation, gradients=False)


@pytest.mark.parametrize("mask", ("full", "causal"))
def test_chunks_of_the_usual_size(mask, check):
    """All other cases run in small chunks."""
    check(Case(1023, 1100, mask, "soft_cap", N=2, K=1, H=16, Hv=16), "xla", gradients=True)


# ---- meanings -------------------------------------------------------------------------------------------------------


@every_implementation
def test_order_is_scale_bias_soft_cap_score_mask(implementation, rng):
    q, k, v = (jnp.asarray(rng.standard_normal((2, 6, 4, 8)), jnp.float32) for _ in range(3))
    bias, slopes = jnp.asarray(rng.standard_normal((4, 6, 6)), jnp.float32), jnp.asarray([0.5, 0.2, 0.1, 0.05])
    attend = lambda **keywords: pallas_fa.dot_product_attention(q, k, v, implementation=implementation, **keywords)

    got = attend(scale=0.7, bias=bias, logits_soft_cap=1.2, score=scores.Alibi(slopes), is_causal=True)
    x = 0.7 * np.einsum("btnh,bsnh->bnts", q, k) + bias
    distance = abs(np.arange(6)[:, None] - np.arange(6))
    x = 1.2 * np.tanh(x / 1.2) - np.asarray(slopes)[:, None, None] * distance
    p = jax.nn.softmax(jnp.where(np.tril(np.ones((6, 6), bool)), x, -jnp.inf), axis=-1)
    np.testing.assert_allclose(got, jnp.einsum("bnts,bsnh->btnh", p, v), atol=2e-6)

    in_order = scores.Bias(bias).then(scores.SoftCap(1.2)).then(scores.Alibi(slopes))
    np.testing.assert_allclose(got, attend(scale=0.7, score=in_order, is_causal=True), atol=1e-6)
    other_order = scores.SoftCap(1.2).then(scores.Bias(bias)).then(scores.Alibi(slopes))
    assert jnp.abs(got - attend(scale=0.7, score=other_order, is_causal=True)).max() > 0.01


@every_implementation
@pytest.mark.parametrize("is_causal", (False, True))
@pytest.mark.parametrize("T, S", ((16, 24), (1, 300), (1200, 1200)))  # at once, one query, in chunks
def test_logits_may_be_as_large_as_float32_holds(T, S, is_causal, implementation, rng):
    """The largest logit takes all, forward and backward, though its rounding error is more than exp can take."""
    q, k, v = (rng.standard_normal((1, n, 2, 20)).astype(np.float32) for n in (T, S, S))
    x = np.einsum("btnh,bsnh->bnts", q, k)
    x = np.where(np.tril(np.ones((T, S), bool)), x, -np.inf) if is_causal else x
    takes_all = np.eye(S)[x.argmax(-1)]  # [B, N, T, S]

    @jax.jit
    def attend(q, k, v):
        fn = lambda *qkv: pallas_fa.dot_product_attention(*qkv, is_causal=is_causal, implementation=implementation)
        out, pullback = jax.vjp(fn, q, k, v)
        return out, *pullback(jnp.ones_like(out))

    for size in (1e5, 1e15):
        out, dq, dk, dv = attend(q * np.float32(size), k * np.float32(size), v)
        np.testing.assert_allclose(out, np.einsum("bnts,bsnh->btnh", takes_all, v), rtol=1e-6)
        np.testing.assert_allclose(dv, np.einsum("bnts,bsnh->bsnh", takes_all, np.ones_like(v)), rtol=1e-6)
        assert max(jnp.abs(dq).max(), jnp.abs(dk).max()) < 1e-5 * size  # 0, but for the rounding of dP


@every_implementation
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_lse_is_the_natural_logarithm_in_float32(implementation, dtype):
    q, v = jnp.zeros((1, 3, 2, 8), dtype), jnp.ones((1, 5, 2, 8), dtype)
    out, lse = pallas_fa.dot_product_attention(q, v, v, implementation=implementation, return_residual=True)
    assert lse.dtype == jnp.float32 and lse.shape == (1, 3, 2) and out.dtype == dtype
    np.testing.assert_allclose(lse, np.log(5), rtol=1e-6)
    np.testing.assert_allclose(out.astype(jnp.float32), 1, rtol=1e-6)


@every_implementation
def test_default_scale_is_that_of_the_query_head_dim(implementation, rng):
    q, k = (jnp.asarray(rng.standard_normal((5, 2, 16)), jnp.float32) for _ in range(2))
    v = jnp.asarray(rng.standard_normal((5, 2, 4)), jnp.float32)
    attend = lambda **keywords: pallas_fa.dot_product_attention(q, k, v, implementation=implementation, **keywords)
    np.testing.assert_array_equal(attend(), attend(scale=0.25))
    np.testing.assert_allclose(attend(scale=jnp.float32(0.25)), attend(), atol=1e-6)


@every_implementation
def test_query_heads_read_their_groups_key_head(implementation, rng):
    """Query head n reads key head n // (N // K), as in `jax.nn`."""
    q = jnp.asarray(rng.standard_normal((2, 7, 6, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((2, 9, 2, 8)), jnp.float32) for _ in range(2))
    got = pallas_fa.dot_product_attention(q, k, v, implementation=implementation)
    for n in range(6):
        one = (q[:, :, n : n + 1], k[:, :, n // 3 : n // 3 + 1], v[:, :, n // 3 : n // 3 + 1])
        want = pallas_fa.dot_product_attention(*one, implementation="reference")
        np.testing.assert_allclose(got[:, :, n : n + 1], want, atol=1e-6)


@every_implementation
@pytest.mark.parametrize("shape", ((2,), (), (2, 3), (1, 2, 1)), ids=str)
def test_batch_dims_are_independent(implementation, shape, rng):
    q, k, v = (jnp.asarray(rng.standard_normal((*shape, 5, 2, 8)), jnp.float32) for _ in range(3))
    keywords = {"is_causal": True, "implementation": implementation, "return_residual": True}
    out, lse = pallas_fa.dot_product_attention(q, k, v, **keywords)
    assert out.shape == (*shape, 5, 2, 8) and lse.shape == (*shape, 5, 2)
    for index in np.ndindex(shape):
        one_out, one_lse = pallas_fa.dot_product_attention(q[index], k[index], v[index], **keywords)
        np.testing.assert_allclose(out[index], one_out, atol=1e-6)
        np.testing.assert_allclose(lse[index], one_lse, atol=1e-6)


@every_implementation
@pytest.mark.parametrize("sizes", ((0, 3, 2), (3, 0, 2), (3, 4, 0), (0, 0, 0)), ids=("T=0", "S=0", "B=0", "all 0"))
def test_empty_arrays(implementation, sizes):
    T, S, B = sizes
    q, k = jnp.ones((B, T, 4, 8)), jnp.ones((B, S, 2, 8))

    def attend(q, k, v):
        return pallas_fa.dot_product_attention(
            q, k, v, is_causal=True, implementation=implementation, return_residual=True
        )

    (out, lse), pullback = jax.vjp(attend, q, k, k)
    assert out.shape == q.shape and lse.shape == q.shape[:-1]
    assert (out == 0).all() and (lse == -jnp.inf).all()
    for gradient, x in zip(pullback((out, lse)), (q, k, k), strict=True):
        assert gradient.shape == x.shape and (gradient == 0).all()


@every_implementation
def test_eight_bit_floats(implementation, rng):
    """Any float dtype: an error near that of rounding the result."""
    q, k, v = (rng.standard_normal((2, 70, 2, 16), np.float32).astype(ml_dtypes.float8_e4m3fn) for _ in range(3))
    got = pallas_fa.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    want = pallas_fa.dot_product_attention(
        *(x.astype(np.float32) for x in (q, k, v)), is_causal=True, implementation="reference"
    )
    assert got.dtype == jnp.float8_e4m3fn
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0.0725, atol=0.01)


@every_implementation
def test_precision_is_honoured(implementation, rng):
    """A precision of fewer bits, asked for by its algorithm, shows in the jaxpr of every matmul."""
    q, k, v = (jnp.asarray(rng.standard_normal((1, 4, 2, 8)), jnp.float32) for _ in range(3))

    def attend(precision):
        attention = lambda q, k, v: pallas_fa.dot_product_attention(
            q, k, v, precision=precision, implementation=implementation
        ).sum()
        return str(jax.make_jaxpr(jax.grad(attention, argnums=(0, 1, 2)))(q, k, v))

    assert "Precision.HIGHEST" not in attend(None)
    for precision in ("highest", jax.lax.Precision.HIGHEST, ("highest", "highest")):
        text = attend(precision)
        # Seven matmuls: two forward, five backward (the reference, which keeps its probabilities, has six).
        assert text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == text.count("dot_general[") >= 6
    assert "BF16_BF16_F32" in attend(jax.lax.DotAlgorithmPreset.BF16_BF16_F32)


def test_inputs_may_be_numpy_arrays(rng):
    q = rng.standard_normal((2, 4, 2, 8), np.float32)
    mask = rng.random((4, 4)) < 0.9
    got = pallas_fa.dot_product_attention(q, q, q, q[:, :, :1, :4].swapaxes(1, 2), mask)
    assert isinstance(got, jax.Array) and got.dtype == jnp.float32


# ---- skipping: what a mask rules out is not even read ------------------------------------------------------------------

_DOCUMENTS = np.repeat(np.arange(3), 64)[None]
_LOWER, _DIAGONAL = np.tril(np.ones((3, 3), bool)), np.eye(3, dtype=bool)
_TWO_LOWER = _LOWER & ~np.tril(_LOWER, -2)
_ENDS = np.array([[1, 0, 1], [0, 0, 1], [1, 0, 0]], bool)  # not in one interval
_HALVES = masks.BlockMask(np.kron(_ENDS, np.ones((2, 1), bool)), (32, 64))
_SEGMENTS = {"query_segment_ids": _DOCUMENTS, "key_value_segment_ids": _DOCUMENTS}
_SKIPPING = {
    # keyword arguments, and which chunks of keys [3] each chunk of queries [3] visits
    "causal": ({"is_causal": True}, _LOWER),
    "bottom right": ({"mask": masks.Causal("bottom_right")}, _LOWER),
    "window to the left": ({"local_window_size": (63, 0)}, _TWO_LOWER),
    "window to the right": ({"local_window_size": (0, 63)}, _TWO_LOWER.T),
    "segments": (_SEGMENTS, _DIAGONAL),
    "causal in segments": ({**_SEGMENTS, "is_causal": True}, _DIAGONAL),
    "dense": ({"mask": np.kron(_DIAGONAL[::-1], np.ones((64, 64), bool))}, _DIAGONAL[::-1]),
    "offsets": ({"mask": masks.Causal(offset=np.array([-64]))}, np.tril(_LOWER, -1)),
    "union": ({"mask": masks.Window(0, 0) | masks.Causal(offset=-64)}, _LOWER),
    "blocks": ({"mask": masks.BlockMask(_ENDS, 64)}, _ENDS),
    "custom in blocks of another size": ({"mask": masks.Custom(cases.every_third, ranges=_HALVES)}, _ENDS),
    "custom": ({"mask": masks.Custom(cases.every_third, ranges=masks.Window(60, 0))}, _TWO_LOWER),
}


@pytest.mark.parametrize("name", _SKIPPING)
def test_chunks_that_the_mask_rules_out_are_not_visited(name, small_chunks):
    """NaN in one chunk of values (of cotangents) reaches the queries (keys) that visit it, and no others."""
    keywords, visited = _SKIPPING[name]
    ones = jnp.ones((1, 192, 1, 4))
    poisoned = jnp.asarray(np.where(np.arange(192) // 64 == np.arange(3)[:, None], np.nan, 1.0))[:, None, :, None, None]

    @jax.jit
    def reached(poison):
        attend = lambda q, k, v: pallas_fa.dot_product_attention(q, k, v, implementation="xla", **keywords)
        out = attend(ones, ones, poison * ones)
        d_value = jax.vjp(lambda v: attend(ones, ones, v), ones)[1](poison * ones)[0]
        return tuple(jnp.isnan(x).reshape(3, -1).any(axis=1) for x in (out, d_value))

    found = [reached(jnp.asarray(poison, jnp.float32)) for poison in poisoned]
    forward, backward = (np.stack(x) for x in zip(*found, strict=True))
    np.testing.assert_array_equal(forward.T, visited)  # [query chunk, key chunk]
    np.testing.assert_array_equal(backward, visited)
