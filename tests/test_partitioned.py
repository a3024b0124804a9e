"""Kernels on arrays that `jit` shards: the results of one device, nothing gathered, and sums over the right axes."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.partitioned_calls import (
    CASES,
    HEADS,
    TOKENS,
    B,
    H,
    S,
    T,
    attend,
    check,
    gradient,
    mesh_of,
    normal,
    on,
    tokens,
    truth,
)
from tests.partitioned_calls import shared as shared
from tests.test_sharding import ALL_REDUCE, close, collectives, compile


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x, marks=pytest.mark.smoke) if x in ("functions of all indices", "relative bias") else x
        for x in CASES
    ],
)
def test_every_device_computes_its_share(name, shared):
    """Out and lse lie as the queries do; nothing is gathered; forward, no device waits for another."""
    case = CASES[name]
    mesh = mesh_of(*case.mesh)
    a = on(mesh, case.inputs(), case.specs, case.queries)
    out, gradients = truth(name)
    forward = check(functools.partial(attend, **case.static), a, out)
    for sharding, x in zip(forward.output_shardings, out, strict=True):
        assert sharding.is_equivalent_to(NamedSharding(mesh, case.queries), x.ndim)
    assert not collectives(forward)
    backward = check(functools.partial(gradient, **case.static), a, gradients)
    assert collectives(backward) <= {ALL_REDUCE}
    for name in TOKENS:
        assert backward.output_shardings[name].is_equivalent_to(a[name].sharding, 4)


def test_gradients_of_tokens_alone(shared):
    """The arrays of a score are constants: where its positions are those of a shard, these have no gradients either."""
    case = CASES["functions of all indices"]
    a = on(mesh_of(*case.mesh), case.inputs(), case.specs, case.queries)
    _, gradients = truth("functions of all indices")

    def of_tokens(tokens, rest):
        return gradient(tokens, lambda tokens: attend({**tokens, **rest}, **case.static))

    tokens, rest = ({name: x for name, x in a.items() if (name in TOKENS) == is_token} for is_token in (True, False))
    close(compile(of_tokens, tokens, rest)(tokens, rest), {name: gradients[name] for name in TOKENS})


@pytest.mark.parametrize("name", ("batch and heads", "fewer key heads than shards", "rows"))
def test_explicit_axes(name, shared):
    case = CASES[name]
    a = on(mesh_of(*case.mesh, kind=AxisType.Explicit), case.inputs(), case.specs, case.queries)
    out, gradients = truth(name)
    assert not collectives(check(functools.partial(attend, **case.static), a, out))
    check(functools.partial(gradient, **case.static), a, gradients)


def test_a_mesh_of_explicit_axes_that_the_context_sets(shared):
    """What each device computes holds no shardings, which XLA would not compile there."""
    case = CASES["rows"]
    mesh = mesh_of(*case.mesh, kind=AxisType.Explicit)
    a = on(mesh, case.inputs(), case.specs, case.queries)
    with jax.set_mesh(mesh):
        found = jax.device_get(compile(functools.partial(gradient, **case.static), a)(a))
    close(found, truth("rows")[1])


def summed_over(compiled):
    """The mesh axes of each sum over devices."""
    found = re.findall(r" all-reduce(?:-start)?\(.*? replica_groups=mesh\[.*?\] \{(.*?)\}", compiled.as_text())
    assert len(found) == len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text()))
    return sorted(re.findall(r"'(\w+)'", axes) for axes in found)


@pytest.mark.parametrize(
    ("shape", "spec", "axes"),
    (
        ((1, 8, T, S), P(None, "model"), [["data"]]),
        ((B, 1, 1, S), P("data"), [["model"]]),
        ((1, 1, T, S), P(), [["data", "model"]]),
        ((B, 8, 1, S), P("data", "model"), []),
    ),
)
def test_bias_gradients_sum_over_the_axes_of_their_broadcast_dims(shape, spec, axes, shared):
    a = on(mesh_of(), {**tokens(), "bias": normal(shape)}, {"bias": spec}, HEADS)
    assert summed_over(compile(gradient, a)) == axes


def test_keys_sharded_as_the_rows_of_queries_are_gathered_and_queries_are_not(shared):
    """Sequence-sharded arrays: what is gathered has the size of keys."""
    tokens_ = tokens(16, 2)
    a = on(mesh_of(), tokens_, {}, P("data", "model"))
    reference = functools.partial(attend, implementation="reference")
    for fn, want in ((attend, reference(tokens_)), (gradient, gradient(tokens_, reference))):
        gathered = re.findall(r" = (.*) all-gather(?:-start)?\(", check(fn, a, want).as_text())
        sizes = {
            np.prod([int(n) for n in x.split(",")]) for shapes in gathered for x in re.findall(r"\[([\d,]+)\]", shapes)
        }
        assert sizes == {B // 2 * S * 2 * H}


def test_keys_alone_sharded_over_heads_share_out_the_work(shared):
    """Not the keys are gathered then, but the results."""
    a = on(mesh_of(), tokens(), {"key": HEADS, "value": HEADS})
    check(attend, a, attend(tokens(), "reference"))


def test_a_mesh_that_only_the_context_names(shared):
    """`jax.set_mesh`, and arguments that lie nowhere yet."""
    arguments = tokens()

    def placed(a):
        return attend({**a, "query": lax.with_sharding_constraint(a["query"], HEADS)}, is_causal=True)

    with jax.set_mesh(mesh_of()):
        compiled = check(placed, arguments, attend(arguments, "reference", is_causal=True))
    assert not collectives(compiled)
    assert len(compiled.output_shardings[0].device_set) == 8 and not compiled.output_shardings[0].is_fully_replicated


# ---- transformations --------------------------------------------------------------------------------------------------


def stacked(x):
    return jnp.stack([x, x / 2, -x])


def _layers(a):
    keep = jax.checkpoint_policies.save_only_these_names("pallas_fa_out", "pallas_fa_lse")

    def loss(query):
        layer = jax.checkpoint(lambda query: query + attend({**a, "query": query}, is_causal=True)[0], policy=keep)
        return jnp.sum(lax.scan(lambda x, _: (layer(x), None), query, None, length=2)[0] ** 2)

    return jax.grad(loss)(a["query"])


TRANSFORMED = {
    "vmap of queries": lambda a: jax.vmap(lambda q: attend({**a, "query": q}))(stacked(a["query"])),
    "vmap of gradients": lambda a: jax.vmap(lambda bias: gradient({**a, "bias": bias}), 1)(
        stacked(a["bias"]).swapaxes(0, 1)
    ),
    "vmap of vmap": lambda a: jax.vmap(
        jax.vmap(lambda q, k: gradient({**a, "query": q, "key": k}), (0, None)), (None, 0)
    )(stacked(a["query"]), stacked(a["key"])[:2]),
    "gradient of vmap": lambda a: gradient(
        a, lambda a: jax.vmap(lambda q: attend({**a, "query": q}), out_axes=1)(stacked(a["query"]))
    ),
    "vmap of keys of dropout": lambda a: jax.vmap(
        lambda key: gradient({**a, "dropout_key": key}, dropout_rate=0.3), out_axes=1
    )(jnp.arange(6, dtype=jnp.uint32).reshape(3, 2)),
    "layers": _layers,
    "gradient of gradient": lambda a: gradient(a, lambda a: (gradient(a)["query"], jnp.zeros(()))),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name, shared):
    """vmap, scan, remat and derivatives of gradients: as on one device, and nothing gathered."""
    fn = TRANSFORMED[name]
    arguments = {**tokens(), "bias": normal((8, 1, S))}
    a = on(mesh_of(), arguments, {"bias": P("model")}, HEADS)
    assert collectives(check(fn, a, jax.jit(fn)(arguments))) <= {ALL_REDUCE}


def test_mapped_dims_may_be_sharded(shared):
    """The mapped axis over one mesh axis, batch entries and heads over two others."""
    arguments = {name: jnp.stack([x, -x]) for name, x in tokens().items()}
    fn = jax.vmap(functools.partial(attend, is_causal=True), spmd_axis_name="data")
    spec = P("data", "rows", None, "model")
    compiled = check(fn, on(mesh_of(2, 2, 2), arguments, {}, spec), fn(arguments))
    assert not collectives(compiled)
    assert compiled.output_shardings[0].spec == spec


# ---- what can't be shared out -----------------------------------------------------------------------------------------


def _columns(a):
    """Heads and head dim made as one dim, as a projection's columns, in more shards than there are heads."""
    x = lax.with_sharding_constraint(a["query"].reshape(B, T, -1), NamedSharding(mesh_of(1, 8), P(None, None, "model")))
    return attend({**a, "query": x.reshape(B, T, -1, H)})


@pytest.mark.parametrize(
    ("fn", "mesh", "specs", "message"),
    (
        (
            attend,
            (2, 4),
            {"key": P("data", "model")},
            r"key is sharded over .*\('model',\) along its length S.*ring_attention",
        ),
        (
            attend,
            (2, 4),
            {"query": P(None, None, None, "model")},
            r"query is sharded .*\('model',\) along its head dim",
        ),
        (attend, (2, 4), {"value": P(None, None, None, "data")}, r"value is sharded .*\('data',\) along its head dim"),
        (_columns, (1, 8), {}, r"query is sharded over parts of the mesh axes \('model',\) along dim N"),
    ),
)
def test_errors_name_the_axis_and_the_remedy(fn, mesh, specs, message, shared):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        compile(fn, on(mesh_of(*mesh), tokens(4, 4), specs))
