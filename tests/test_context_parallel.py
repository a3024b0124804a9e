"""Ring and all-to-all attention on 2, 4 and 8 devices: the results of one device, under any transformation."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import scores
from pallas_fa.context_parallel import all_to_all_attention, from_zigzag, ring_attention, to_zigzag
from tests.context_parallel_calls import (
    CASES,
    PLACEMENTS,
    N,
    T,
    attend,
    check,
    everything,
    normal,
    sharded,
    tokens,
)
from tests.lowering import kernels
from tests.test_sharding import close, compile


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", CASES)
def test_ring_attention_is_attention(name, placement):
    check(name, ring_attention, 4, placement)


@pytest.mark.parametrize(
    ("name", "size", "placement"),
    (
        ("alibi", 2, "zigzag"),
        ("alibi", 8, "zigzag"),
        ("alibi", 8, "contiguous"),
        ("causal", 2, "zigzag"),
        ("causal", 8, "zigzag"),
        ("full", 2, "contiguous"),
        ("full", 8, "contiguous"),
    ),
)
def test_ring_of_any_size(name, size, placement):
    check(name, ring_attention, size, placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_ring_of_one_device_is_attention(placement):
    mesh = jax.make_mesh((1,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    ring = functools.partial(ring_attention, axis_name="ring", placement=placement, is_causal=True)
    ring = jax.shard_map(ring, mesh=mesh, in_specs=P(None, "ring"), out_specs=P(None, "ring"))
    loss = lambda attend: lambda *qkv: jnp.sum(jnp.sin(attend(*qkv)))
    qkv = tuple(tokens().values())
    got, want = (
        jax.grad(loss(attend), (0, 1, 2))(*qkv)
        for attend in (ring, functools.partial(pallas_fa.dot_product_attention, is_causal=True))
    )
    close(got, want)


@pytest.mark.parametrize("name", CASES)
def test_all_to_all_attention_is_attention(name):
    check(name, all_to_all_attention, 4, "contiguous")


@pytest.mark.parametrize("attention", (ring_attention, all_to_all_attention), ids=lambda x: x.__name__)
def test_dropout_of_batch_entries_and_heads(attention, monkeypatch):
    """Inside of shard_map batch entries are those of the shard, so they are on every device here."""
    arrays, static = CASES["dropout"]
    case = arrays, {**static, "broadcast_dropout": False, "is_causal": True, "logits_soft_cap": 3.0}
    monkeypatch.setitem(CASES, "dropout of heads", case)
    check("dropout of heads", attention, 8, "zigzag")


@pytest.mark.parametrize(("size", "placement"), ((2, "zigzag"), (8, "zigzag"), (8, "contiguous")))
def test_all_to_all_of_any_size(size, placement):
    """With fewer key heads than devices they are repeated."""
    check("alibi", all_to_all_attention, size, placement)


def test_layers_with_remat():
    """Under scan and remat with a policy on the residuals, on one axis of a mesh whose other axis is automatic."""
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
    x = tokens(N)["query"]
    keep = jax.checkpoint_policies.save_only_these_names("pallas_fa_out", "pallas_fa_lse")

    def layers(x, attention):
        layer = jax.checkpoint(lambda x: x + attention(x, x, x, is_causal=True, implementation="xla"), policy=keep)
        return jax.lax.scan(lambda x, _: (layer(x), None), x, None, length=2)[0]

    def loss(x, attention, map=lambda f: f):
        return jnp.sum(jnp.sin(map(functools.partial(layers, attention=attention))(x)))

    ring = functools.partial(ring_attention, axis_name="ring", placement="contiguous")
    over_ring = lambda f: jax.shard_map(
        f, mesh=mesh, in_specs=P(None, "ring"), out_specs=P(None, "ring"), axis_names={"ring"}
    )
    got = compile(jax.grad(functools.partial(loss, attention=ring, map=over_ring)), x)(x)
    close(got, jax.grad(functools.partial(loss, attention=pallas_fa.dot_product_attention))(x))


def test_kernels_lower_in_a_ring():
    """One kernel forward and one backward, whatever the number of devices; four times as many in zigzag placement."""
    x = jnp.ones((1, 2048, 4, 64), jnp.bfloat16)
    arrays = {"query": x, "key": x[:, :, :2], "value": x[:, :, :2]}
    mesh = jax.make_mesh((8,), ("ring",), axis_types=(AxisType.Auto,))

    def total(arrays):
        call = lambda a: ring_attention(
            **a, axis_name="ring", placement="contiguous", is_causal=True, implementation=("mosaic_gpu", "xla")
        )
        specs = {name: P(None, "ring") for name in arrays}
        out = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=P(None, "ring"))(arrays)
        return jnp.sum(out.astype(jnp.float32))

    assert kernels(jax.grad(total), arrays) == 2


def test_derivatives_of_gradients():
    """Of tokens and of a score's arrays; also where whole rows and whole blocks attend to nothing."""
    arrays, static = CASES["lengths"]
    arrays = {**arrays, "slopes": CASES["alibi"][0]["slopes"], "bias": normal((1, 48), 6)}

    def second(attend):
        fn, floats, rest = everything(arrays, functools.partial(attend, **static))
        squares = lambda floats: sum(jnp.sum(x**2) for x in fn(floats, rest)[0].values())
        return compile(jax.grad(squares), floats)(floats)

    close(second(sharded(ring_attention, 4, "contiguous")), second(attend))


@pytest.mark.parametrize("constants", [{0, 1, 2, 3, 4, 5}, {4}], ids=["all", "the fifth"])
def test_arrays_of_a_score_that_are_constants(constants):
    """The others get their own gradients, though a ring adds positions to the leaves of the score."""
    gains = [normal((1, T), seed) for seed in range(6)]
    mesh = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])

    def louder(x, b, n, t, s, *gains):
        return x + sum((i + 1) * gain for i, gain in enumerate(gains)) * jnp.sin(t / 20)

    def attend(q, k, v, gains, attention=pallas_fa.dot_product_attention):
        score = scores.Custom(louder, *gains)
        return attention(q, k, v, is_causal=True, score=score, implementation="xla")

    ring = functools.partial(attend, attention=functools.partial(ring_attention, axis_name="ring", placement="zigzag"))
    shard = P(None, "ring")
    over_ring = jax.shard_map(ring, mesh=mesh, in_specs=(shard, shard, shard, P()), out_specs=shard)

    def loss(tokens, varied, attend):
        whole = [gains[i] if i in constants else varied[i] for i in range(6)]
        return jnp.sum(jnp.sin(3 * attend(*(tokens[name] for name in ("query", "key", "value")), whole)))

    def permuted(q, k, v, gains):
        return from_zigzag(over_ring(*(to_zigzag(x, 1, 2) for x in (q, k, v)), gains), 1, 2)

    args = tokens(), {i: gains[i] for i in range(6) if i not in constants}
    found, expected = (
        compile(jax.grad(functools.partial(loss, attend=x), argnums=(0, 1)), *args)(*args) for x in (permuted, attend)
    )
    close(found, expected)
