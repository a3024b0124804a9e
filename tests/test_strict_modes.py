"""Calls under JAX's strict modes, which users turn on to find mistakes of their own."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa import masks, scores
from pallas_fa.backends.xla import plan
from pallas_fa.cache import KeyValueCache, PagedCache
from pallas_fa.context_parallel import all_to_all_attention, decode_attention, ring_attention
from tests.lowering import kernels


@contextlib.contextmanager
def strict_64_bits():
    """Both rules of promotion where NumPy's integers are of 64 bits, and positions of 32."""
    with jax.enable_x64(True), jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        yield


MODES = {
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "NaN": lambda: jax.debug_nans(True),
    "leaks": lambda: jax.checking_leaks(),
    "no jit": lambda: jax.disable_jit(),
    "64 bits": lambda: jax.enable_x64(True),
    "64 bits, promotion": strict_64_bits,
}
LENGTHS = np.array([5, 8], np.int32)
IDS = np.repeat(np.arange(2, dtype=np.int32), 8)[None].repeat(2, axis=0)
BIAS = np.linspace(-1, 1, 4 * 16 * 16, dtype=np.float32).reshape(4, 16, 16)
CALLS = {
    "causal": {"is_causal": True},
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS},
    "offsets": {"mask": masks.Causal(offset=LENGTHS) & masks.Window(3, 2, offset=LENGTHS)},
    "bottom right": {"mask": masks.Causal(align="bottom_right"), "key_value_seq_lengths": LENGTHS},
    "documents": {"is_causal": True, "query_segment_ids": IDS, "key_value_segment_ids": IDS},
    "window or prefix": {"mask": masks.Window(3, 0) | masks.Lengths(kv_lengths=LENGTHS)},
    "lengths of one side": {
        "is_causal": True,
        "query_seq_lengths": LENGTHS,
        "mask": masks.Window(LENGTHS, None) | masks.Window(None, LENGTHS),
        "score": scores.RelativeBias(lambda offset: jnp.cos(offset), align="bottom_right"),
    },
    "blocks": {"mask": masks.BlockMask(np.tri(4, dtype=np.bool_), 4), "key_value_seq_lengths": LENGTHS},
    "bias": {"bias": BIAS, "logits_soft_cap": 20.0},
    "relative bias": {"score": scores.RelativeBias(np.linspace(-1, 1, 4 * 31, dtype=np.float32).reshape(4, 31))},
    "relative bias of 16 bits": {"score": scores.RelativeBias(jnp.zeros((4, 31), jnp.bfloat16))},
    "sinks": {"sinks": BIAS[0, 0, :4], "key_value_seq_lengths": LENGTHS - 5},
    "sinks of a batch": {"sinks": BIAS[0, :2, :4], "scale": np.float32(0.5)},
    "dropout": {"dropout_rate": 0.25, "dropout_key": jax.random.key(0), "is_causal": True},
    "dropout of all heads": {"dropout_rate": 0.25, "dropout_key": jax.random.PRNGKey(0), "broadcast_dropout": True},
    "intervals": {"mask": masks.KeyIntervals(IDS * 8, IDS * 8 + 5)},
    "packed": {"mask": masks.Dense(BIAS > 0) & masks.Lengths(LENGTHS, LENGTHS.reshape(2, 1, 1, 1).repeat(4, 1))},
    "functions": {
        "mask": masks.Custom(lambda b, n, t, s, h: (t - s) % 3 != h, np.arange(4, dtype=np.int32)[:, None, None]),
        "score": scores.Custom(lambda x, b, n, t, s, a: x * a + 0.5, BIAS[:, :1, :]),
    },
    "window of heads": {"local_window_size": (LENGTHS.reshape(2, 1, 1, 1).repeat(4, 1), LENGTHS)},
    "ALiBi": {"score": scores.Alibi(np.float32([0.5, 0.25, 0.125, 0.0625]), offset=LENGTHS)},
}


def tokens(dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(0).standard_normal((2, 16, 4, 8)), dtype)


def with_gradient(x, **keywords):
    loss = lambda x: jnp.sum(pallas_fa.dot_product_attention(x, x, x, **keywords))
    return jax.value_and_grad(loss)(x)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mode", MODES)
