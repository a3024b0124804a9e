"""Calls over a ring of devices, with the results of one device: their arrays, how these are sharded, and the comparison."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.context_parallel import from_zigzag, ring_attention, to_zigzag
from tests.test_sharding import close, compile

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
