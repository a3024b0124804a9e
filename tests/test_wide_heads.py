"""Head dims past 256: the kernels interpreted, lowered for CUDA, and where they are chosen."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.backends import reference
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.gpu.shared_memory import fits
from pallas_fa.backends.hopper.backward.backward import why_no_backward
from pallas_fa.backends.hopper.config import BackwardConfig, Config, ForwardConfig
from pallas_fa.backends.hopper.decode.decode import decode
from pallas_fa.backends.hopper.forward import choose as forward_choose
from pallas_fa.backends.hopper.forward.forward import forward
from pallas_fa.backends.hopper.forward.scratch import on_gpu
from pallas_fa.problem import normalise
from tests.cases import Case
from tests.interpreted_backward import is_right_and_free_of_races
from tests.lowering import kernels
from tests.test_kernel_interpreted import interpreted, problem_of

BASE = Case(70, 130, dtype="bfloat16", N=2, K=1, H=512, Hv=512, batch=(1,))
CASES = {
    "causal, in parts that differ, one past the end": dataclasses.replace(
        BASE, T=140, S=140, H=264, Hv=320, N=4, K=2, mask="causal"
    ),
    "full": dataclasses.replace(BASE, T=128, S=128),
    "every kind of score, sinks": dataclasses.replace(BASE, H=320, mask="causal", score="everything", sinks="heads"),
    "lengths, keys of one chunk": dataclasses.replace(BASE, batch=(2,), H=64, mask="lengths"),
    "segments, bias, values of one chunk": dataclasses.replace(BASE, Hv=64, mask="segments", score="bias_shared"),
    "blocks, dropout": dataclasses.replace(BASE, mask="computed_blocks", dropout=0.3),
    "one query, sinks": dataclasses.replace(BASE, T=1, S=203, N=4, K=2, sinks="heads"),
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted_forward_is_right_and_free_of_races(name):
    case = CASES[name]
    problem, operands = problem_of(case, None)
    (out, lse), races = interpreted(problem, operands, decode if case.T == 1 else forward)
    assert not races
    true_out, true_lse = (np.asarray(x, np.float32) for x in reference.attention(problem, operands))
    error = np.linalg.norm(np.asarray(out, np.float32) - true_out) / np.linalg.norm(true_out)
    assert error < 4e-3
    np.testing.assert_allclose(lse, true_lse, rtol=1e-5, atol=1e-5)


# In small sizes the chunks are named.
IN_CHUNKS = {"config": Config(backward=BackwardConfig(stages=(1, 1), chunk_slots=2))}
GRADIENTS = {
    "in chunks, causal, grouped heads": (
        dataclasses.replace(BASE, T=100, S=100, H=128, Hv=192, mask="causal"),
        IN_CHUNKS | {"deterministic_gradients": True},
    ),
    "causal, halves that are not full": (
        dataclasses.replace(BASE, T=140, S=140, H=264, Hv=320, N=4, K=2, mask="causal"),
        {},
    ),
    "every kind of score, sinks": (
        dataclasses.replace(BASE, H=320, mask="causal", score="everything", sinks="heads"),
        {},
    ),
    "lengths": (dataclasses.replace(BASE, batch=(2,), mask="lengths"), {}),
    "lengths, keys of one chunk": (dataclasses.replace(BASE, batch=(2,), H=64, mask="lengths"), {}),
    "segments, bias, values of one chunk": (
        dataclasses.replace(BASE, Hv=64, mask="segments", score="bias_shared"),
        {},
    ),
    "blocks, dropout": (dataclasses.replace(BASE, mask="computed_blocks", dropout=0.3), {}),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_interpreted_backward_is_right_and_free_of_races(name):
    is_right_and_free_of_races(*GRADIENTS[name])


@pytest.mark.parametrize(("H", "Hv"), ((512, 512), (320, 64), (128, 384)))
def test_both_directions_lower(H, Hv):
    q, v = (jax.ShapeDtypeStruct((1, 200, 2, dim), jnp.bfloat16) for dim in (H, Hv))
    call = functools.partial(pallas_fa.dot_product_attention, is_causal=True, implementation="mosaic_gpu")
    gradient = jax.grad(lambda q, k, v: call(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2))
    assert kernels(gradient, q, q, v) == 4


def test_the_largest_bias_with_its_gradient_goes_to_xla():
    fits, large = (problem_of_shapes(512, Hv, bias=True) for Hv in (384, 512))
    assert why_no_backward(fits, Gpu.visible()) is None
    assert "bytes of shared memory" in str(why_no_backward(large, Gpu.visible()))


@pytest.mark.parametrize("bias", (False, True), ids=("plain", "bias"))
def test_tiles_fit_shared_memory(bias):
    gpu = Gpu.visible()
    for wide, other in itertools.product((264, 384, 512), (8, 64, 256, 320, 512)):
        for H, Hv in ((wide, other), (other, wide)):
            problem = problem_of_shapes(H, Hv, bias)
            assert fits(on_gpu(forward_choose.choose(problem, gpu)), gpu)
            assert bias or why_no_backward(problem, gpu) is None


def problem_of_shapes(H, Hv, bias):
    q, v = (jnp.zeros((1, 128, 2, dim), jnp.bfloat16) for dim in (H, Hv))
    keywords = {"bias": jnp.zeros((1, 2, 128, 128))} if bias else {}
    return normalise(q, q, v, **keywords)[0]


def test_xla_computes_gradients_that_it_computes_faster():
    """Unless the kernels are named, or a mask saves them work."""
    x = jax.ShapeDtypeStruct((1, 200, 2, 512), jnp.float16)
    first = lambda **keywords: pallas_fa.explain(x, x, x, **keywords).splitlines()[0]
    assert all(first(**k).startswith("mosaic_gpu: runs this call") for k in ({}, {"is_causal": True}))
    because = "xla computes its gradients, because xla is faster at H=512 and Hv=512"
    assert because in first()
    assert not any(because in first(**k) for k in ({"is_causal": True}, {"implementation": "mosaic_gpu"}))
    tiles = Config(backward=BackwardConfig(2, 64, (1, 1), chunk_slots=4))
    assert "gradients" not in first(config=tiles) and because in first(config=Config(forward=ForwardConfig(1, 64, 1)))
    gradients = jax.grad(lambda q, **keywords: pallas_fa.dot_product_attention(q, q, q, **keywords).sum())
    counts = [
        kernels(functools.partial(gradients, **k), jnp.zeros(x.shape, x.dtype))
        for k in ({}, {"is_causal": True}, {"implementation": "mosaic_gpu"})
    ]
    assert counts[0] == 1 < counts[1] == counts[2]
