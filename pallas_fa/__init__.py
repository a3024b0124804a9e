"""FlashAttention for JAX: `dot_product_attention`, with the signature of `jax.nn.dot_product_attention` and more.

- `dot_product_attention(query, key, value, ...)`: attention in O(T) memory, forward and backward.
- `paged_attention(query, key_pages, value_pages, page_table, lengths, ...)`: the same, to a cache in pages;
  `ragged_paged_attention(...)`, with the signature of JAX's TPU kernel, of sequences with any number of queries each.
- `mla_decode_attention(query, cache, ...)`: latent attention (MLA) with absorbed weights, keys and values in one array.
- `explain(query, key, value, ...)`: which implementation would run these arguments, and why the others would not.
- `mla.explain`, `cache.explain`: the same of `mla_decode_attention` and of `paged_attention`.
- `masks`, `scores`: who attends to whom, and what happens to the logits; compose them, or write your own.
- `cache`: caches of keys and values for decoding, contiguous and paged.
- `context_parallel`: attention to sequences sharded over devices, inside `jax.shard_map`.
- `nn`: `attention_fn` and modules for Flax linen and Flax nnx; needs Flax.
- `mosaic_gpu.config`: tiles of the kernels, for `config=`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from pallas_fa import cache as cache
from pallas_fa import masks as masks
from pallas_fa import mla as mla
from pallas_fa import scores as scores
from pallas_fa.api import dot_product_attention as dot_product_attention
from pallas_fa.api import explain as explain
from pallas_fa.cache import paged_attention as paged_attention
from pallas_fa.cache import ragged_paged_attention as ragged_paged_attention
from pallas_fa.mla import mla_decode_attention as mla_decode_attention

if TYPE_CHECKING:
    from pallas_fa import context_parallel as context_parallel
    from pallas_fa import mosaic_gpu as mosaic_gpu
    from pallas_fa import nn as nn

__version__ = "0.1.0.dev0"
__all__ = [
    "cache",
    "context_parallel",
    "dot_product_attention",
    "explain",
    "masks",
    "mla",
    "mla_decode_attention",
    "paged_attention",
    "ragged_paged_attention",
    "scores",
]
_WHEN_NEEDED = ("context_parallel", "mosaic_gpu", "nn")  # nn imports Flax, which may not be there


def __getattr__(name: str) -> Any:
    if name in _WHEN_NEEDED:
        return importlib.import_module(f"pallas_fa.{name}")
    raise AttributeError(f"module 'pallas_fa' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_WHEN_NEEDED, "__version__", "__doc__"})
