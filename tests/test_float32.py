"""float32 in the Hopper kernels: operands in bfloat16 parts, what `precision=` means for them, results near float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.backends import choice
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.hopper import products
from pallas_fa.backends.hopper.decode.decode import decode
from pallas_fa.backends.hopper.support import supports
from pallas_fa.problem import normalise
from tests import interpreted_backward, oracle, test_kernel_interpreted
from tests.cases import Case
from tests.lowering import kernels

GPU = Gpu("9.0", 132, 227 * 1024)
BASE = Case(113, 203, dtype="float32", N=2, K=1, H=64, Hv=64, batch=(1,))
# Relative errors in the Frobenius norm: each product errs by 2^-16 or 2^-24 of its factors at most, and errors average.
LIMITS = {"high": 2e-5, "highest": 2e-6}

CASES = {
    "full, H=128": (dataclasses.replace(BASE, T=128, S=256, H=128, Hv=128), "high"),
    "one block of keys, H=128": (dataclasses.replace(BASE, T=100, S=60, mask="causal", H=128, Hv=128), "high"),
    "causal, six products": (dataclasses.replace(BASE, mask="causal"), "highest"),
    "lengths, bias, sinks": (
        dataclasses.replace(BASE, batch=(2,), mask="lengths", score="bias_shared", sinks="heads"),
        "high",
    ),
    "odd head dims, grouped heads, dropout": (
        dataclasses.replace(BASE, N=4, K=2, H=72, Hv=40, mask="causal", dropout=0.3),
        "high",
    ),
    "gradients of queries, alone": (dataclasses.replace(BASE, mask="causal", score="bias_head_rows"), "high"),
    "blocks, soft cap": (dataclasses.replace(BASE, T=200, mask="blocks", score="soft_cap"), "high"),
}


def problem_of(case, **keywords):
    inputs = case.inputs()
    return normalise(*inputs.qkv, **inputs.keywords(inputs.arrays), **keywords)


def relative_error(x, truth):
    x = np.asarray(x, np.float64).reshape(truth.shape)
    finite = np.isfinite(truth)
    np.testing.assert_array_equal(np.isfinite(x), finite)
    return np.linalg.norm((x - truth)[finite]) / np.linalg.norm(truth[finite])


@pytest.mark.parametrize("name", CASES)
def test_interpreted_kernels_are_as_exact_as_their_products(name):
    case, precision = CASES[name]
    inputs, truth = case.inputs(), oracle.attention(case.inputs())
    problem, operands = problem_of(case, precision=precision)
    support = supports(problem, GPU)
    assert support.forward is None and support.backward is None
    (out, lse), races = test_kernel_interpreted.interpreted(problem, operands)
    assert not races and out.dtype == np.float32
    assert relative_error(out, truth.out) < LIMITS[precision]
    assert relative_error(lse, truth.lse) < LIMITS[precision]
    d_out, d_lse = jnp.asarray(inputs.d_out), jnp.asarray(inputs.d_lse)
    gradients, races = interpreted_backward.interpreted(problem, operands, out, lse, d_out, d_lse)
    assert not races
    names = ("query", "key", "value", *inputs.arrays)
    for name, x in zip(names, gradients, strict=True):
        assert x.dtype == np.float32
        # Sums over all queries and keys cancel.
        limit = LIMITS[precision] * (1 if x.size > 1000 else 5)
        assert relative_error(x, truth.gradients[name]) < limit, name


def test_tanh_is_that_of_the_hardware_in_16_bits_only():
    """It has 11 bits, which interpreted kernels don't show."""
    for dtype, has_tanh in (("bfloat16", True), ("float32", False)):
        x = jax.ShapeDtypeStruct((1, 256, 2, 64), dtype)

        def loss(x):
            out = pallas_fa.dot_product_attention(x, x, x, logits_soft_cap=5.0, implementation="mosaic_gpu")
            return jnp.sum(out.astype(jnp.float32))

        text = jax.jit(jax.grad(loss)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert "custom_call @mosaic_gpu" in text
        assert ("tanh.approx" in text) == has_tanh, dtype


@pytest.mark.parametrize("precision", LIMITS)
def test_errors_cancel_in_rows_with_one_key(precision):
    """There the gradients of queries and keys are those through lse alone."""
    case = dataclasses.replace(BASE, T=5, S=1, N=2, K=2)
    inputs, truth = case.inputs(), oracle.attention(case.inputs())
    problem, operands = problem_of(case, precision=precision)
    d_out, d_lse = jnp.asarray(inputs.d_out), jnp.asarray(inputs.d_lse)
    out, lse = (jnp.asarray(x, jnp.float32) for x in (truth.out, truth.lse))
    gradients, _ = interpreted_backward.interpreted(problem, operands, out, lse, d_out, d_lse)
    for name, x in zip(("query", "key"), gradients, strict=False):
        error = np.abs(np.asarray(x, np.float64) - truth.gradients[name]).max()
        assert error < LIMITS[precision] * np.abs(truth.gradients[name]).max(), name


def test_few_queries():
    problem, operands = problem_of(dataclasses.replace(BASE, T=3, N=4, K=2, batch=(2,)))
    (out, lse), races = test_kernel_interpreted.interpreted(problem, operands, decode)
    truth = oracle.attention(dataclasses.replace(BASE, T=3, N=4, K=2, batch=(2,)).inputs())
    assert not races
    assert relative_error(out, truth.out) < LIMITS["high"]
    assert relative_error(lse, truth.lse) < LIMITS["high"]


@pytest.mark.parametrize(("parts", "count", "bits"), [(1, 1, 8), (2, 3, 16), (3, 6, 24)])
def test_parts_add_up(parts, count, bits, rng):
    x = np.concatenate([rng.standard_normal(1000), [0, 1e-30, -3e38, 2**-100]]).astype(np.float32)
    found = [np.asarray(part) for part in products.split(jnp.asarray(x), parts)]
    assert all(part.dtype == jnp.bfloat16 for part in found)
    sum_of_parts = sum(part.astype(np.float64) for part in found)
    assert (abs(sum_of_parts - x) <= 2.0**-bits * abs(x)).all()
    pairs = products.pairs(parts)
    assert len(set(pairs)) == count and pairs[-1] == (0, 0)
    assert all(i + j < parts for i, j in pairs)


def test_xla_is_kept_from_dropping_what_rounds():
    """On a GPU it takes a conversion to bfloat16 and back to be none, which leaves nothing for the other parts."""
    problem, _ = problem_of(BASE)
    jaxpr = jax.make_jaxpr(lambda x: products.in_memory(problem, x, "BTNH"))(jnp.ones((1, 4, 1, 1)))
    made = [(eqn.primitive.name, eqn.outvars[0].aval.dtype) for eqn in jaxpr.eqns]  # type: ignore[attr-defined]
    assert ("convert_element_type", jnp.float32) not in made and ("reduce_precision", jnp.float32) in made


def test_infinite_inputs_stay_what_they_are():
    """As in a product that is not split; a part that is inf - inf would make them NaN."""
    x = jnp.asarray([np.inf, -np.inf, 3.4e38, 1.0], jnp.float32).reshape(1, 4, 1, 1)
    problem, _ = problem_of(BASE)
    parts = np.asarray(products.in_memory(problem, x, "BTNH").astype(jnp.float32))
    np.testing.assert_array_equal(parts[0, :, :, 0].sum(axis=1), [np.inf, -np.inf, np.inf, 1.0])


# ---- precision= -----------------------------------------------------------------------------------------------------

ALGORITHMS = jax.lax.DotAlgorithmPreset


@pytest.mark.parametrize(
    ("precision", "parts"),
    (
        *((x, 2) for x in (None, "default", "high", "tensorfloat32", "BF16_BF16_F32_X3", ALGORITHMS.DEFAULT)),
        *((x, 3) for x in ("highest", "float32", ("default", "highest"), ALGORITHMS.BF16_BF16_F32_X6)),
    ),
    ids=str,
)
def test_precision_says_how_many_parts(precision, parts):
    problem, _ = problem_of(BASE, precision=precision)
    assert supports(problem, GPU).forward is None
    assert products.parts_of(problem) == parts


@pytest.mark.parametrize("precision", ("TF32_TF32_F32", "BF16_BF16_F32", ALGORITHMS.F32_F32_F32), ids=str)
def test_other_algorithms_are_not_made_up_for(precision):
    problem, _ = problem_of(BASE, precision=precision)
    reason = supports(problem, GPU).forward
    assert reason is not None and "BF16_BF16_F32_X3" in reason and str(problem.precision) in reason


def test_the_default_algorithm_is_none():
    """Of 16-bit inputs an algorithm would go to XLA, and "DEFAULT" is the name of one in JAX."""
    sixteen = dataclasses.replace(BASE, dtype="bfloat16")
    for precision in ("DEFAULT", ALGORITHMS.DEFAULT):
        assert supports(problem_of(sixteen, precision=precision)[0], GPU).forward is None


def test_none_is_the_default_of_jax():
    """Who sets JAX's default to full float32 gets that, too, and another program for it."""
    with jax.default_matmul_precision("float32"):
        problem, _ = problem_of(BASE)
    assert products.parts_of(problem) == 3 and problem != problem_of(BASE)[0]
    with jax.default_matmul_precision("BF16_BF16_F32_X3"):
        problem, _ = problem_of(BASE)
    assert problem.precision == ALGORITHMS.BF16_BF16_F32_X3
    with jax.default_matmul_precision("float32"):
        assert problem_of(dataclasses.replace(BASE, dtype="bfloat16"))[0].precision is None


@pytest.mark.parametrize(("precision", "H"), [("high", 128), ("highest", 64)])
def test_head_dims_past_what_fits_are_refused(precision, H):
    problem_with = lambda **sizes: problem_of(dataclasses.replace(BASE, **sizes), precision=precision)[0]
    reason = lambda **sizes: supports(problem_with(**sizes), GPU).forward or ""
    assert not reason(H=H, Hv=H)
    for name in ("H", "Hv"):
        assert f"head dim {name}={H + 8} of float32" in reason(**{name: H + 8})


# ---- the choice -----------------------------------------------------------------------------------------------------


def test_the_kernels_are_the_default_on_hopper():
    problem, _ = problem_of(BASE)
    for name in (None, ("mosaic_gpu", "xla")):
        chosen = choice.choose(problem, name)
        assert (chosen.backend.name, chosen.gradients.name, chosen.elsewhere.name) == (
            "mosaic_gpu",
            "mosaic_gpu",
            "xla",
        )
    assert "2 bfloat16 parts each, for 3 products" in pallas_fa.explain(*BASE.inputs().qkv)


@pytest.mark.parametrize(("T", "name"), [(16, "xla"), (17, "mosaic_gpu")])
def test_few_queries_are_not_worth_splitting_the_keys(T, name):
    problem, _ = problem_of(dataclasses.replace(BASE, T=T))
    assert choice.choose(problem, None).backend.name == name
    assert choice.choose(problem, "mosaic_gpu").backend.name == "mosaic_gpu"


@pytest.mark.parametrize(("H", "precision"), [(32, "high"), (64, "high"), (64, "highest"), (128, "high")])
@pytest.mark.parametrize("deterministic", [False, True], ids=["fused", "two passes"])
def test_kernels_lower(H, precision, deterministic):
    """With a bias and its gradient, which take the most memory."""
    q = jax.ShapeDtypeStruct((2, 768, 4, H), jnp.float32)
    bias = jax.ShapeDtypeStruct((2, 4, 768, 768), jnp.float32)
    options = dict(precision=precision, deterministic_gradients=deterministic, implementation="mosaic_gpu")
    attend = functools.partial(pallas_fa.dot_product_attention, **options)
    gradients = jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2, 3))
    assert kernels(gradients, q, q, q, bias) == (3 if deterministic else 2)
