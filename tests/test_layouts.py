"""`layout="BNTH"`: the results of "BTNH" with the dims in another order, everywhere, and no transposes in the kernels."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from pallas_fa.context_parallel import all_to_all_attention, ring_attention
from pallas_fa.nn import attention_fn
from pallas_fa.problem import normalise
from tests import (
    accuracy,
    context_parallel_calls,
    interpreted_backward,
    layers,
    partitioned_calls,
    test_kernel_interpreted,
)
from tests.cases import TABLE
from tests.lowering import kernels
from tests.partitioned_calls import shared as shared
from tests.test_sharding import close

pytestmark = pytest.mark.usefixtures("quick_compilation")
TOKENS = ("query", "key", "value")


def swap(x):
    return jnp.swapaxes(x, -3, -2)


def of_btnh(attention):
    """`attention` in the layout BNTH, as a function of arrays BTNH."""

    def run(query, key, value, **keywords):
        out, lse = attention(*map(swap, (query, key, value)), layout="BNTH", **keywords)
        return swap(out), lse

    return run


@pytest.mark.parametrize("case", sorted(layers.representatives(TABLE), key=str), ids=str)
def test_table(case, check, small_chunks):
    check(case, "xla", gradients=True, layout="BNTH")
    check(case, "reference", gradients=case.dtype in accuracy.RELATIVE, layout="BNTH")


# ---- kernels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ("odd head dims, sinks", "grouped heads", "pairs, empty rows"))
def test_interpreted_forward(name):
    """Bitwise equal: only where tiles lie in memory differs."""
    case, config = test_kernel_interpreted.CASES[name]
    inputs, found = case.inputs(), []
    for layout in ("BTNH", "BNTH"):
        qkv = map(swap, inputs.qkv) if layout == "BNTH" else inputs.qkv
        keywords = inputs.keywords(inputs.arrays)
        (out, lse), races = test_kernel_interpreted.interpreted(
            *normalise(*qkv, config=config, layout=layout, **keywords)
        )
        assert not races
        found.append((swap(out) if layout == "BNTH" else out, lse))
    jax.tree.map(np.testing.assert_array_equal, *found)


BACKWARD = {name: interpreted_backward.CASES[name] for name in ("unequal head dims", "empty rows", "head dim 256")}
BACKWARD["query heads in parts"] = interpreted_backward.HEAD_PARTS["several key heads"]


@pytest.mark.parametrize("name", BACKWARD)
def test_interpreted_backward(name):
    case, keywords = BACKWARD[name]
    problem, operands = interpreted_backward.problem_of(case, keywords)
    out, lse, d_out, d_lse = interpreted_backward.residuals_of(case, problem, operands)
    want, _ = interpreted_backward.interpreted(problem, operands, out, lse, d_out, d_lse)
    qkv = tuple(map(swap, case.inputs().qkv))
    problem, operands = interpreted_backward.problem_of(case, {**keywords, "layout": "BNTH"}, qkv)
    got, races = interpreted_backward.interpreted(problem, operands, swap(out), lse, swap(d_out), d_lse)
    assert not races
    jax.tree.map(np.testing.assert_array_equal, tuple(map(swap, got[:3])), want[:3])


def forward_and_backward(layout, **keywords):
    def run(q, k, v, d_out, d_lse):
        attend = functools.partial(pallas_fa.dot_product_attention, layout=layout, return_residual=True, **keywords)
        results, pullback = jax.vjp(lambda *qkv: attend(*qkv, implementation=("mosaic_gpu", "xla")), q, k, v)
        return results, pullback((d_out, d_lse))

    return run


def shapes(B, T, N, K, H, Hv, dtype=jnp.bfloat16):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    lse = jax.ShapeDtypeStruct((B, T, N), jnp.float32)
    return array(B, N, T, H), array(B, K, T, H), array(B, K, T, Hv), array(B, N, T, Hv), lse


PROGRAMS = {  # keywords, sizes, kernels
    "causal, H=64": (dict(is_causal=True), (2, 256, 4, 2, 64, 64), 2),
    "H=128, no multiple of 8": ({}, (2, 113, 4, 4, 128, 128), 2),
    "deterministic": (dict(is_causal=True, deterministic_gradients=True), (2, 256, 4, 1, 64, 128), 3),
    "H=256": (dict(local_window_size=(100, 0)), (1, 200, 2, 2, 256, 200), 3),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_kernels_lower_without_a_transpose(name):
    keywords, sizes, count = PROGRAMS[name]
    run, arrays = forward_and_backward("BNTH", **keywords), shapes(*sizes)
    assert kernels(run, *arrays) == count
    text = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    transposed = re.findall(r"stablehlo\.transpose .*?\(tensor<([\dx]+)x\w+>\)", text)
    assert transposed, "that of lse"
    assert max(math.prod(map(int, dims.split("x"))) for dims in transposed) == math.prod(sizes[:3])


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_compiled_program_copies_nothing(name):
    keywords, sizes, _ = PROGRAMS[name]
    arrays = shapes(*sizes)
    text = jax.jit(forward_and_backward("BNTH", **keywords)).lower(*arrays).compile().as_text()
    smallest = min(math.prod(x.shape) for x in arrays[:3])
    for dims in re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|transpose)(?:-start)?\(", text):
        assert math.prod(map(int, dims.split(","))) < smallest, dims


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_kernels(name):
    keywords, sizes, _ = PROGRAMS[name]
    draw = lambda i, like: jax.random.normal(jax.random.key(i), like.shape).astype(like.dtype)
    q, k, v, d_out, d_lse = (draw(i, like) for i, like in enumerate(shapes(*sizes)))
    results, gradients = jax.jit(forward_and_backward("BNTH", **keywords))(q, k, v, d_out, d_lse)
    want, want_gradients = jax.jit(forward_and_backward("BTNH", **keywords))(*map(swap, (q, k, v, d_out)), d_lse)
    np.testing.assert_array_equal(swap(results[0]), want[0])
    np.testing.assert_array_equal(results[1], want[1])
    for x, y in zip(gradients, want_gradients, strict=True):  # the sums of dQ have no fixed order
        np.testing.assert_allclose(np.float32(swap(x)), np.float32(y), atol=2e-2 * float(jnp.abs(y).max()))


# ---- transformations and devices ----------------------------------------------------------------------------------------


def test_derivatives_and_vmap(rng):
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    qkv = normal(2, 2, 5, 4, 8), normal(2, 2, 6, 2, 8), normal(2, 2, 6, 2, 8)
    attend = functools.partial(
        pallas_fa.dot_product_attention,
        is_causal=True,
        sinks=jnp.arange(4.0),
        implementation="xla",
        return_residual=True,
    )

    def everything(attend):
        loss = lambda *qkv, **mode: sum(jnp.sum(jnp.sin(x)) for x in attend(*qkv, **mode))
        square = lambda q, k, v: jnp.sum(jnp.square(jax.grad(loss)(q, k, v)))
        along = lambda *qkv: jax.jvp(functools.partial(loss, forward_mode=True), qkv, qkv)
        return jax.jit(jax.vmap(lambda *qkv: (attend(*qkv), jax.grad(square, (0, 1, 2))(*qkv), along(*qkv))))

    close(everything(of_btnh(attend))(*qkv), everything(attend)(*qkv))


@pytest.mark.parametrize("name", ("key heads shared by some", "lengths", "rows", "fewer key heads than shards"))
def test_arrays_that_jit_shards(name, shared):
    """Each device computes its share, as in the other layout."""
    case = partitioned_calls.CASES[name]
    a = partitioned_calls.on(partitioned_calls.mesh_of(*case.mesh), case.inputs(), case.specs, case.queries)
    attend = functools.partial(partitioned_calls.attend, **case.static)
    bnth = lambda a: of_btnh(
        lambda q, k, v, **rest: attend({**a, **dict(zip(TOKENS, (q, k, v), strict=True))}, **rest)
    )(*(a[name] for name in TOKENS))
    out, gradients = partitioned_calls.truth(name)
    partitioned_calls.check(bnth, a, out)
    partitioned_calls.check(functools.partial(partitioned_calls.gradient, attend=bnth), a, gradients)


def test_explicit_axes():
    mesh = partitioned_calls.mesh_of(kind=jax.sharding.AxisType.Explicit)
    a = partitioned_calls.on(mesh, partitioned_calls.tokens(), {}, partitioned_calls.HEADS)
    qkv = [swap(a[name]) for name in TOKENS]
    out, lse = jax.jit(functools.partial(pallas_fa.dot_product_attention, layout="BNTH", return_residual=True))(*qkv)
    spec = jax.sharding.PartitionSpec
    assert jax.typeof(out).sharding.spec == spec("data", "model", None, None)
    assert jax.typeof(lse).sharding.spec == spec("data", None, "model")


@pytest.mark.parametrize(
    ("name", "attention", "placement"),
    (
        ("lengths", ring_attention, "zigzag"),
        ("lengths", all_to_all_attention, "contiguous"),
        ("causal", ring_attention, "zigzag"),
    ),
)
def test_context_parallelism(name, attention, placement):
    bnth = lambda *, query, key, value, return_residual, **rest: of_btnh(
        functools.partial(attention, return_residual=return_residual, **rest)
    )(query, key, value)
    context_parallel_calls.check(name, bnth, 4, placement)


# ---- what is refused ----------------------------------------------------------------------------------------------------


def test_errors():
    q, k = jnp.ones((2, 4, 5, 8)), jnp.ones((2, 2, 6, 8))
    assert pallas_fa.dot_product_attention(q, k, k, layout="BNTH").shape == q.shape
    with pytest.raises(ValueError, match="layout='BHSD' is not one of 'BTNH', 'BNTH'.*only a reshape"):
        pallas_fa.dot_product_attention(q, k, k, layout="BHSD")
    with pytest.raises(ValueError, match="layout=array.* is not one of 'BTNH', 'BNTH'"):
        pallas_fa.dot_product_attention(q, k, k, layout=np.array(["BNTH", "BTNH"]))
    with pytest.raises(ValueError, match="layout=array.*: Flax's modules pass"):
        attention_fn(q, k, k, layout=np.array(["BNTH", "BTNH"]))
    with pytest.raises(ValueError, match="N=5 heads and key has K=6.*pass layout='BNTH' or transpose"):
        pallas_fa.dot_product_attention(q, k, k)
    with pytest.raises(ValueError, match=r"different lengths S.*key \[\*B, K, S, H\]"):
        pallas_fa.dot_product_attention(q, k, jnp.ones((2, 2, 7, 8)), layout="BNTH")
    with pytest.raises(ValueError, match="layout='BNTH': Flax's modules pass"):
        attention_fn(q, k, k, layout="BNTH")
