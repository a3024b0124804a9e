"""Head dims that are no multiple of 8 run in the Hopper kernels, which get copies padded with zeros."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.backends import reference
from pallas_fa.backends.xla import attention as xla
from pallas_fa.problem import Residuals, normalise
from tests import interpreted_backward, test_kernel_interpreted
from tests.cases import Case
from tests.lowering import kernels

CASE = Case(50, 60, "causal", dtype="bfloat16", N=2, K=2, H=59, Hv=100, batch=(1,))
DIMS = ((59, 59), (100, 100), (59, 100), (128, 1), (250, 64))


def with_nan_in_head_1(x):
    return np.where(np.arange(x.shape[-2])[:, None] == 1, np.asarray(np.nan, x.dtype), x)


def of_head_0(x):
    return np.asarray(x, np.float32)[:, :, 0]


def relative_error(x, want):
    x, want = of_head_0(x), of_head_0(want)
    return np.linalg.norm(x - want) / np.linalg.norm(want)


def test_the_forward_reads_nothing_of_the_next_head():
    qkv = CASE.inputs().qkv
    (out, lse), races = test_kernel_interpreted.interpreted(
        *normalise(*map(with_nan_in_head_1, qkv), is_causal=True, config=test_kernel_interpreted.TWO)
    )
    assert not races
    want, want_lse = reference.attention(*normalise(*qkv, is_causal=True))
    assert out.shape == want.shape
    assert relative_error(out, want) < 4e-3
    np.testing.assert_allclose(of_head_0(lse), of_head_0(want_lse), rtol=1e-5, atol=1e-5)


def test_the_backward_reads_nothing_of_the_next_head():
    inputs = CASE.inputs()
    problem, operands = normalise(*inputs.qkv, is_causal=True)
    out, lse = xla.forward(problem, operands)
    cotangents = jnp.asarray(inputs.d_out), jnp.asarray(inputs.d_lse)
    want = xla.backward(problem, Residuals(operands, out, lse), *cotangents)
    poisoned = operands._replace(**{name: with_nan_in_head_1(getattr(operands, name)) for name in "qkv"})
    out, d_out = map(with_nan_in_head_1, (np.asarray(out), inputs.d_out))
    gradients, races = interpreted_backward.interpreted(
        problem, poisoned, jnp.asarray(out), lse, jnp.asarray(d_out), cotangents[1]
    )
    assert not races
    assert [x.shape for x in gradients] == [x.shape for x in inputs.qkv]
    assert all(relative_error(x, y) < 6e-3 for x, y in zip(gradients, want, strict=True))


@pytest.mark.parametrize(("H", "Hv"), DIMS)
def test_the_default_is_the_kernels_in_both_directions(H, Hv):
    q, v = (jax.ShapeDtypeStruct((1, 200, 2, dim), jnp.float16) for dim in (H, Hv))
    call = functools.partial(pallas_fa.dot_product_attention, is_causal=True)
    gradient = jax.grad(lambda q, k, v: call(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    assert kernels(gradient, q, q, v) == (3 if H > 128 else 2)


def test_explain_says_what_is_copied():
    q, fits, v = (jax.ShapeDtypeStruct((1, 200, 2, dim), jnp.bfloat16) for dim in (59, 64, 100))
    assert "copies q and k to H=64 and v to Hv=104 once in each direction" in pallas_fa.explain(q, q, v)
    assert "copies v to Hv=104 once" in pallas_fa.explain(fits, fits, v)
    assert "copies" not in pallas_fa.explain(fits, fits, fits)


def test_too_large_head_dims_are_refused_by_their_own_size():
    q, v = (jax.ShapeDtypeStruct((1, 200, 2, dim), jnp.bfloat16) for dim in (513, 64))
    assert "mosaic_gpu: cannot: head dim H=513; it takes at most 512" in pallas_fa.explain(q, q, v)
