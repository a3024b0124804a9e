"""float16 where logits and gradients pass 65504, its largest number: as with sums in float32."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_fa.backends.float16_range import in_float16_range
from pallas_fa.backends.xla import attention as xla
from pallas_fa.problem import Residuals, normalise
from tests import interpreted_backward, oracle, test_kernel_interpreted
from tests.cases import Case

LARGEST = float(np.finfo(np.float16).max)
BASE = Case(70, 90, "causal", dtype="float16", N=2, K=1, H=64, Hv=64, batch=(1,))


def inputs_of(case, qk=1.0, v=1.0, d_out=1.0):
    """The inputs of `case`; q and k, v, and the cotangents are that many times as large."""
    inputs = case.inputs()
    factors = qk, qk, v
    times = lambda x, factor: (x.astype(np.float32) * factor).astype(x.dtype)
    qkv = tuple(times(x, factor) for x, factor in zip(inputs.qkv, factors, strict=True))
    return dataclasses.replace(inputs, qkv=qkv, d_out=times(inputs.d_out, d_out), d_lse=inputs.d_lse * d_out)


def residuals_of(inputs):
    """(problem, residuals, d_out, d_lse), with out and lse from the truth."""
    problem, operands = normalise(*inputs.qkv, **inputs.keywords(inputs.arrays))
    truth = oracle.attention(inputs)
    residuals = Residuals(operands, jnp.asarray(truth.out, jnp.float16), jnp.asarray(truth.lse, jnp.float32))
    return problem, residuals, jnp.asarray(inputs.d_out), jnp.asarray(inputs.d_lse)


def relative_error(x, truth):
    return np.linalg.norm(np.asarray(x, np.float64) - truth) / np.linalg.norm(truth)


def test_logits_past_the_largest_number():
    inputs = inputs_of(BASE, qk=200.0)
    truth = oracle.attention(inputs)
    assert truth.lse.max() > LARGEST
    problem, operands = normalise(*inputs.qkv, **inputs.keywords({}))
    (out, lse), races = test_kernel_interpreted.interpreted(problem, operands)
    assert not races
    assert relative_error(out, truth.out) < 1e-3
    np.testing.assert_allclose(lse, truth.lse, rtol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"H": 192, "Hv": 128, "S": 96, "T": 72}, {"H": 64, "Hv": 320}], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_of_logits_that_pass_the_largest_number(changes, deterministic):
    """In one pass, in two and in three; and where warpgroups share the rows of values."""
    inputs = inputs_of(dataclasses.replace(BASE, **changes), qk=0.1, v=16.0, d_out=4e3)
    truth = oracle.attention(inputs)
    problem, residuals, d_out, d_lse = residuals_of(inputs)
    problem = dataclasses.replace(problem, deterministic_gradients=deterministic)
    gradients, races = interpreted_backward.interpreted(problem, *residuals, d_out, d_lse)
    assert not races
    of_xla = xla.backward(problem, residuals, d_out, d_lse)
    for name, x, x_of_xla in zip(("query", "key", "value"), gradients, of_xla, strict=True):
        assert abs(truth.gradients[name]).max() < LARGEST
        assert relative_error(x, truth.gradients[name]) < 1e-3, name
        assert relative_error(x_of_xla, truth.gradients[name]) < 1e-3, name


def scaled(inputs, seen):
    """What `in_float16_range` hands on, into `seen`, and what it makes of gradients of 1."""

    def backward(problem, residuals, d_out, d_lse):
        seen.extend((np.asarray(d_out, np.float32), np.asarray(d_lse)))
        return tuple(jnp.ones_like(x) for x in residuals.operands.differentiable)

    return in_float16_range(backward)(*residuals_of(inputs))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_cotangents_in_range_are_handed_on(dtype):
    inputs, seen = dataclasses.replace(BASE, dtype=dtype).inputs(), []
    gradients = scaled(inputs, seen)
    np.testing.assert_array_equal(seen[0], inputs.d_out.astype(np.float32))
    np.testing.assert_array_equal(seen[1], inputs.d_lse)
    assert all((np.asarray(x, np.float32) == 1).all() for x in gradients)


def test_cotangents_past_the_range_become_smaller_and_gradients_larger():
    inputs, seen = inputs_of(BASE, d_out=1e4), []
    gradients = scaled(inputs, seen)
    factor = np.asarray(gradients[0], np.float32).ravel()[0]
    assert factor > 1 and np.log2(factor) % 1 == 0
    np.testing.assert_array_equal(seen[0] * factor, inputs.d_out.astype(np.float32))
    np.testing.assert_array_equal(seen[1] * factor, inputs.d_lse)


def test_padding_says_nothing_about_the_range():
    case = dataclasses.replace(BASE, mask="lengths", batch=(2,))
    inputs, seen = case.inputs(), []
    lengths = [inputs.mask.keywords[f"{name}_seq_lengths"] for name in ("query", "key_value")]
    poisoned = []
    for x, n in zip((inputs.d_out, inputs.qkv[2], inputs.d_lse[..., None]), (*lengths, lengths[0]), strict=True):
        padding = np.arange(x.shape[1])[None, :, None, None] >= n[:, None, None, None]
        poisoned.append(np.where(padding, np.asarray(np.nan, x.dtype), x))
    inputs = dataclasses.replace(
        inputs, qkv=(*inputs.qkv[:2], poisoned[1]), d_out=poisoned[0], d_lse=poisoned[2][..., 0]
    )
    gradients = scaled(inputs, seen)
    assert all((np.asarray(x, np.float32) == 1).all() for x in gradients)
