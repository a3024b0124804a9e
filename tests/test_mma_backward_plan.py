"""Which passes the backward by mma.sync takes, and what it says where the tiles that a call names can't do it."""

import functools

import jax
import jax.numpy as jnp
import pytest

import pallas_fa
from pallas_fa import scores
from pallas_fa.backends.gpu import head_parts
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.mma.backward.choose import plans
from pallas_fa.backends.mma.config import BackwardConfig, Config, ForwardConfig, FusedBackwardConfig
from tests.abstract import problem_of_types
from tests.kernel_snapshots import kernels

A100, RTX = Gpu("8.0", 108, 163 * 1024), Gpu("8.6", 84, 99 * 1024)


def passes(H, Hv=None, gpu=A100, bias=None, **keywords):
    """What each pass gives."""
    q, v = (jax.ShapeDtypeStruct((2, 256, 4, dim), jnp.bfloat16) for dim in (H, Hv or H))
    arrays = (q, q, v) if bias is None else (q, q, v, jax.ShapeDtypeStruct(bias, jnp.float32))
    return [" ".join(plan.kind.gives) for plan in plans(problem_of_types(*arrays, **keywords), gpu)]


def test_one_pass_gives_all_gradients_where_it_can():
    one, two, three = ["dk dv dq"], ["dk dv", "dq"], ["dv", "dk", "dq"]
    assert [passes(H) for H in (40, 64, 96, 128, 192, 256)] == [one, one, one, one, three, one]
    assert [passes(H, gpu=RTX) for H in (64, 128, 192, 256)] == [one, one, three, one]
    assert passes(64, 128) == two and passes(128, 256) == one
    assert passes(128, deterministic_gradients=True) == two
    assert passes(256, deterministic_gradients=True) == three
    assert [passes(128, bias=(4, *shape)) for shape in ((256, 256), (1, 256), (256, 1))] == [one, one, two]
    assert [passes(H, gpu=RTX, bias=(4, 256, 256)) for H in (64, 128, 256)] == [one, one, one]


CAUSAL = {"is_causal": True}
# (B, S, N, K, H), the mask: how many parts of query heads, on an A100.
PARTS = {
    "8 heads on 1": ((1, 4096, 8, 1, 128), CAUSAL, 8),
    "8 heads on 1, no mask": ((1, 4096, 8, 1, 128), {}, 8),
    "one short sequence": ((1, 1024, 32, 8, 128), CAUSAL, 2),
    "a batch": ((4, 4096, 32, 8, 128), CAUSAL, 1),
    "a large batch": ((16, 4096, 32, 8, 128), CAUSAL, 1),
    "lengths are not known": ((1, 2048, 8, 1, 64), dict(key_value_seq_lengths=jnp.array([9]), **CAUSAL), 8),
    "heads of their own keys": ((1, 1024, 8, 8, 128), CAUSAL, 1),
}


def types_of(B, T, S, N, K, H):
    return (jax.ShapeDtypeStruct((B, length, heads, H), jnp.bfloat16) for length, heads in ((T, N), (S, K), (S, K)))


def parts_of(*dims, **keywords):
    return [plan.head_parts for plan in plans(problem_of_types(*types_of(*dims), **keywords), A100)]


@pytest.mark.parametrize("name", PARTS)
def test_query_heads_are_in_parts_where_key_heads_are_few(name):
    (B, S, N, K, H), mask, parts = PARTS[name]
    dims = B, S, S, N, K, H
    assert parts_of(*dims, **mask) == [parts]
    assert parts_of(*dims, deterministic_gradients=True, **mask) == [parts, 1]
    assert parts_of(*dims, config=Config(backward=BackwardConfig()), **mask) == [1, 1]
    said = pallas_fa.explain(*types_of(*dims), implementation="mma", **mask)
    assert ("parts in the backward" in said) == (parts > 1)


def test_parts_of_few_keys_cost_what_whole_blocks_do():
    assert parts_of(32, 65, 5, 142, 2, 128, **CAUSAL) == [1]


def test_explain_says_where_passes_have_different_parts():
    found = plans(problem_of_types(*types_of(16, 348, 348, 32, 1, 192)), RTX)
    assert [plan.head_parts for plan in found] == [8, 4, 1]
    said = head_parts.remark(found)
    assert said == "the query heads of a key head are in up to 8 parts in the backward, each with CTAs of its own"


