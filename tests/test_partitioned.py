"""Kernels on arrays that `jit` shards: the results of one device, nothing gathered, and sums over the right axes.

How the work is shared out does not depend on what computes it, so that XLA stands in for the kernels here.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.backends import choice
from pallas_fa.backends import xla as xla_backend
from pallas_fa.backends.gpu.device import Gpu
from pallas_fa.backends.record import Backend, backward_in_btnh, forward_in_btnh
from pallas_fa.backends.xla import attention as xla
from pallas_fa.problem import Residuals, normalise
from pallas_fa.sharding import partitioned
from pallas_fa.sharding.device_shard import KEY, LSE, OUT, QUERY, VALUE, DeviceShard, letters_of_operands
from pallas_fa.sharding.mesh_axes import SubAxes, axes_by_dim
from tests.lowering import kernels
from tests.test_sharding import ALL_REDUCE, close, collectives, compile

B, T, S, H = 4, 24, 16, 8
FLOATS = ("query", "key", "value", "bias", "slopes", "scale", "gain", "sinks", "strip")
AXES = ("data", "model", "rows")
TOKENS = ("query", "key", "value")
HEADS = P("data", None, "model")


@pytest.fixture
def shared(monkeypatch):
    """'xla' as the kernels are called: a black box that each device runs on its shard."""
    forward = partitioned.forward(forward_in_btnh(xla.forward))
    backward = partitioned.backward(backward_in_btnh(_backward))
    others = [backend for backend in choice.backends() if backend.name != "xla"]
    monkeypatch.setattr(
        choice, "backends", lambda: (*others, Backend("xla", xla_backend.BACKEND.supports, forward, backward))
    )


def _backward(problem, residuals, d_out, d_lse):
    """As in the kernel, dq is added up in a reference."""
    dq, *rest = xla.backward(problem, residuals, d_out, d_lse)
    sum = jax.new_ref(jnp.zeros_like(dq))
    sum[...] = dq
    return jax.freeze(sum), *rest


def mesh_of(data=2, model=4, rows=1, kind=AxisType.Auto):
    return jax.make_mesh((data, model, rows), AXES, axis_types=(kind,) * 3)


def normal(shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def tokens(N=8, K=4):
    return {"query": normal((B, T, N, H)), "key": normal((B, S, K, H), 1), "value": normal((B, S, K, H), 2)}


def ids(length):
    return np.sort(np.random.default_rng(length).integers(0, 3, (B, length), np.int32), axis=1)


def gain(x, b, n, t, s, gain):
    return x * (1 + gain * jnp.sin((b + 2 * n + 3 * t + 5 * s).astype(x.dtype)))


def some_pairs(b, n, t, s, rows):
    return ((b + 3 * n + t + 2 * s) % 3 > 0) | rows


def attend(a, implementation="xla", **static):
    a = dict(a)
    score = scores.Alibi(a.pop("slopes")) if "slopes" in a else None
    if "strip" in a:
        score = scores.RelativeBias(a.pop("strip"))
    if "gain" in a:
        score = scores.Custom(gain, a.pop("gain"))
    if "rows" in a:
        static["mask"] = masks.Custom(some_pairs, a.pop("rows"))
    return pallas_fa.dot_product_attention(
        **a, **static, score=score, implementation=implementation, return_residual=True
    )


def gradient(a, attend=attend, **static):
    floats, rest = ({n: x for n, x in a.items() if (n in FLOATS) == f} for f in (True, False))

    def loss(floats):
        out, lse = attend({**floats, **rest}, **static)
        return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0))

    return jax.grad(loss)(floats)


def on(mesh, a, specs, tokens=None):
    """The arrays on a mesh: q, k and v by `tokens` where `specs` does not say otherwise, the others on every device."""
    specs = {**dict.fromkeys(TOKENS, tokens or P()), **specs}
    return {name: jax.device_put(x, NamedSharding(mesh, specs.get(name, P()))) for name, x in a.items()}


def check(fn, sharded, whole):
    """`fn` of the sharded arguments is that of the whole ones; the compiled program, for more questions."""
    finite = lambda tree: jax.tree.map(lambda x: jnp.where(x == -jnp.inf, 10, x), tree)
    compiled = compile(fn, sharded)
    close(finite(compiled(sharded)), finite(whole))
    return compiled


@dataclasses.dataclass(frozen=True)
class Case:
    """A call: where its queries lie, its arrays besides q, k and v, and where those lie that are not on every device."""

    queries: P
    arrays: dict
    specs: dict = dataclasses.field(default_factory=dict)
    static: dict = dataclasses.field(default_factory=dict)
    mesh: tuple = (2, 4, 1)
    heads: tuple = (8, 4)

    def inputs(self):
        return {**tokens(*self.heads), **self.arrays}


# Per head, in blocks that shards of rows do not respect: computed from a function, and whole blocks.
BLOCKS = masks.block_mask(
    masks.Custom(lambda b, n, t, s: (n + t // 5 + s // 3) % 3 > 0), T, S, (5, 3), heads=8
) & masks.BlockMask(normal((B, 1, 4, 6)) < 0.7, (7, 3))
REPLICATED_KEYS = {"key": P(), "value": P()}
DROPOUT = {"dropout_rate": 0.3, "dropout_key": np.array([3, 4], np.uint32)}
HEADS_OF_BATCH = P("data", "model")
BATCH_ALONE = {"key": P("data"), "value": P("data")}
CASES = {
    "batch": Case(P("data"), {"bias": normal((8, 1, S)), "scale": np.float32(0.3)}, mesh=(4, 2, 1)),
    "heads": Case(
        P(None, None, "model"), {"slopes": np.linspace(0.1, 1, 8, dtype=np.float32)}, static={"is_causal": True}
    ),
    "batch and heads": Case(
        HEADS,
        {
            "bias": normal((1, 8, T, S)),
            "query_segment_ids": ids(T),
            "key_value_segment_ids": ids(S),
            "slopes": np.linspace(0.1, 1, 8, dtype=np.float32),
        },
        {"bias": P(None, "model"), "query_segment_ids": P("data"), "key_value_segment_ids": P("data")},
    ),
    "heads over two axes": Case(
        P(None, None, ("data", "model")), {"bias": normal((B, 1, 1, S))}, heads=(16, 8), static={"logits_soft_cap": 2.0}
    ),
    "mask of heads": Case(HEADS, {"mask": normal((8, T, S)) < 0.5}, {"mask": P("model")}),
    "lengths": Case(
        HEADS,
        {
            "query_seq_lengths": np.array([24, 3, 0, 9]),
            "key_value_seq_lengths": np.array([16, 5, 2, 0]),
            "sinks": normal((B, 8)),
        },
        {"query_seq_lengths": P("data"), "sinks": HEADS_OF_BATCH},
        {"mask": masks.Causal("bottom_right", offset=1), **DROPOUT},
    ),
    "fewer key heads than shards": Case(P(None, None, "model"), {}, REPLICATED_KEYS, mesh=(1, 8, 1), heads=(8, 2)),
    "key heads shared by some": Case(
        P(None, None, ("data", "model")), {}, dict.fromkeys(("key", "value"), P(None, None, "data")), heads=(8, 2)
    ),
    "one key head": Case(HEADS, {"gain": normal((8, 1, 1))}, BATCH_ALONE, heads=(8, 1)),
    "heads that straddle key heads": Case(
        HEADS, {"sinks": normal((24,))}, BATCH_ALONE, {"is_causal": True, **DROPOUT}, heads=(24, 6)
    ),
    "rows": Case(P("data", "model"), {"bias": normal((B, 1, T, S))}, BATCH_ALONE, {"is_causal": True}),
    "rows in a window": Case(
        P(None, "model"),
        {"key_value_seq_lengths": np.array([16, 5, 2, 0]), "query_seq_lengths": np.array([24, 3, 0, 9])},
        REPLICATED_KEYS,
        {"local_window_size": (3, 1)},
    ),
    "relative bias": Case(
        P("data", "rows", "model"),
        {"strip": normal((8, T + S - 1))},
        {"key": HEADS, "value": HEADS, "strip": P("model")},
        {"is_causal": True},
    ),
    "windows by head and intervals of rows": Case(
        P("data", "rows", "model"),
        {
            "local_window_size": (np.arange(B * 8, dtype=np.int32).reshape(B, 8, 1, 1) - 2, np.int32(9)[None]),
            "mask": masks.from_cu_seqlens([[0, 9, 20]] * B, [[0, 7, 15]] * B, T=T),
        },
        {"key": HEADS, "value": HEADS, "mask": P("data", "rows")},
        mesh=(2, 2, 2),
    ),
    "rows of a block mask": Case(
        P("data", "rows", "model"),
        {},
        {"key": HEADS, "value": HEADS},
        {"mask": BLOCKS},
        mesh=(2, 2, 2),
    ),
    "functions of all indices": Case(
        P("data", "rows", "model"),
        {"gain": normal((B, 1, T, 1)), "rows": normal((T, 1)) < 0},
        {"key": HEADS, "value": HEADS, "gain": P("data")},
        DROPOUT,
        mesh=(2, 2, 2),
    ),
}


@functools.cache
def truth(name):
    case = CASES[name]
    run = functools.partial(attend, implementation="reference", **case.static)
    return run(case.inputs()), gradient(case.inputs(), run)


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


# ---- transformations ------------------------------------------------------------------------------------------------


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


# ---- what JAX sees ----------------------------------------------------------------------------------------------------


def with_kernels(devices, **static):
    """Gradients on 1 or 8 devices, and their arguments."""
    x = jax.ShapeDtypeStruct((B, 64, 8, 64), jnp.bfloat16)
    if devices > 1:
        x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh_of(), HEADS))
    return jax.jit(functools.partial(gradient, implementation="mosaic_gpu", **static)), dict.fromkeys(TOKENS, x)


def lowered_for(devices, **static):
    fn, arguments = with_kernels(devices, **static)
    return fn.trace(arguments).lower(lowering_platforms=("cuda",)).as_text()


def test_programs_for_several_gpus_ask_for_a_share_of_two_kernels():
    text = lowered_for(8)
    assert text.count("@CustomSPMDPartitioning") == 2
    assert "custom_call @mosaic_gpu" not in text
    text = lowered_for(1)
    assert "@CustomSPMDPartitioning" not in text
    assert text.count("custom_call @mosaic_gpu") == 2


def test_export():
    """For one device of several; for several it says what to do."""
    unknown_to_jax = [jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    export = lambda fn, a: jax.export.export(fn, platforms=["cuda"], disabled_checks=unknown_to_jax)(a)
    assert export(*with_kernels(1)).nr_devices == 1
    with pytest.raises(NotImplementedError, match="can't be exported .* inside jax.shard_map"):
        export(*with_kernels(8))


def test_programs_with_other_masks_differ():
    """Their kernels are not in them, and JAX's compilation cache must tell them apart; equal ones must be equal."""
    programs = [
        re.sub(r'backend_config = "\d+"', "", lowered_for(8, **static))
        for static in ({}, {"is_causal": True}, {"scale": 0.5}, {"is_causal": True})
    ]
    assert len(set(programs)) == 3
    assert programs[1] == programs[3]


