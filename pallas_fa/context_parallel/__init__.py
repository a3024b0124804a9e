"""Attention to a sequence that is sharded over devices, for use inside `jax.shard_map`.

- `ring_attention` passes keys and values round a ring while it computes: any number of devices, and memory that falls as
  one over it.
- `all_to_all_attention` exchanges heads for sequence before and after: less communication, up to one device for each query
  head.
- `decode_attention` has whole queries and a sharded cache: each device attends to its part, and partial results merge.

All equal `dot_product_attention` of the whole arrays, with the same gradients.
"""

from pallas_fa.context_parallel.all_to_all import all_to_all_attention as all_to_all_attention
from pallas_fa.context_parallel.decode_attention import decode_attention as decode_attention
from pallas_fa.context_parallel.placement import from_zigzag as from_zigzag
from pallas_fa.context_parallel.placement import to_zigzag as to_zigzag
from pallas_fa.context_parallel.ring_attention import ring_attention as ring_attention

__all__ = ["all_to_all_attention", "decode_attention", "from_zigzag", "ring_attention", "to_zigzag"]
