"""The causal self-attention of a GPT in training, on one device and on a mesh."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, Protocol

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import pallas_fa
from pallas_fa.context_parallel import ring_attention


class Dropout(NamedTuple):
    """Of the attention's probabilities, in one layer and step."""

    rate: float
    key: jax.Array  # a raw PRNG key

    def keywords(self) -> dict[str, Any]:
        """Those of pallas_fa.dot_product_attention."""
        return {"dropout_rate": self.rate, "dropout_key": self.key}


class CausalAttention(Protocol):
    """query [B,T,N,H], key and value [B,T,K,H], sinks [N] -> [B,T,N,H]. Hashable, since a model's config holds it."""

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        implementation: str | None,
        sinks: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array: ...


def causal_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    implementation: str | None,
    sinks: jax.Array | None = None,
    dropout: Dropout | None = None,
) -> jax.Array:
    """On one device."""
    attend: Any = functools.partial(pallas_fa.dot_product_attention, is_causal=True, implementation=implementation)
    return attend(query, key, value, sinks=sinks, **(dropout.keywords() if dropout else {}))


@dataclasses.dataclass(frozen=True)
class MeshAttention:
    """On a mesh with the axes of models.mesh: batch entries over `data`, the sequence over `context`, heads over `model`.

    Inside shard_map each device calls attention on what it has, so that nothing is gathered, whichever implementation
    runs. Batch entries and heads count from the start of a device's part there, so that each device folds its place into
    the key of dropout. Over several devices along `context` the sequence lies in zigzag order, and keys and values go
    round in a ring.
    """

    mesh: Mesh

    def __call__(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        implementation: str | None,
        sinks: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> jax.Array:
        attend: Any = pallas_fa.dot_product_attention
        if self.mesh.shape["context"] > 1:
            attend = functools.partial(ring_attention, axis_name="context", placement="zigzag")
        attend = functools.partial(attend, is_causal=True, implementation=implementation)
        place = P("data", "context", "model")

        def on_shard(query, key, value, sinks, dropout_key):
            if dropout is None:
                return attend(query, key, value, sinks=sinks)
            for axis in ("data", "model"):
                dropout_key = jax.random.fold_in(dropout_key, jax.lax.axis_index(axis))
            return attend(query, key, value, sinks=sinks, **dropout._replace(key=dropout_key).keywords())

        in_specs = (place, place, place, P("model"), P())
        on_shards = jax.shard_map(on_shard, mesh=self.mesh, in_specs=in_specs, out_specs=place)
        return on_shards(query, key, value, sinks, None if dropout is None else dropout.key)