@pytest.mark.parametrize("spec", (HEADS, P("data", "model"), P(None, None, ("data", "model"))), ids=str)
def test_the_kernels_of_one_device_lower(spec):
    """What XLA asks for when it has shared out a program: forward and backward for shards, with their indices."""
    mesh = mesh_of()
    shape = lambda *s, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(s, dtype)
    q, k = shape(B, 64, 8, 64), shape(B, 64, 4, 64)
    bias, slopes, allowed = shape(8, 64, 64), shape(8, dtype=jnp.float32), shape(64, 1, dtype=jnp.bool_)
    strip = shape(8, 127)

    def run(q, k, v, bias, slopes, allowed, strip):
        score = scores.Alibi(slopes).then(scores.Custom(gain, jnp.ones((1, 1)))).then(scores.RelativeBias(strip))
        mask = masks.Causal() & masks.Custom(some_pairs, allowed)
        problem, operands = normalise(q, k, v, bias, mask, score=score)
        axes = (*(() if x is None else (x,) if isinstance(x, str) else x for x in spec), (), (), ())
        shard = DeviceShard.of(mesh, problem, dict(zip(OUT, axes, strict=False)), dict.fromkeys(KEY, ()), {})
        call = functools.partial(shards_of, shard, problem)
        letters = letters_of_operands(operands)
        out, lse = call(choice.kernels_for(Gpu.visible()).forward, (operands,), (letters,), (OUT, LSE))
        arguments, letters = (Residuals(operands, out, lse), out, lse), (Residuals(letters, OUT, LSE), OUT, LSE)
        gradients = QUERY, KEY, VALUE, "_NTS", "_N__", "____", "_ND"
        return call(choice.kernels_for(Gpu.visible()).backward, arguments, letters, gradients)

    assert kernels(run, q, k, k, bias, slopes, allowed, strip) == 2


