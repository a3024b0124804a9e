"""Key/value caches as values: `KeyValueCache`, contiguous; `PagedCache`, in pages that a `PageAllocator` hands out."""

from pallas_fa.cache.allocator import OutOfPages as OutOfPages
from pallas_fa.cache.allocator import PageAllocator as PageAllocator
from pallas_fa.cache.attention import explain as explain
from pallas_fa.cache.attention import paged_attention as paged_attention
from pallas_fa.cache.contiguous import KeyValueCache as KeyValueCache
from pallas_fa.cache.paged import PagedCache as PagedCache
from pallas_fa.cache.ragged import ragged_paged_attention as ragged_paged_attention