def test_named_tiles_are_taken():
    assert passes(128, config=Config(backward=BackwardConfig())) == ["dk dv", "dq"]
    assert passes(128, config=Config(backward=FusedBackwardConfig(1, 64))) == ["dk dv dq"]


def gradients(q, config, *arrays, **keywords):
    call = functools.partial(pallas_fa.dot_product_attention, implementation="mma", config=config, **keywords)
    return kernels(lambda *x: jax.vjp(lambda q, *x: call(q, q, q, *x), *x)[1](q), q, *arrays)


REFUSED = {
    "one pass in a fixed order": (
        128, FusedBackwardConfig(), (), {"deterministic_gradients": True}, "adds dQ up in no fixed order",
    ),
    "one pass, a bias of queries": (
        128, FusedBackwardConfig(), ((2, 128, 1),), {}, "no gradients of a score's arrays with one value per query",
    ),
    "columns that are no multiple": (
        64, FusedBackwardConfig(), (), {}, "needs head dims of a multiple of 128 columns, with wgs=2",
    ),
    "too much shared memory": (256, FusedBackwardConfig(2, 128, 32), (), {}, r"\d+ bytes of shared memory, of which"),
    "a shared bias in a fixed order": (
        64, BackwardConfig(), ((128, 128),), {"deterministic_gradients": True}, "broadcast over batch entries or heads",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_named_tiles_that_cannot_do_it_are_refused(name):
    """`explain` says so, the forward runs, and gradients raise: no other tiles, and no other backend, take their place."""
    H, tiles, shapes, keywords, reason = REFUSED[name]
    q, *arrays = jnp.ones((2, 128, 2, H), jnp.bfloat16), *(jnp.ones(shape) for shape in shapes)
    config = Config(backward=tiles)
    said = pallas_fa.explain(q, q, q, *arrays, implementation="mma", config=config, **keywords)
    (line,) = (line for line in said.splitlines() if line.startswith("mma:"))
    assert "runs this call" in line and "without gradients, because" in line
    with pytest.raises(NotImplementedError, match=reason) as error:
        gradients(q, config, *arrays, **keywords)
    assert f"config.backward={tiles!r}" in str(error.value) and "Name other tiles" in str(error.value)
    forward = functools.partial(pallas_fa.dot_product_attention, implementation="mma", config=config, **keywords)
    assert len(kernels(lambda q, *x: forward(q, q, q, *x), q, *arrays)) == 1


def test_tiles_of_the_forward_leave_gradients_to_who_can_do_them():
    q, bias = jnp.ones((2, 128, 2, 64), jnp.bfloat16), jnp.ones((128, 128))
    keywords = {"config": Config(forward=ForwardConfig()), "deterministic_gradients": True}
    said = pallas_fa.explain(q, q, q, bias, implementation="mma", **keywords)
    assert "xla computes its gradients, because" in said
    assert len(gradients(q, keywords.pop("config"), bias, **keywords)) == 1  # the forward's


def test_steps_of_too_many_queries_are_refused():
    with pytest.raises(ValueError, match=r"width=64 with wgs=4 makes steps of 256 queries; the most is 128"):
        FusedBackwardConfig(4, 64, 64)


def test_head_parts_that_do_not_divide_the_query_heads_are_refused():
    q, k = jnp.ones((1, 128, 4, 64), jnp.bfloat16), jnp.ones((1, 128, 1, 64), jnp.bfloat16)
    config = Config(backward=BackwardConfig(head_parts=3))
    said = pallas_fa.explain(q, k, k, implementation="mma", config=config)
    assert "head_parts=3 of config= does not divide the 4 query heads of a key head" in said
    with pytest.raises(ValueError, match="head_parts=0 must be at least 1"):
        FusedBackwardConfig(head_parts=0)


def test_alibi_has_one_pass():
    q, slopes = jnp.ones((1, 128, 2, 64), jnp.bfloat16), jnp.ones(2)
    call = lambda q, slopes: pallas_fa.dot_product_attention(q, q, q, score=scores.Alibi(slopes), implementation="mma")
    assert len(kernels(lambda q, slopes: jax.vjp(call, q, slopes)[1](q), q, slopes)) == 2
