"""Attention on sharded arrays under jit, in shard_map and in pmap: the results of one device, and nothing gathered."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import scores
from tests.lowering import kernels

B, T, S, N, K, H = 4, 40, 40, 8, 4, 16
FLOATS = ("query", "key", "value", "bias", "slopes")
FAST = {"xla_backend_optimization_level": 0}  # compiles much faster
ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"

HEADS = P("data", None, "model")
SPECS = {"query": HEADS, "key": HEADS, "value": HEADS, "bias": P(None, "model"), "ids": P("data"), "slopes": P("model")}


@pytest.fixture
def arguments(rng):
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)
    return {
        "query": normal(B, T, N, H),
        "key": normal(B, S, K, H),
        "value": normal(B, S, K, H),
        "bias": normal(1, N, T, S),
        "ids": jnp.asarray(np.sort(rng.integers(0, 3, (B, T)), axis=1)),
        "slopes": jnp.abs(normal(N)),
    }


def mesh_of(kind, data=2, model=4):
    return jax.make_mesh((data, model), ("data", "model"), axis_types=(kind, kind))


def attend(a, implementation="xla"):
    return pallas_fa.dot_product_attention(
        a["query"], a["key"], a["value"], a["bias"], query_segment_ids=a["ids"], key_value_segment_ids=a["ids"],
        score=scores.Alibi(a["slopes"]), is_causal=True, implementation=implementation, return_residual=True,
    )  # fmt: skip


def split(a):
    return {name: a[name] for name in FLOATS}, a["ids"]


def gradient(a, attend=attend):
    """Gradients of all float arguments, through out and lse."""
    floats, ids = split(a)
    loss = lambda floats: sum(jnp.sum(jnp.sin(x)) for x in attend({**floats, "ids": ids}))
    return jax.grad(loss)(floats)


def second(a, attend=attend):
    floats, ids = split(a)
    squares = lambda floats: sum(jnp.sum(x**2) for x in gradient({**floats, "ids": ids}, attend).values())
    return jax.grad(squares)(floats)


def close(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max())


def collectives(compiled):
    """The collective operations of a compiled program, or of its text, by name."""
    text = compiled if isinstance(compiled, str) else compiled.as_text()
    names = (ALL_GATHER, ALL_REDUCE, "all-to-all", "collective-permute", "reduce-scatter")
    return set(re.findall(rf" ({'|'.join(names)})(?:-start)?\(", text))


def compile(fn, *args):
    return jax.jit(fn).lower(*args).compile(FAST)


def on(mesh, a, specs=SPECS):
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in a.items()}


# ---- jit ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_jit_partitions_batch_and_heads_and_gathers_nothing(kind, arguments):
    sharded = on(mesh_of(kind), arguments)
    forward, backward = compile(attend, sharded), compile(gradient, sharded)
    assert collectives(forward) <= {ALL_REDUCE}  # of the bounds of loops, which the devices share
    assert collectives(backward) <= {ALL_REDUCE}  # and of the gradients of what is the same on several
    out, lse = forward(sharded)
    for x in (out, lse):
        assert x.sharding.is_equivalent_to(NamedSharding(sharded["query"].sharding.mesh, HEADS), x.ndim)
    close((out, lse), attend(arguments))
    got = backward(sharded)
    close(got, gradient(arguments))
    assert got["bias"].sharding.is_equivalent_to(sharded["bias"].sharding, 4)


def test_explicit_axes_outside_of_jit_and_under_vmap(arguments):
    sharded = on(mesh_of(AxisType.Explicit), arguments)
    close(attend(sharded), attend(arguments))
    several = lambda a: jax.vmap(lambda slopes: gradient({**a, "slopes": slopes}))(jnp.stack([a["slopes"]] * 2))
    close(jax.jit(several)(sharded), several(arguments))


def test_values_of_numpy_arrays_are_checked_on_explicit_axes(arguments):
    sharded = on(mesh_of(AxisType.Explicit), arguments)
    with pytest.raises(ValueError, match="query_segment_ids holds 4294967296"):
        attend({**sharded, "ids": np.full((B, T), 2**32)})
    ids = np.asarray(arguments["ids"])
    close(attend({**sharded, "ids": ids}), attend(arguments))


def test_derivatives_of_gradients_on_explicit_axes(arguments):
    close(compile(second, sharded := on(mesh_of(AxisType.Explicit), arguments))(sharded), second(arguments))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_fewer_key_heads_than_shards(kind, arguments):
    """Keys are then the same on several devices."""
    specs = {**SPECS, "key": P(), "value": P()}
    sharded = on(mesh_of(kind, 1, 8), arguments, specs)
    got = compile(gradient, sharded)(sharded)
    close(got, gradient(arguments))


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_queries_may_be_sharded_along_their_length(kind, arguments):
    whole = P("data")
    specs = {**dict.fromkeys(SPECS, P()), "query": P("data", "model"), "key": whole, "value": whole}
    sharded = on(mesh_of(kind), arguments, specs)
    forward = compile(attend, sharded)
    close(forward(sharded), attend(arguments))
    close(compile(gradient, sharded)(sharded), gradient(arguments))


# ---- shard_map and pmap -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit), ids=str)
def test_shard_map_over_one_axis_of_a_mesh(kind, arguments):
    mesh = mesh_of(kind)
    specs = {name: P("data") if name in ("query", "key", "value", "ids") else P() for name in SPECS}
    on_data = lambda fn, out_specs: jax.shard_map(
        fn, mesh=mesh, in_specs=(specs,), out_specs=out_specs, axis_names={"data"}
    )
    sharded = on(mesh, arguments, specs)
    close(jax.jit(on_data(attend, P("data")))(sharded), attend(arguments))
    floats = {name: specs[name] for name in FLOATS}
    close(jax.jit(on_data(gradient, floats))(sharded), gradient(arguments))
    if kind == AxisType.Explicit:
        by_heads = on(mesh, arguments, {**specs, "query": HEADS})
        with pytest.raises(NotImplementedError, match="sharded over the explicit mesh axes \\['model'\\]"):
            jax.jit(on_data(attend, P("data")))(by_heads)


def sharded_map(fn, out_specs=(HEADS, HEADS)):
    """`fn` of local shards, with the checks that shard_map makes by default."""
    return jax.shard_map(fn, mesh=mesh_of(AxisType.Auto), in_specs=(SPECS,), out_specs=out_specs)


@pytest.mark.parametrize("implementation", ("xla", "reference"))
@pytest.mark.parametrize("derivative", (gradient, second), ids=("gradient", "second"))
def test_shard_map_with_its_checks(derivative, implementation, arguments):
    """The bias is the same on all devices of an axis: its gradient is summed over that axis."""
    local = sharded_map(functools.partial(attend, implementation=implementation))
    close(compile(local, arguments)(arguments), attend(arguments))
    close(compile(functools.partial(derivative, attend=local), arguments)(arguments), derivative(arguments))


@pytest.mark.smoke
def test_transformations_inside_shard_map(arguments):
    """scan over layers with remat and a policy, and vmap."""
    keep = jax.checkpoint_policies.save_only_these_names("pallas_fa_out", "pallas_fa_lse")

    def layers(a):
        layer = jax.checkpoint(lambda query: query + attend({**a, "query": query})[0], policy=keep)
        return jax.lax.scan(lambda x, _: (layer(x), None), a["query"], None, length=3)[0], None

    def mapped(a):
        shared = {name: a[name][None] for name in ("query", "key", "value", "ids")}
        each = jax.vmap(lambda own: attend({**a, **own}), (dict.fromkeys(shared, 1),))
        return tuple(x[:, 0] for x in each(shared))

    local = sharded_map(layers, (HEADS, None))
    loss = lambda f: lambda query: jnp.sum(jnp.sin(f({**arguments, "query": query})[0]))
    close(compile(jax.grad(loss(local)), arguments["query"])(arguments["query"]),
          jax.grad(loss(layers))(arguments["query"]))  # fmt: skip
    close(compile(sharded_map(mapped), arguments)(arguments), attend(arguments))


def test_kernels_lower_inside_shard_map(arguments):
    x = jnp.ones((B, T, N, 64), jnp.bfloat16)
    a = {**arguments, "query": x, "key": x[:, :, :K], "value": x[:, :, :K]}
    local = sharded_map(functools.partial(attend, implementation=("mosaic_gpu", "xla")))
    assert kernels(functools.partial(gradient, attend=local), a) == 2


@pytest.mark.smoke
def test_pmap(arguments):
    a = {name: jnp.stack([x, -x]) for name, x in arguments.items()}
    got = jax.pmap(gradient)(a)
    want = [gradient({name: x[i] for name, x in a.items()}) for i in range(2)]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *want))
