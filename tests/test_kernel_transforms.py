"""JAX's transformations over the kernels, as programs for CUDA: how many kernels are in them, and that they lower at all.

On a machine without a GPU the same programs run on XLA, which `test_transforms` checks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_fa
from tests.lowering import kernels

KEEP = jax.checkpoint_policies.save_only_these_names("pallas_fa_out", "pallas_fa_lse")


def normal(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).standard_normal(shape), jnp.bfloat16)


Q, K, V, BIAS = normal(2, 40, 4, 64), normal(2, 40, 2, 64), normal(2, 40, 2, 64), normal(4, 40, 40)
IDS = jnp.repeat(jnp.arange(2), 20)[None]


def loss(q, k, v, bias, **keywords):
    out, lse = pallas_fa.dot_product_attention(
        q, k, v, bias, is_causal=True, return_residual=True, implementation=("mosaic_gpu", "xla"), **keywords
    )
    return jnp.sum(jnp.square(out.astype(jnp.float32))) + jnp.sum(lse)


gradient = jax.grad(loss, (0, 1, 2, 3))


def stacked(x):
    return jnp.stack([x, x / 2])


def with_ids(ids):
    return gradient(Q, K, V, BIAS, query_segment_ids=ids, key_value_segment_ids=ids)


PROGRAMS = {
    # name: (function, arguments, kernels in it)
    "forward": (loss, (Q, K, V, BIAS), 1),
    "gradient": (gradient, (Q, K, V, BIAS), 2),
    "vmap of queries": (jax.vmap(lambda q: gradient(q, K, V, BIAS)), (stacked(Q),), 2),
    "vmap of bias": (jax.vmap(lambda bias: gradient(Q, K, V, bias)), (stacked(BIAS),), 2),
    "vmap of sinks": (jax.vmap(lambda sinks: gradient(Q, K, V, BIAS, sinks=sinks)), (jnp.ones((3, 4)),), 2),
    "vmap of keys of dropout": (
        jax.vmap(lambda key: gradient(Q, K, V, BIAS, dropout_rate=0.1, dropout_key=key)),
        (jnp.ones((3, 2), jnp.uint32),),
        2,
    ),
    "vmap of segment ids": (jax.vmap(with_ids), (jnp.stack([jnp.tile(IDS, (2, 1))] * 3),), 2),
    "vmap of vmap": (
        jax.vmap(jax.vmap(lambda q, k: gradient(q, k, k, BIAS), (0, None)), (None, 0)),
        (stacked(Q), stacked(K)),
        2,
    ),
    "grad of grad": (
        jax.grad(lambda *x: sum(jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradient(*x))),
        (Q, K, V, BIAS),
        3,  # the backward twice: for the gradient, and for how it depends on out; their own derivatives are XLA's
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_of_a_transformed_program(name):
    fn, arguments, count = PROGRAMS[name]
    assert kernels(fn, *arguments) == count


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mma"])
def test_the_derivative_of_a_scan_over_gradients_of_a_shared_bias(implementation, monkeypatch):
    """Sums that kernels add to in memory start at zeros: constants would be made outside of the loop, on one device."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)

    def attend(q, bias):
        return pallas_fa.dot_product_attention(q, K, V, bias, implementation=(implementation, "xla"))

    def step(q, _):
        d_q, d_bias = jax.grad(lambda *x: jnp.sum(attend(*x).astype(jnp.float32)), (0, 1))(q, BIAS)
        return q - d_q, jnp.sum(d_bias)

    def after_two_steps(q):
        q, sums = jax.lax.scan(step, q, None, length=2)
        return jnp.sum(q.astype(jnp.float32)) + jnp.sum(sums.astype(jnp.float32))

    assert kernels(jax.grad(after_two_steps), Q)


def test_a_program_with_kernels_runs_on_this_platform_too():
    with_kernels = jax.jit(jax.vmap(lambda bias: gradient(Q, K, V, bias)))(stacked(BIAS))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in with_kernels)


@pytest.mark.parametrize(("policy", "count"), [(None, 3), (KEEP, 2)], ids=["everything again", "residuals kept"])
def test_remat_keeps_the_two_residuals_by_name(policy, count):
    """With out and lse kept, the forward kernel does not run again in the backward pass."""
    block = jax.checkpoint(functools.partial(loss, k=K, v=V, bias=BIAS), policy=policy)
    assert kernels(jax.value_and_grad(lambda q: block(jnp.sin(q))), Q) == count
