"""The causal self-attention of a GPT in training, on one device and on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from typing import Protocol, cast

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa.context_parallel import ring_attention


class CausalAttention(Protocol):
    """query [B,T,N,H], key and value [B,T,K,H], sinks [N] -> [B,T,N,H]. Hashable, since a model's config holds it."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        implementation: str | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array: ...


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, implementation: str | None, sinks: jax.Array | None = None
) -> jax.Array:
    """On one device."""
    out = pallas_fa.dot_product_attention(query, key, value, is_causal=True, sinks=sinks, implementation=implementation)
    return cast(jax.Array, out)


@dataclasses.dataclass(frozen=True)
class MeshAttention:
    """On a mesh with the axes of models.mesh: batch entries over `data`, the sequence over `context`, heads over `model`.

    Inside shard_map each device calls attention on what it has, so that nothing is gathered, whichever implementation
    runs. Over several devices along `context` the sequence lies in zigzag order, and keys and values go round in a ring.
    """

    mesh: Mesh

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        implementation: str | None,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        attend = pallas_fa.dot_product_attention
        if self.mesh.shape["context"] > 1:
            attend = functools.partial(ring_attention, axis_name="context", placement="zigzag")
        attend = functools.partial(attend, is_causal=True, implementation=implementation)
        place = P("data", "context", "model")
        on_shards = jax.shard_map(
            lambda query, key, value, sinks: attend(query, key, value, sinks=sinks),
            mesh=self.mesh,
            in_specs=(place, place, place, P("model")),
            out_specs=place,
        )
        return on_shards(query, key, value, sinks)