def shards_of(shard, problem, kernel, arguments, letters, results):
    """What each device computes, inside of shard_map, where a kernel runs as it is."""
    specs = jax.tree.map(lambda x: P(*shard.spec(x)), (letters, results))
    local = lambda *arguments: tuple(shard.run(kernel, problem, arguments, results))
    return jax.shard_map(local, mesh=shard.mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)(*arguments)


# ---- what can't be shared out -------------------------------------------------------------------------------------------


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


# ---- mesh axes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes",
    (
        ((), ()),
        (("data",), ("rows",)),
        (("model", "data"), ()),
        (("rows", "data", "model"), ()),
        ((), ("data", "rows")),
    ),
)
def test_axes_by_dim(axes):
    mesh = mesh_of(2, 2, 2)
    assert axes_by_dim(mesh, NamedSharding(mesh, P(*axes)), 2) == list(axes)


def test_axes_by_dim_of_parts_of_axes():
    mesh, finer = mesh_of(1, 8), jax.make_mesh((4, 2), ("head", "half"), axis_types=(AxisType.Auto,) * 2)
    heads, halves = axes_by_dim(mesh, NamedSharding(finer, P("head", "half")), 2)
    assert (heads, halves) == (("model",), ("model",))
    assert isinstance(heads, SubAxes) and isinstance(halves, SubAxes)
