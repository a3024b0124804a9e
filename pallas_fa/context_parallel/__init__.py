"""Attention to a sequence that is sharded over devices, for use inside `jax.shard_map`."""

from pallas_fa.context_parallel.attention import all_to_all_attention as all_to_all_attention
from pallas_fa.context_parallel.attention import ring_attention as ring_attention
from pallas_fa.context_parallel.placement import from_zigzag as from_zigzag
from pallas_fa.context_parallel.placement import to_zigzag as to_zigzag
