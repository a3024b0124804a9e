"""Attention of whole queries to a cache that is sharded over eight devices: the results of one, by one small exchange."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.context_parallel import decode_attention, to_zigzag
from tests.lowering import kernels
from tests.test_sharding import compile

B, S, N, K, H, HV = 4, 64, 4, 2, 8, 16
SHARDED = {"key": 1, "value": 1, "key_value_segment_ids": 1}
BOTTOM_RIGHT = masks.Causal(align="bottom_right")
LENGTHS = np.asarray([S, 37, 5, 0], np.int32)  # in the last three, devices without a key


def normal(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def arrays(T=1, **more):
    return {"query": normal((B, T, N, H), 1), "key": normal((B, S, K, H), 2), "value": normal((B, S, K, HV), 3), **more}


def poisoned(arrays):
    """The arguments with NaN past the lengths."""
    padding = (np.arange(S) >= LENGTHS[:, None])[..., None, None]
    poison = {name: np.where(padding, np.float32(np.nan), arrays[name]) for name in ("key", "value")}
    return {**arrays, **poison, "key_value_seq_lengths": LENGTHS}


def not_every_third(b, n, t, s):
    return (t + s) % 3 > 0


# name: (arrays, static keywords); `slopes` become an Alibi, `strip` a RelativeBias.
CASES = {
    "one query": (arrays(), {}),
    "lengths": (poisoned(arrays()), {}),
    "sinks": (poisoned(arrays(sinks=normal((N,), 4))), {}),
    "drafts": (poisoned(arrays(3, sinks=normal((B, N), 4))), {"mask": BOTTOM_RIGHT, "logits_soft_cap": 2.0}),
    "window": (
        arrays(2),
        {"mask": masks.Causal(offset=S - 2) & masks.Window(np.asarray([5, 9, 64, 0], np.int32), None, offset=S - 2)},
    ),
    "causal": (arrays(5), {"is_causal": True}),  # seven devices without a key
    "bias": (arrays(2, bias=normal((N, 1, S), 5), mask=normal((B, 1, 2, S), 6) < 1), {}),
    "segments": (
        arrays(
            3,
            query_segment_ids=np.asarray([[0, 1, 2]] * B, np.int32),
            key_value_segment_ids=np.sort(np.random.default_rng(7).integers(0, 5, (B, S), np.int32), axis=1),
        ),
        {"mask": masks.BlockMask(normal((N, 1, 10), 8) < 0.7, (3, 7))},
    ),
    "alibi": (poisoned(arrays(2, slopes=np.linspace(0.1, 1, N, dtype=np.float32), scale=np.float32(0.3))), {}),
    "dropout": (arrays(2, dropout_key=np.asarray([3, 4], np.uint32)), {"dropout_rate": 0.3}),
    "positions from the end": (
        poisoned(arrays(3)),
        {
            "mask": BOTTOM_RIGHT & masks.Custom(not_every_third, align="bottom_right"),
            "score": scores.Alibi(np.linspace(0.1, 1, N, dtype=np.float32), align="bottom_right")
            .then(scores.RelativeBias(lambda offset: jnp.sin(0.3 * offset), "bottom_right"))
            .then(scores.Custom(lambda x, b, n, t, s: x * (1 + 0.01 * t), align="bottom_right")),
        },
    ),
    "relative bias": (arrays(3, strip=normal((N, S + 2), 9)), {"mask": BOTTOM_RIGHT}),
}  # fmt: skip
FLOATS = ("query", "key", "value", "bias", "slopes", "scale", "sinks", "strip")


def attend(arrays, attention=pallas_fa.dot_product_attention, **keywords):
    """(out, lse)."""
    arrays = dict(arrays)
    if "slopes" in arrays:
        keywords["score"] = scores.Alibi(arrays.pop("slopes"), offset=S - 2)
    if "strip" in arrays:
        keywords["score"] = scores.RelativeBias(arrays.pop("strip"))
    return attention(**arrays, **keywords, return_residual=True)


def over_devices(arrays, size=8, placement="contiguous", check_vma=True, **keywords):
    """The same, with the cache on `size` devices."""
    mesh = jax.make_mesh((size,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])
    specs = {name: P(None, "context") if name in SHARDED else P() for name in arrays}
    if placement == "zigzag":
        arrays = {name: to_zigzag(x, 1, size) if name in SHARDED else x for name, x in arrays.items()}
    attention = functools.partial(decode_attention, axis_name="context", placement=placement)
    local = lambda arrays: attend(arrays, attention, **keywords)
    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(P(), P()), check_vma=check_vma)(arrays)


def gradients(arrays, attend):
    """(gradients by name, (out, lse))."""
    floats = {name: x for name, x in arrays.items() if name in FLOATS}
    rest = {name: x for name, x in arrays.items() if name not in FLOATS}

    def loss(floats):
        out, lse = attend({**floats, **rest})
        return jnp.sum(jnp.sin(3 * out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0)), (out, lse)

    return jax.grad(loss, has_aux=True)(floats)


@functools.cache
def truth(name):
    """In float64."""
    arrays, static = CASES[name]
    with jax.enable_x64(True):
        wide = {n: x.astype(np.float64) if x.dtype == np.float32 else x for n, x in arrays.items()}
        attention = functools.partial(attend, implementation="reference", **static)
        return jax.tree.map(np.asarray, jax.jit(functools.partial(gradients, attend=attention))(wide))


@pytest.mark.parametrize("placement", ("contiguous", "zigzag"))
@pytest.mark.parametrize("name", CASES)
def test_is_attention_to_the_whole_cache(name, placement):
    arrays, static = CASES[name]
    attention = functools.partial(over_devices, placement=placement, implementation="xla", **static)
    fn = functools.partial(gradients, attend=attention)
    found = compile(fn, arrays)(arrays)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(truth(name)), strict=True):
        assert got.dtype == np.float32 and got.shape == want.shape
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want[np.isfinite(want)]).max(initial=1e-9))


def test_gradients_without_checks_of_what_devices_share():
    """Under `vmap`, too."""
    arrays, static = CASES["drafts"]
    attention = functools.partial(over_devices, check_vma=False, implementation="xla", **static)
    fn = jax.vmap(functools.partial(gradients, attend=attention))
    mapped = jax.tree.map(lambda x: np.stack([x, x]), arrays)
    found, _ = compile(fn, mapped)(mapped)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(truth("drafts")[0]), strict=True):
        np.testing.assert_allclose(got[1], want, atol=2e-5 * np.abs(want).max())


def test_merging_takes_one_collective_of_the_results_alone():
    """And the devices need not be checked for having whole results."""
    arrays, static = CASES["drafts"]
    for check_vma in (True, False):
        attention = functools.partial(over_devices, check_vma=check_vma, implementation="xla", **static)
        compiled = compile(attention, arrays)
        text = str(compiled.as_text())
        sent = re.findall(r"= (\S+) (?:all-|reduce-scatter|collective-)\S*\(", text)
        assert [x.partition("{")[0] for x in sent] == [f"f32[8,{B},3,{N},{HV + 1}]"], sent
        assert f"f32[{B},{S},{K}," not in text  # no device holds the whole cache
        np.testing.assert_allclose(compiled(arrays)[0], truth("drafts")[1][0], atol=2e-5)


def test_other_dims_and_axes():
    """Heads before length and on devices of their own, no batch dims."""
    a = {name: x[0] for name, x in arrays(2).items()}
    want = attend(a, is_causal=True, implementation="reference")
    swapped = {name: np.swapaxes(x, 0, 1) for name, x in a.items()}
    mesh = jax.make_mesh((2, 4), ("heads", "context"), axis_types=(AxisType.Auto,) * 2)
    specs = {"query": P("heads"), "key": P("heads", "context"), "value": P("heads", "context")}
    local = functools.partial(
        decode_attention, axis_name="context", layout="BNTH", is_causal=True, return_residual=True
    )
    over_mesh = jax.shard_map(
        lambda a: local(**a), mesh=mesh, in_specs=(specs,), out_specs=(P("heads"), P(None, "heads"))
    )
    out, lse = jax.jit(over_mesh)(swapped)
    np.testing.assert_allclose(np.swapaxes(out, 0, 1), want[0], atol=1e-5)
    np.testing.assert_allclose(lse, want[1], atol=1e-5)


def call(specs=None, length=S, **keywords):
    mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
    arrays = {"query": jnp.ones((1, 2, 8, H)), "key": jnp.ones((1, length, K, H)), "value": jnp.ones((1, length, K, H))}
    shards = {"query": P(), "key": P(None, "context"), "value": P(None, "context"), "lengths": P(), **(specs or {})}
    arrays["lengths"] = jnp.ones(8 if specs and "lengths" in specs else 1, int)

    def local(a):
        lengths = a.pop("lengths")
        return decode_attention(**a, key_value_seq_lengths=lengths, **{"axis_name": "context", **keywords})

    return jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(shards,), out_specs=P()), arrays)


@pytest.mark.parametrize(
    ("error", "message", "keywords"),
    (
        (ValueError, "axis_name='ring' is not an axis", {"axis_name": "ring"}),
        (ValueError, "placement='zig' is not a way", {"placement": "zig"}),
        (ValueError, "key is the same on all devices", {"specs": {"key": P()}}),
        (
            ValueError,
            "query varies along axis_name='context', .* all of it",
            {"specs": {"query": P(None, None, "context")}},
        ),
        (ValueError, "key_value_seq_lengths varies along axis_name='context'", {"specs": {"lengths": P("context")}}),
        (ValueError, "bias.shape=.* not broadcastable to .*\\(1, 8, 2, 64\\)", {"bias": jnp.ones((2, S // 8))}),
        (ValueError, "key has the odd length 3 on each of 8 devices", {"placement": "zigzag", "length": 24}),
        (ValueError, "dropout_rate=0.1, but dropout_key=None", {"dropout_rate": 0.1}),
        (TypeError, "return_residual='no' must be True or False", {"return_residual": "no"}),
        (NotImplementedError, "forward_mode=True: .* reverse mode only", {"forward_mode": True}),
        (NotImplementedError, "mosaic_gpu: config=3", {"implementation": "mosaic_gpu", "config": 3}),
    ),
)
def test_errors(error, message, keywords):
    with pytest.raises(error, match=message):
        call(**keywords)


def test_kernels_lower():
    """One kernel for each block of a device's part."""
    cache = jnp.zeros((2, 2048, 2, 128), jnp.bfloat16)
    a = {"query": jnp.zeros((2, 1, 8, 128), jnp.bfloat16), "key": cache, "value": cache}
    run = functools.partial(over_devices, size=2, implementation="mosaic_gpu", mask=BOTTOM_RIGHT)
    a["key_value_seq_lengths"] = jnp.asarray([2048, 700])
    assert kernels(run, a) == 1
    assert kernels(functools.partial(run, placement="zigzag"), a) == 2
