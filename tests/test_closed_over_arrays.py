"""Arrays that functions of `Custom` masks and scores close over: indexed by position, in every transformation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import masks, scores
from tests.lowering import kernels

T = 100
Q = jnp.asarray(np.random.default_rng(0).standard_normal((2, T, 2, 8)), jnp.float32)
IDS = jnp.arange(T) // 30
GAIN = jnp.asarray([0.5, 2.0])
CALLS = (("xla", False), ("xla", True), ("reference", False))  # (implementation, forward_mode)
every_call = pytest.mark.parametrize("call", CALLS, ids=("xla", "forward mode", "reference"))


def in_documents(q, ids, gain, implementation, forward_mode):
    """A loss that reads ids and gain by position from arrays that the functions close over."""
    mask = masks.Custom(lambda b, n, t, s: ids[t] == ids[s])
    score = scores.Custom(lambda x, b, n, t, s: x * gain[n])
    out = pallas_fa.dot_product_attention(
        q, q, q, mask=mask, score=score, implementation=implementation, forward_mode=forward_mode
    )
    return jnp.sum(jnp.sin(out))


def by_arguments(q, ids, gain):
    """The same, of arrays that are passed."""
    segments = jnp.broadcast_to(ids, (2, T))
    score = scores.Custom(lambda x, b, n, t, s, gain: x * gain, gain[:, None, None])
    call = dict(query_segment_ids=segments, key_value_segment_ids=segments, score=score, implementation="xla")
    return jnp.sum(jnp.sin(pallas_fa.dot_product_attention(q, q, q, **call)))


def _scanned(loss):
    return lambda q, ids, gain: jax.lax.scan(lambda total, _: (total + loss(q, ids, gain), None), 0.0, None, length=1)[
        0
    ]


def _mapped(loss):
    return lambda q, ids, gain: jax.vmap(loss, (None, 0, 0))(q, ids[None], gain[None])[0]


# The functions of q, ids and gain whose gradient to q is that of `loss`.
NESTED = {
    "grad": lambda loss: jax.grad(loss),
    "jit of grad": lambda loss: jax.jit(jax.grad(loss)),
    "grad of jit": lambda loss: jax.grad(jax.jit(loss)),
    "checkpoint": lambda loss: jax.jit(jax.grad(jax.checkpoint(loss))),
    "scan": lambda loss: jax.jit(jax.grad(_scanned(loss))),
    "vmap": lambda loss: jax.grad(_mapped(loss)),
}


@pytest.fixture(scope="module")
def gradient():
    return jax.grad(by_arguments)(Q, IDS, GAIN)


@pytest.mark.parametrize(
    ("call", "nested"),
    [*((CALLS[0], nested) for nested in NESTED), (CALLS[1], "grad of jit"), (CALLS[2], "jit of grad")],
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_indexed_arrays_are_right(call, nested, gradient, small_chunks):
    """Under jit and vmap they are tracers, which a derivative would see when their trace has ended."""
    got = NESTED[nested](lambda q, ids, gain: in_documents(q, ids, gain, *call))(Q, IDS, GAIN)
    np.testing.assert_allclose(got, gradient, atol=1e-4)


def test_a_change_of_what_is_closed_over_is_seen(small_chunks):
    """Though the function, and so the compiled program, is the same."""
    gain = GAIN
    score = scores.Custom(lambda x, b, n, t, s: x * gain[n])
    attend = lambda: pallas_fa.dot_product_attention(Q, Q, Q, score=score, implementation="xla")
    first, gain = attend(), 2 * GAIN
    assert abs(attend() - first).max() > 0.1


@pytest.mark.parametrize("of_values", [jnp.float32, jnp.int32, jnp.complex64], ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("others", [jnp.float32, jnp.int32, jnp.complex64], ids=lambda dtype: dtype.__name__)
def test_a_change_of_the_dtype_of_what_is_closed_over_is_seen(of_values, others, small_chunks):
    """Floats travel as integers of the same bits, which integers look like."""
    gain = jnp.array([1, 2], of_values)
    score = scores.Custom(lambda x, b, n, t, s: x * gain[n].real)
    attend = lambda: pallas_fa.dot_product_attention(Q, Q, Q, score=score, implementation="xla")
    attend()
    gain = jnp.array([3, 1], others)
    passed = scores.Custom(lambda x, b, n, t, s, gain: x * gain, jnp.array([3.0, 1.0])[:, None, None])
    want = pallas_fa.dot_product_attention(Q, Q, Q, score=passed, implementation="xla")
    np.testing.assert_allclose(attend(), want, atol=1e-6)


DIFFERENTIATED = {
    "grad": lambda f: jax.grad(f)(GAIN),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(GAIN),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(GAIN),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f))(GAIN),
    "scan": lambda f: jax.grad(lambda a: jax.lax.scan(lambda c, _: (c + f(a), None), 0.0, None, length=2)[0])(GAIN),
    "vmap": lambda f: jax.grad(lambda a: jax.vmap(f)(a[None])[0])(GAIN),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f))(GAIN[None]),
    "jvp": lambda f: jax.jvp(f, (GAIN,), (GAIN,)),
    "linearize": lambda f: jax.linearize(f, GAIN),
    "hessian": lambda f: jax.hessian(f)(GAIN),
}


@pytest.mark.parametrize("how", DIFFERENTIATED)
@every_call
def test_gradients_of_closed_over_arrays_raise(how, call):
    """They would be 0 without a word in forward mode under jit."""
    with pytest.raises(
        NotImplementedError, match=r"closes over.*shape \(2,\).*Custom\(fn, array\).*RelativeBias.*stop_gradient"
    ):
        DIFFERENTIATED[how](lambda gain: in_documents(Q, IDS, gain, *call))


@every_call
def test_stopped_gradients_are_zero(call):
    loss = lambda gain: in_documents(Q, IDS, jax.lax.stop_gradient(gain), *call)
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(GAIN), 0)


def test_keys_may_be_closed_over(small_chunks):
    """Random keys too, traced ones among them."""

    def out(key, implementation):
        draw = lambda i: jax.random.bernoulli(jax.random.fold_in(key, i), 0.7)
        mask = masks.Custom(lambda b, n, t, s: jnp.vectorize(draw)(t * T + s))
        return pallas_fa.dot_product_attention(Q, Q, Q, mask=mask, implementation=implementation)

    for key in (jax.random.key(1), jax.random.PRNGKey(1)):
        got, want = (jax.jit(out, static_argnums=1)(key, i) for i in ("xla", "reference"))
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_kernels_take_scalars_and_say_why_no_more():
    x = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    width, factor = jnp.int32(30), jnp.float32(0.5)

    def gradient(x, width, factor):
        mask = masks.Custom(lambda b, n, t, s: abs(t - s) < width)
        score = scores.Custom(lambda x, b, n, t, s: x * factor)
        call = lambda x: pallas_fa.dot_product_attention(x, x, x, mask=mask, score=score, implementation="mosaic_gpu")
        return jax.grad(lambda x: jnp.sum(call(x).astype(jnp.float32)))(x)

    assert kernels(lambda x: gradient(x, width, factor), x) == 2
    assert kernels(gradient, x, width, factor) == 2
    for keywords in (
        {"mask": masks.Custom(lambda b, n, t, s: IDS[t] == IDS[s])},
        {"score": scores.Custom(lambda x, b, n, t, s: x * GAIN[n])},
    ):
        told = pallas_fa.explain(x, x, x, **keywords)
        assert "closes over an array of shape" in told and "Custom(fn, array)" in told, told
        assert "xla: runs this call" in told, told
        call = lambda x, keywords=keywords: pallas_fa.dot_product_attention(x, x, x, **keywords)
        assert kernels(call, x) == 0


@pytest.mark.parametrize("how", ("ring", "all_to_all"))
def test_context_parallel(how, small_chunks):
    """Positions are those of the whole sequence, and what mixes them is refused there too."""
    mesh = jax.make_mesh((2,), ("sp",), (AxisType.Auto,))
    attend = getattr(pallas_fa.context_parallel, f"{how}_attention")

    def out(fn, q):
        call = lambda q: attend(
            q, q, q, mask=masks.Custom(fn), axis_name="sp", placement="contiguous", implementation="xla"
        )
        return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp")))(q)

    segments = jnp.broadcast_to(IDS, (2, T))
    want = pallas_fa.dot_product_attention(Q, Q, Q, query_segment_ids=segments, key_value_segment_ids=segments)
    np.testing.assert_allclose(out(lambda b, n, t, s: IDS[t] == IDS[s], Q), want, atol=1e-5)
    with pytest.raises(ValueError, match="is not elementwise"):
        out(lambda b, n, t, s: t >= t.max(), Q)