def test_a_call_does_the_same(mode, call, small_chunks):
    x = tokens()
    expected = with_gradient(x, **CALLS[call])
    for implementation in ("xla", "reference"):
        with MODES[mode]():
            found = with_gradient(x, implementation=implementation, **CALLS[call])
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def of_cache(make):
    """Two prompts, then a step: what each attends to, and the lengths."""
    query, rows = tokens(), tokens()[:, :, :2]
    cache = make().append(rows[:, :5], rows[:, :5], LENGTHS - 3)
    prompts = cache.attend(query[:, :5], lengths=LENGTHS - 3, local_window_size=(3, 0))
    cache = cache.append(rows[:, 5:6], rows[:, 5:6])
    return prompts, cache.attend(query[:, 5:6], score=scores.Alibi(np.ones(4, np.float32))), cache.lengths


def in_pages():
    cache = PagedCache.empty(2, 4, 8, 4, 2, 8, dtype=jnp.float32)
    return dataclasses.replace(cache, page_table=jnp.arange(8, dtype=jnp.int32).reshape(2, 4))


def ragged(pages, **keywords):
    """Of pages [P, page, 4, H], the first of which stands for queries, too."""
    table = np.array([[0, 1], [3, -1]], np.int32)
    numbers = np.array([9, 5], np.int32), table, np.array([0, 2, 5], np.int32), np.array([2], np.int32)
    return pallas_fa.ragged_paged_attention(
        pages[0], pages, *numbers, sliding_window=4, k_scale=jnp.bfloat16(0.5), v_scale=jnp.float32(2), **keywords
    )


def bias_gradient(*shape):
    loss = lambda bias: pallas_fa.dot_product_attention(tokens(), tokens(), tokens(), bias, implementation="xla").sum()
    return jax.grad(loss)(jnp.zeros(shape, jnp.bfloat16)).astype(jnp.float32)


def over_devices(attention, bias=None, **keywords):
    """Gradients of 16-bit tokens, and of a 16-bit bias where one is given, over two devices."""
    mesh = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    shard = P(None, "ring")

    def attend(q, k, v, bias):
        return attention(q, k, v, bias, axis_name="ring", placement="zigzag", implementation="xla", **keywords)

    def loss(x, bias):
        whole = jax.shard_map(attend, mesh=mesh, in_specs=(shard, shard, shard, P()), out_specs=shard)
        return whole(x, x, x, bias).astype(jnp.float32).sum()

    return jax.tree.map(lambda x: x.astype(jnp.float32), jax.grad(loss, argnums=(0, 1))(tokens(jnp.bfloat16), bias))


def integer_scale():
    x = tokens(jnp.bfloat16)
    return pallas_fa.dot_product_attention(x, x, x, scale=jnp.int32(1)).astype(jnp.float32)


OTHERS = {
    "contiguous cache": functools.partial(of_cache, lambda: KeyValueCache.empty(2, 16, 2, 8, dtype=jnp.float32)),
    "paged cache": functools.partial(of_cache, in_pages),
    "ragged": lambda: ragged(tokens().reshape(4, 8, 4, 8)),
    "ragged of 16 bits": lambda: ragged(tokens(jnp.bfloat16).reshape(4, 8, 4, 8)).astype(jnp.float32),
    "gradient of a bias of 16 bits": lambda: bias_gradient(4, 1, 16),
    "scale of an int": integer_scale,
    "ring": lambda: over_devices(ring_attention, is_causal=True, sinks=jnp.ones(4, jnp.bfloat16)),
    "ring with a bias": lambda: over_devices(ring_attention, jnp.zeros((4, 1, 16), jnp.bfloat16)),
    "all-to-all with lengths": lambda: over_devices(
        all_to_all_attention, is_causal=True, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS
    ),
    "ring of lengths": lambda: over_devices(
        ring_attention, is_causal=True, query_seq_lengths=LENGTHS, key_value_seq_lengths=LENGTHS
    ),
    "ring of blocks": lambda: over_devices(ring_attention, mask=masks.BlockMask(np.tri(4, dtype=np.bool_), 4)),
    "block mask": lambda: masks.block_mask(masks.Causal(), 16, 16, (4, 4)),
}


@pytest.mark.parametrize("call", OTHERS)
def test_promotion_is_never_implicit(call):
    expected = OTHERS[call]()
    with MODES["rank promotion"](), MODES["dtype promotion"]():
        found = OTHERS[call]()
    with strict_64_bits():
        of_64_bits = OTHERS[call]()
    for a, b, c in zip(*map(jax.tree.leaves, (found, of_64_bits, expected)), strict=True):
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, c)


