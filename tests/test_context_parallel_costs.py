"""What ring and all-to-all attention cost: nothing is gathered, memory falls, and hops that no mask needs are left out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_fa import masks
from pallas_fa.context_parallel import ring_attention
from pallas_fa.context_parallel.ring import Ring
from pallas_fa.problem import normalise
from tests.context_parallel_calls import PLACEMENTS, B, H, T, attend, everything, segment_ids, sharded, tokens
from tests.test_sharding import collectives, compile


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
