"""`PagedCache`: keys and values of sequences in pages of memory, which a table finds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_fa.cache import rows, scales
from pallas_fa.cache.attention import paged_attention
from pallas_fa.cache.positions import last_rows
from pallas_fa.masks import Mask
from pallas_fa.operands.pages import checked_table
from pallas_fa.sharding.explicit_axes import keeping_shardings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedCache:
    """Keys and values of B sequences, in pages that no sequence owns until a table says so; a pytree, and a value.

    Row s of sequence b is row s % page of page `page_table[b, s // page]`. Sequences may share pages that are full, as
    those of a common prompt (vLLM, arXiv 2309.06180). `PageAllocator` makes tables; put one in with
    `dataclasses.replace(cache, page_table=...)`.

    Make one with `empty`, or by keywords from arrays of your own. A later version may add fields that are None unless
    given, so other code should neither unpack it nor count its leaves.

    Attributes:
      key_pages: [P, page, K, H].
      value_pages: [P, page, K, Hv].
      page_table: int32 [B, pages per sequence]; -1, or any other number that is no page's, where there is no page yet.
      lengths: int32 [B], how many rows of each sequence are there. Set it back (`dataclasses.replace`) to forget the
        last rows, such as rejected drafts; not into pages that are shared, since the next append writes there.
      dropped: int32 [B], how many rows had no page, in all appends so far. They are nowhere.
      key_scale: float32 [], by which keys of 8 bits are multiplied when they are read; None for 1.
      value_scale: likewise of values.
    """

    key_pages: jax.Array
    value_pages: jax.Array
    page_table: jax.Array
    lengths: jax.Array
    dropped: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        pages_per_sequence: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        key_scale: ArrayLike | None = None,
        value_scale: ArrayLike | None = None,
    ) -> PagedCache:
        """Returns a cache of `num_pages` pages, none of which is in the table.

        Args:
          batch: B.
          pages_per_sequence: how many pages a sequence can have.
          num_pages: P.
          page_size: rows of a page. Hopper's kernels take 16, 32 and multiples of 64, those by mma.sync multiples of 8;
            others run on `xla`.
          kv_heads: K.
          head_dim: H.
          value_head_dim: Hv; None for H.
          dtype: of keys and values, a float dtype. One of 8 bits, such as jnp.float8_e4m3fn, halves what a step reads.
          key_scale: of a cache of 8 bits: `append` divides keys by it, and `attend` multiplies by it; such as the largest
            key over the dtype's largest number. None for 1.
          value_scale: likewise of values.
        """
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        rows.check_dtype(dtype)
        scale_of_keys = scales.checked("key_scale", key_scale, dtype)
        scale_of_values = scales.checked("value_scale", value_scale, dtype)
        rows.check_sizes(batch=batch, pages_per_sequence=pages_per_sequence, num_pages=num_pages, page_size=page_size)
        rows.check_sizes(kv_heads=kv_heads, head_dim=head_dim, value_head_dim=value_head_dim)
        pages_of = lambda dim: jnp.zeros((num_pages, page_size, kv_heads, dim), dtype)
        none = lambda: jnp.zeros((batch,), jnp.int32)  # made twice, since one array cannot be donated twice
        return cls(
            key_pages=pages_of(head_dim),
            value_pages=pages_of(value_head_dim),
            page_table=jnp.full((batch, pages_per_sequence), -1, jnp.int32),
            lengths=none(),
            dropped=none(),
            key_scale=scale_of_keys,
            value_scale=scale_of_values,
        )

    @keeping_shardings
    def append(self, key: ArrayLike, value: ArrayLike, lengths: ArrayLike | None = None) -> PagedCache:
        """Returns the cache with rows written behind those that are there; arguments as in `KeyValueCache.append`.

        In place where that is, too. A row for which the table has no page is not written, nor are those behind it; they
        are counted in `dropped`.
        """
        table, before = self._checked_places()
        B, pages_per_sequence = table.shape
        P, page = self.key_pages.shape[:2]
        dropped = rows.checked_dropped(self.dropped, B)
        kept, kept_scales = (self.key_pages, self.value_pages), scales.of(self, self.key_pages.dtype)
        key_scale, value_scale = kept_scales
        capacity = pages_per_sequence * page
        new = rows.new_rows(key, value, lengths, batch=B, kept=kept, kept_scales=kept_scales, capacity=capacity)
        position = before[:, None] + jnp.arange(new.key.shape[1], dtype=jnp.int32)[None]
        index = table.at[jnp.arange(B, dtype=jnp.int32)[:, None], position // page].get(mode="fill", fill_value=-1)
        placed = rows.place(new, before, dropped, (position >= 0) & (index >= 0) & (index < P))
        index = jnp.where(placed.writes, index, P)  # past the end, where the scatter drops it
        write = lambda pages, new: jnp.asarray(pages).at[index, position % page].set(new, mode="drop")
        return dataclasses.replace(
            self,
            key_pages=write(self.key_pages, new.key),
            value_pages=write(self.value_pages, new.value),
            lengths=placed.lengths,
            dropped=placed.dropped,
            key_scale=key_scale,  # arrays of its own, as all others are, so that it may be donated
            value_scale=value_scale,
        )

    def attend(
        self,
        query: ArrayLike,
        mask: ArrayLike | Mask | None = None,
        *,
        lengths: ArrayLike | None = None,
        **arguments: Any,
    ) -> Any:
        """Returns `pallas_fa.paged_attention` of the queries whose rows were appended last, as `KeyValueCache.attend`."""
        table, kept = self._checked_places()
        (B, pages), (_, page, K, _) = table.shape, self.key_pages.shape
        given = last_rows(query, (B, pages * page, K), mask, lengths, arguments)
        key_scale, value_scale = scales.of(self, self.key_pages.dtype)
        given = scales.with_key_scale(given, query, key_scale)
        results = paged_attention(query, self.key_pages, self.value_pages, table, kept, **given)
        return scales.with_value_scale(results, value_scale)

    def _checked_places(self):
        """The page table and the lengths, of a cache whose arrays belong together."""
        rows.check_kept("[P, page, K, head dim]", key_pages=self.key_pages, value_pages=self.value_pages)
        lengths = rows.checked_lengths(self.lengths)
        table = checked_table(self.page_table, lengths.shape[0])
        rows.check_room(self.lengths, table.shape[1] * self.key_pages.shape[1])
        return table, lengths