def test_block_masks_of_keys_that_devices_hold():
    """First of all under the strict modes: what is chosen for a call is remembered."""
    mesh = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    mask, shard, x = masks.BlockMask(np.tri(8, dtype=np.bool_), 2), P(None, "ring"), tokens()
    attend = functools.partial(decode_attention, axis_name="ring", mask=mask)
    decode = jax.shard_map(attend, mesh=mesh, in_specs=(P(), shard, shard), out_specs=P())
    with strict_64_bits():
        found = decode(x, x, x)
    np.testing.assert_allclose(found, pallas_fa.dot_product_attention(x, x, x, mask=mask), atol=1e-6)


OVER_DEVICES = {
    "ring": (ring_attention, P(None, "ring")),
    "all-to-all": (all_to_all_attention, P(None, "ring")),
    "decode": (decode_attention, P()),
    "plain": (lambda *x, axis_name, **keywords: pallas_fa.dot_product_attention(*x, **keywords), P(None, "ring")),
    "forward mode": (lambda *x, axis_name: pallas_fa.dot_product_attention(*x, forward_mode=True), P(None, "ring")),
}


@pytest.mark.parametrize("call", OVER_DEVICES)
def test_shards_without_jit(call):
    """Values and gradients inside of jax.shard_map."""
    attention, of_queries = OVER_DEVICES[call]
    mesh = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    attend = functools.partial(attention, axis_name="ring", **({"placement": "contiguous"} if call == "ring" else {}))
    in_specs = of_queries, P(None, "ring"), P(None, "ring")
    whole = jax.shard_map(attend, mesh=mesh, in_specs=in_specs, out_specs=of_queries)
    with_gradient = jax.value_and_grad(lambda q, x: jnp.sin(whole(q, x, x)).sum())
    arguments = tokens()[:, :4], tokens()
    expected = jax.jit(with_gradient)(*arguments)
    with MODES["no jit"]():
        found = with_gradient(*arguments)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_promotion_is_never_implicit_where_xla_computes_whole_rows(monkeypatch):
    monkeypatch.setattr(plan, "_on_gpu", lambda: True)
    with MODES["rank promotion"](), MODES["dtype promotion"]():
        assert bias_gradient(1, 16).any()


def test_kernels_lower():
    """Under both rules of promotion at once. Not while checking leaks: Pallas's own run_state holds its tracers."""
    x = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)
    mask = masks.Window(3, 2, offset=LENGTHS) & masks.Causal(offset=LENGTHS) | masks.Causal(align="bottom_right")
    mask |= masks.Window(LENGTHS, None)
    lengths = {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS}
    with MODES["rank promotion"](), MODES["dtype promotion"]():
        assert kernels(lambda x: with_gradient(x, mask=mask, **lengths), x) == 2
    for other in (mask, masks.BlockMask(np.tri(2, dtype=np.bool_), 64)):
        with strict_64_bits():
            assert kernels(lambda x, mask=other: with_gradient(x, mask=mask, **lengths), x) == 2


@pytest.mark.parametrize("mode", ["dtype promotion", "64 bits, promotion"])
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mma"])
def test_kernels_for_decoding_lower(implementation, mode):
    lengths = {"mask": masks.Causal(align="bottom_right"), "key_value_seq_lengths": LENGTHS}

    def call(x):
        in_pages = ragged(x.reshape(32, 16, 4, 64), implementation=implementation)
        return in_pages, pallas_fa.dot_product_attention(x[:, :2], x, x, implementation=implementation, **lengths)

    with MODES[mode]():
        assert kernels(call, jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.bfloat16)) == 2


def test_the_kernel_for_latent_attention_lowers():
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)
    call = lambda q, cache: pallas_fa.mla_decode_attention(q, cache, scale=0.1, lengths=LENGTHS)
    with strict_64_bits():
        assert kernels(call, shape(2, 2, 16, 576), shape(2, 128, 576)) == 1


def test_a_ring_of_a_function_where_a_mesh_is_set():
    """Which hops it needs is found while tracing, in a mesh in which JAX computes nothing outside of the program."""
    mesh = jax.make_mesh((2,), ("ring",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    mask = masks.Custom(lambda b, n, t, s: (t - s) % 3 != 1)
    attend = functools.partial(ring_attention, axis_name="ring", placement="contiguous", mask=mask)
    whole = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "ring"), out_specs=P(None, "ring"))
    x = tokens()
    jax.clear_caches()  # what was computed before needs no mesh
    with jax.set_mesh(mesh):
        found = jax.jit(whole)(x, x, x)
    np.testing.assert_allclose(found, pallas_fa.dot_product_attention(x, x, x, mask=mask), atol=1e-5)
