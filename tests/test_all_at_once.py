"""The XLA path as it is on CPUs where logits are few: all of them at once. Its results, its rule, its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import masks
from pallas_fa.backends.xla import plan
from pallas_fa.context_parallel import ring_attention
from pallas_fa.problem import normalise
from tests.cases import TABLE
from tests.layers import representatives


@pytest.fixture
def any_size(monkeypatch):
    """All logits at once, however many."""
    monkeypatch.setattr(plan, "_FEW_LOGITS", 2**40)
    monkeypatch.setattr(plan, "_MANY_KEYS", 2**40)


def _problem(T, S, B=2, N=4, **keywords):
    q, k = jnp.zeros((B, T, N, 64)), jnp.zeros((B, S, N, 64))
    return normalise(q, k, k, **keywords)[0]


@pytest.mark.parametrize("case", sorted(representatives(TABLE), key=str), ids=str)
@pytest.mark.usefixtures("any_size", "quick_compilation")
def test_table(case, check):
    check(case, "xla", gradients=True)


def test_a_ring_takes_probabilities_from_the_log_sum_exp_of_all_keys():
    """Those of a hop's keys alone would be too large in its backward."""
    mesh = jax.make_mesh((2,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v, d_out = jax.random.normal(jax.random.key(0), (4, 1, 32, 2, 8))
    in_a_ring = functools.partial(ring_attention, axis_name="context", placement="contiguous", implementation="xla")
    specs = {"in_specs": P(None, "context"), "out_specs": P(None, "context")}
    have = jax.jit(lambda *qkv: jax.vjp(jax.shard_map(in_a_ring, mesh=mesh, **specs), *qkv)[1](d_out))(q, k, v)
    attend = functools.partial(pallas_fa.dot_product_attention, implementation="reference")
    for x, y in zip(have, jax.vjp(attend, q, k, v)[1](d_out), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5)


@pytest.mark.parametrize("d_lse", [np.nan, np.inf])
def test_the_cotangent_of_the_log_sum_exp_may_be_anything_in_empty_rows(d_lse):
    x = jax.random.normal(jax.random.key(0), (1, 16, 2, 8))
    attend = functools.partial(
        pallas_fa.dot_product_attention, mask=masks.Causal(offset=-4), return_residual=True, implementation="xla"
    )
    cotangent = jnp.ones((1, 16, 2))
    d_lse = cotangent.at[:, :4].set(d_lse)
    have, want = (jax.vjp(attend, x, x, x)[1]((jnp.ones_like(x), d)) for d in (d_lse, cotangent.at[:, :4].set(0)))
    for a, b in zip(have, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("problem", "forward", "backward"),
    [
        (_problem(1024, 1024), True, False),
        (_problem(1024, 1025), False, False),
        (_problem(512, 1024), True, True),
        (_problem(512, 1025), True, False),
        (_problem(512, 512, is_causal=True), True, False),
        (_problem(512, 513, is_causal=True), False, False),
        (_problem(256, 512, is_causal=True), True, True),
        (_problem(256, 513, is_causal=True), True, False),
        (_problem(512, 512, B=32, N=8), True, True),  # 256 MiB
        (_problem(512, 512, B=32, N=9), False, False),
        (_problem(128, 128, B=512, N=9), True, True),  # as many as in one chunk
        (_problem(16, 1023), True, True),
        (_problem(16, 1024), False, False),
    ],
    ids=lambda x: f"{x.dims.T}x{x.dims.S}x{x.dims.B * x.dims.N}" if hasattr(x, "dims") else "",
)
def test_rule(problem, forward, backward):
    assert (plan.all_at_once(problem), plan.all_at_once(problem, backward=True)) == (forward, backward)
