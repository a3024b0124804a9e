"""float16 inputs whose logits or gradients of logits exceed 65504, the largest float16: as with float32 accumulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.backends.xla import plan


def _results(arrays, d_out, dtype, **keywords):
    attend = lambda arrays: pallas_fa.dot_product_attention(*arrays, **keywords)
    out, pullback = jax.vjp(attend, tuple(x.astype(dtype) for x in arrays))
    return [np.asarray(x, np.float32) for x in (out, *pullback(d_out.astype(dtype))[0])]


def _assert_as_float32(arrays, d_out, **keywords):
    """Against float32 arrays of the same values: to the rounding of float16 results and of float16 operands of matmuls."""
    arrays, d_out = ([x.astype(jnp.float16) for x in arrays], d_out.astype(jnp.float16))
    want = _results(arrays, d_out, jnp.float32, **keywords)
    have = _results(arrays, d_out, jnp.float16, **keywords)
    for name, x, y in zip(("out", "query", "key", "value"), have, want, strict=True):
        assert np.isfinite(x).all(), name
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-3 * np.abs(y).max(), err_msg=name)


@pytest.fixture(params=["xla", "xla, whole rows", "reference"])
def implementation(request, monkeypatch):
    if "rows" in request.param:
        monkeypatch.setattr(plan, "_on_gpu", lambda: True)
    return request.param.split(",")[0]


def _normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def test_large_logits(rng, implementation):
    q, k, v, d_out = (_normal(rng, 1, 24, 2, 16) for _ in range(4))
    assert jnp.einsum("bthd,bshd->bhts", 300 * q, 300 * k).max() > 2 * 65504
    _assert_as_float32((300 * q, 300 * k, v), d_out, scale=1.0, implementation=implementation)


def test_large_gradients_of_logits(rng, implementation):
    q, k, v, d_out = (_normal(rng, 1, 24, 2, 16) for _ in range(4))
    q, k, v, d_out = 1e-3 * q, 1e-3 * k, 300 * v, 4000 * d_out
    dP = jnp.einsum("bthd,bshd->bhts", d_out, v)
    assert (jnp.abs(dP).max() / 24) > 2 * 65504, "so dS, whose probabilities are about 1/24, exceeds float16, too"
    _assert_as_float32((q, k, v), d_out, scale=1.0, implementation=implementation)
