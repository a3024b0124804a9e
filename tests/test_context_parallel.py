"""Ring and all-to-all attention on 2, 4 and 8 devices: the results of one device, and nothing gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.context_parallel import all_to_all_attention, from_zigzag, placement, ring_attention, to_zigzag
from pallas_fa.context_parallel.ring import Ring
from pallas_fa.problem import normalise
from tests.lowering import kernels
from tests.test_sharding import close, collectives, compile

B, T, N, K, H = 4, 32, 8, 2, 8
PLACEMENTS = ("contiguous", "zigzag")
TOKENS = {"query": 1, "key": 1, "value": 1, "query_segment_ids": 1, "key_value_segment_ids": 1}
ROWS = {"bias": -2, "mask": -2}  # arrays that a ring shards over their rows, and all-to-all does not
FLOATS = ("query", "key", "value", "bias", "slopes", "scale", "sinks", "strip")


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def tokens(heads=K, length=T):
    shape = (B, length, heads, H)
    return {"query": normal((B, T, N, H), 1), "key": normal(shape, 2), "value": normal(shape, 3)}


def segment_ids():
    ids = np.sort(np.random.default_rng(4).integers(0, 4, (B, T), np.int32), axis=1)
    return {"query_segment_ids": ids, "key_value_segment_ids": ids}


def padded(a, length):
    """The arguments with NaN past the length of the keys."""
    padding = (np.arange(a["key"].shape[1]) >= length[:, None])[..., None, None]
    return {
        **a,
        "key": np.where(padding, np.float32(np.nan), a["key"]),
        "value": np.where(padding, np.float32(np.nan), a["value"]),
    }


# In blocks that shards do not respect: computed from a function, and whole blocks for each head.
BLOCKS = masks.block_mask(masks.Custom(lambda b, n, t, s: (t // 5 + s // 3) % 3 > 0), T, T, (5, 3)) & masks.BlockMask(
    normal((N, 5, 11), 8) < 0.7, (7, 3)
)
LENGTHS = np.asarray([48, 17, 5, 0], np.int32)
# name: (arrays, static keywords). `slopes` become an Alibi, a function of positions; `strip` becomes a RelativeBias.
CASES = {
    "full": (tokens(), {}),
    "relative bias": ({**tokens(), "strip": normal((N, 2 * T - 1))}, {"is_causal": True}),
    "causal": ({**tokens(N), "sinks": normal((N,))}, {"is_causal": True}),
    "causal window": (tokens(), {"is_causal": True, "local_window_size": (6, 0)}),
    "windows by head": (
        {
            **tokens(),
            "local_window_size": (np.arange(N, dtype=np.int32).reshape(1, N, 1, 1) * 3 - 2, np.int32(4)[None]),
        },
        {},
    ),
    "segments": ({**tokens(), **segment_ids(), "scale": np.asarray(0.3, np.float32)}, {"logits_soft_cap": 2.0}),
    "lengths": (
        {
            **padded(tokens(length=48), LENGTHS),
            "key_value_seq_lengths": LENGTHS,
            "query_seq_lengths": np.asarray([T, 20, 9, 3], np.int32),
            "sinks": np.where(np.arange(N) == 1, -np.inf, normal((B, N))).astype(np.float32),
        },
        {"mask": masks.Causal("bottom_right", offset=2)},
    ),
    "bias": ({**tokens(), "bias": normal((N, T, T)), "mask": normal((B, 1, T, T), 5) < 1}, {"is_causal": True}),
    "blocks": (tokens(), {"mask": BLOCKS}),
    "alibi": (
        {**tokens(), "slopes": np.linspace(0.1, 1, N, dtype=np.float32), "bias": normal((1, T), 6)},
        {"is_causal": True},
    ),
    "dropout": (
        {**tokens(), "dropout_key": np.array([3, 4], np.uint32)},
        {"dropout_rate": 0.3, "broadcast_dropout": True},
    ),
}


def attend(arrays, attention=pallas_fa.dot_product_attention, implementation="reference", **static):
    arrays = dict(arrays)
    slopes = arrays.pop("slopes", None)
    score = None if slopes is None else scores.Alibi(slopes)
    if "strip" in arrays:
        score = scores.RelativeBias(arrays.pop("strip"))
    return attention(**arrays, **static, score=score, implementation=implementation, return_residual=True)


def sharded(attention, size, placement):
    """`attention` of whole arrays, over a ring of `size` and batch entries over what is left of 8 devices."""
    mesh = jax.make_mesh((8 // size, size), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
    shard = P("data", "ring")

    def run(arrays, **static):
        spans = dict(TOKENS)
        if attention is ring_attention:
            spans |= {name: axis for name, axis in ROWS.items() if name in arrays and arrays[name].shape[axis] > 1}
        specs = {name: shard if name in TOKENS else P() for name in arrays}
        specs |= {name: P("data") for name in ("query_seq_lengths", "key_value_seq_lengths") if name in arrays}
        if arrays.get("sinks", np.zeros(N)).ndim > 1:
            specs["sinks"] = P("data")
        specs |= {name: P(*[None] * (arrays[name].ndim - 2), "ring") for name in ROWS if name in spans}
        if "mask" in arrays:
            specs["mask"] = P("data", *specs["mask"][1:])
        if placement == "zigzag":
            arrays = {name: to_zigzag(x, spans[name], size) if name in spans else x for name, x in arrays.items()}

        def local(arrays):
            attention_here = functools.partial(attention, axis_name="ring", placement=placement)
            return attend(arrays, attention_here, "xla", **static)

        results = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(shard, shard))(arrays)
        return tuple(from_zigzag(x, 1, size) if placement == "zigzag" else x for x in results)

    return run


def loss(floats, rest, attend):
    out, lse = attend({**floats, **rest})
    total = jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0))
    return total, (out, lse)


def everything(arrays, attend):
    """(gradients by name, (out, lse)): a function and its arguments, to be compiled."""
    floats = {name: x for name, x in arrays.items() if name in FLOATS}
    rest = {name: x for name, x in arrays.items() if name not in FLOATS}
    return jax.grad(functools.partial(loss, attend=attend), has_aux=True), floats, rest


@functools.cache
def truth(name):
    arrays, static = CASES[name]
    fn, *args = everything(arrays, functools.partial(attend, **static))
    return compile(fn, *args)(*args)


def check(name, attention, size, placement):
    arrays, static = CASES[name]
    fn, *args = everything(arrays, functools.partial(sharded(attention, size, placement), **static))
    finite = lambda tree: jax.tree.map(lambda x: np.where(np.isneginf(x), 10, x), tree)
    close(finite(compile(fn, *args)(*args)), finite(truth(name)))


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


# ---- what it costs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_ring_attention_gathers_nothing(placement):
    arrays = {**tokens(), **segment_ids()}
    fn, *args = everything(arrays, functools.partial(sharded_in_place, is_causal=True, placement=placement))
    compiled = compile(fn, *args)
    assert collectives(compiled) == {"collective-permute"}
    assert "f32[4,32," not in str(compiled.as_text())  # no device holds a whole sequence


@pytest.mark.parametrize("mask", [{"is_causal": True}, {"is_causal": True, "local_window_size": (400, 0)}])
def test_memory_falls_with_the_number_of_devices(mask):
    """Of loops. What does not shrink are XLA's chunks of logits, which are small beside these shards."""
    shape = (1, 4096, 1, 512)

    def memory(size):
        mesh = jax.make_mesh((size,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
        spec = P(None, "ring")
        ring = functools.partial(ring_attention, axis_name="ring", placement="zigzag", implementation="xla", **mask)
        gradient = jax.grad(
            lambda q, k, v: jax.shard_map(ring, mesh=mesh, in_specs=spec, out_specs=spec)(q, k, v).sum()
        )
        x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        return jax.jit(gradient).lower(x, x, x).compile().memory_analysis().temp_size_in_bytes

    assert memory(8) < 0.6 * memory(4)


def sharded_in_place(arrays, **static):
    """Ring attention of arrays that lie where they should."""
    mesh = jax.make_mesh((8,), ("ring",), axis_types=(AxisType.Auto,))
    specs = {name: P(None, "ring") for name in arrays}
    local = functools.partial(attend, attention=functools.partial(ring_attention, axis_name="ring", **static))
    shard = P(None, "ring")
    return jax.shard_map(
        functools.partial(local, implementation="xla"), mesh=mesh, in_specs=(specs,), out_specs=(shard, shard)
    )(arrays)


def ring_of(size, placement, mask, implementation="xla"):
    shard = np.zeros((1, T // size, 1, H), np.float32)
    return Ring(normalise(shard, shard, shard, mask=mask)[0], implementation, "ring", size, placement)


@pytest.mark.parametrize(
    ("placement", "mask", "hops"),
    (
        ("contiguous", None, 8),
        ("contiguous", masks.Causal(), 8),
        ("contiguous", masks.Window(0, 0), 1),
        ("contiguous", masks.Window(5, 0), 3),
        ("contiguous", masks.Window(5, 0) | masks.Window(0, 0), 3),
        ("contiguous", masks.Window(5, 1), 8),  # the next device's keys come last
        ("contiguous", masks.Causal() & masks.Custom(lambda b, n, t, s: t - s < 2, ranges=masks.Window(1, 0)), 2),
        ("zigzag", masks.Window(0, 0), 1),
        ("zigzag", masks.Causal(), 8),
    ),
)
def test_the_ring_stops_where_the_mask_ends(placement, mask, hops):
    assert ring_of(8, placement, mask).hops == hops


@pytest.mark.parametrize("size", (2, 4, 8))
def test_zigzag_balances_causal_masks(size):
    """In every hop each device computes as many pairs of blocks as any other: three in the first, then two."""
    block = T // (2 * size)
    for hop in range(size):
        needed = [
            sum(
                q_start >= kv_start
                for q_start in placement.starts("zigzag", device, size, block)
                for kv_start in placement.starts("zigzag", (device - hop) % size, size, block)
            )
            for device in range(size)
        ]
        assert needed == [2 if hop else 3] * size


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_the_mask_rules_out_is_not_computed(placement):
    """Each block is a segment of its own, so that the NaN of another would be seen if it were looked at."""
    size = 8
    ids = np.arange(T, dtype=np.int32) // (T // size // 2) * np.ones((B, 1), np.int32)
    arrays = tokens()
    arrays["value"] = np.where(ids[..., None, None] == ids.max(), np.float32(np.nan), arrays["value"])
    arrays |= {"query_segment_ids": ids, "key_value_segment_ids": ids}
    out, _ = jax.jit(functools.partial(sharded(ring_attention, size, placement)))(arrays)
    last = T // size // 2 if placement == "zigzag" else T // size
    assert np.isfinite(out[:, :-last]).all()
    assert np.isnan(out[:, -1]).all()


# ---- where it is used ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("axis", (0, -2))
def test_zigzag_and_back(axis):
    x = np.arange(24).reshape(12, 2)
    zigzag = to_zigzag(x, axis, 3)
    np.testing.assert_array_equal(zigzag[:, 0] // 4, [0, 0, 5, 5, 1, 1, 4, 4, 2, 2, 3, 3])
    np.testing.assert_array_equal(from_zigzag(zigzag, axis, 3), x)


# ---- errors -------------------------------------------------------------------------------------------------------------


def call(attention=ring_attention, length=4, specs=None, heads=2, **keywords):
    """A call on 4 devices."""
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(AxisType.Auto,) * 2)
    x = jnp.ones((2, length * 4, heads, 8))
    keywords = {"axis_name": "ring", "is_causal": True, "placement": "zigzag", **keywords}
    local = lambda q, k, v: attention(q, k, v, **keywords)
    specs = specs or (P(None, "ring"),) * 3
    return jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, ("data", "ring"))), x, x, x)


@pytest.mark.parametrize(
    ("error", "message", "keywords"),
    (
        (ValueError, "axis_name='rings' is not an axis of a mesh that is manual here", {"axis_name": "rings"}),
        (TypeError, r"axis_name=\('data', 'ring'\) must be one name", {"axis_name": ("data", "ring")}),
        (ValueError, "axis_name=3 is not an axis of a mesh that is manual here", {"axis_name": 3}),
        (ValueError, "axis_name={} is not an axis of a mesh that is manual here", {"axis_name": {}}),
        (ValueError, "placement='zig' is not a way", {"placement": "zig"}),
        *(
            (
                TypeError,
                "return_residual='no' must be True or False",
                {"attention": x, "heads": 4, "return_residual": "no"},
            )
            for x in (ring_attention, all_to_all_attention)
        ),
        (TypeError, "softmax_scale=1.0 is not an argument here. Pass scale=", {"softmax_scale": 1.0}),
        (
            TypeError,
            "query_segment_ids is a str",
            {"attention": all_to_all_attention, "heads": 4, "query_segment_ids": "a"},
        ),
        (
            ValueError,
            r"query_segment_ids.shape=\(2, 16\) must be \[\*B, T\] = \(2, 4\)",
            {"attention": all_to_all_attention, "heads": 4, "query_segment_ids": jnp.ones((2, 16), int)},
        ),
        (NotImplementedError, "forward_mode=True: .* reverse mode only", {"forward_mode": True}),
        (ValueError, "dropout_rate=0.1, but dropout_key=None", {"dropout_rate": 0.1}),
        (ValueError, "query has the odd length 3 on each of 4 devices", {"length": 3}),
        (ValueError, "key is the same on all devices", {"specs": (P(None, "ring"), P(), P(None, "ring"))}),
        (ValueError, "query is the same on all devices", {"specs": (P(), P(None, "ring"), P(None, "ring"))}),
        (ValueError, "leave S whole", {"bias": jnp.ones((4, 4))}),
        (ValueError, "leave S whole", {"mask": masks.Segments(jnp.ones(16, int), jnp.ones(16, int))}),
        (ValueError, "query_segment_ids.shape=.* must be", {"query_segment_ids": jnp.ones((2, 16), int)}),
        (NotImplementedError, "'reference'", {"implementation": ("xla", "reference")}),
        (NotImplementedError, "mosaic_gpu: config=3", {"implementation": "mosaic_gpu", "config": 3}),
        (ValueError, "query has N=2 heads.* Use ring_attention", {"attention": all_to_all_attention}),
        (
            ValueError,
            "odd length 3",
            {"attention": all_to_all_attention, "heads": 4, "length": 3, "placement": "zigzag"},
        ),
        (ValueError, "key is the same", {"attention": all_to_all_attention, "specs": (P(None, "ring"), P(), P())}),
    ),
)
def test_errors(error, message, keywords):
    keywords = (
        {"key_value_segment_ids": jnp.ones((2, 4), int), **keywords} if "query_segment_ids" in keywords else keywords
    )
    with pytest.raises(error, match=message):
        call(**keywords)


@pytest.mark.parametrize("attention", (ring_attention, all_to_all_attention))
def test_explicit_axes_beside_a_manual_one(attention):
    mesh = jax.make_mesh((2, 4), ("data", "ring"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.device_put(tokens(N)["query"], NamedSharding(mesh, P("data", "ring")))
    local = lambda x: attention(x, x, x, axis_name="ring", placement="zigzag")
    with pytest.raises(ValueError, match="query is sharded over the explicit mesh axes \\['data'\\]"):
        jax.shard_map(local, mesh=mesh, in_specs=P(None, "ring"), out_specs=P(None, "ring"), axis_names={"ring"})(x)


def test_a_ring_must_be_told_the_placement():
    """In the wrong order of the sequence the results are wrong without an error."""
    x = jnp.ones((1, 4, 2, 8))
    with pytest.raises(TypeError, match="placement"):
        ring_attention(x, x, x, axis_name="ring")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("permute", (to_zigzag, from_zigzag))
@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ((np.zeros((1, 12)), 1, 4), "size 12, not a multiple of 2 \\* ring_size = 8"),
        ((np.zeros(12), 0, 2.0), "ring_size=2.0 must be an int of at least 1"),
        ((np.zeros(12), 0, 0), "ring_size=0 must be an int of at least 1"),
        ((np.zeros(12), 0, "2"), "ring_size='2' must be an int of at least 1"),
        ((np.zeros(12), None, 2), r"axis=None is not an axis of an array of shape \(12,\)"),
        ((np.zeros(12), 1, 2), r"axis=1 is not an axis of an array of shape \(12,\)"),
        ((None, 0, 2), "x=None is a NoneType; it must be an array"),
    ),
)
def test_what_has_no_zigzag(permute, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        permute(*arguments)
