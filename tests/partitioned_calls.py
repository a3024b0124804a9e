"""Calls whose arrays `jit` shards, with the results of one device: where their arrays lie, and how they are compared.

How the work is shared out does not depend on what computes it, so that XLA stands in for the kernels here.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.backends import choice
from pallas_fa.backends import xla as xla_backend
from pallas_fa.backends.record import Backend, backward_in_btnh, forward_in_btnh
from pallas_fa.backends.xla import attention as xla
from pallas_fa.sharding import partitioned
from tests.test_sharding import close, compile

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
