"""`KeyValueCache`: keys and values of sequences, each in one piece, with room for more."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from pallas_fa.api import dot_product_attention
from pallas_fa.cache import rows, scales
from pallas_fa.cache.positions import last_rows
from pallas_fa.masks import Mask
from pallas_fa.sharding.explicit_axes import keeping_shardings


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyValueCache:
    """Keys and values of B sequences, with room for S rows of each; a pytree of arrays, and a value: nothing changes it.

    Make one with `empty`, or by keywords from arrays of your own. A later version may add fields that are None unless
    given, so other code should neither unpack it nor count its leaves.

    Attributes:
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      lengths: int32 [B], how many rows of each sequence are there. Set it back (`dataclasses.replace`) to forget the
        last rows, such as rejected drafts.
      dropped: int32 [B], how many rows did not fit, in all appends so far. They are nowhere.
      key_scale: float32 [], by which keys of 8 bits are multiplied when they are read; None for 1.
      value_scale: likewise of values.
    """

    key: jax.Array
    value: jax.Array
    lengths: jax.Array
    dropped: jax.Array
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None

    @classmethod
    def empty(
        cls,
        batch: int,
        length: int,
        kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
        key_scale: ArrayLike | None = None,
        value_scale: ArrayLike | None = None,
    ) -> KeyValueCache:
        """Returns a cache of `batch` sequences with room for `length` rows each, and none there.

        Args:
          batch: B.
          length: S.
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
        rows.check_sizes(
            batch=batch, length=length, kv_heads=kv_heads, head_dim=head_dim, value_head_dim=value_head_dim
        )
        rows_of = lambda dim: jnp.zeros((batch, length, kv_heads, dim), dtype)
        none = lambda: jnp.zeros((batch,), jnp.int32)  # made twice, since one array cannot be donated twice
        return cls(
            key=rows_of(head_dim),
            value=rows_of(value_head_dim),
            lengths=none(),
            dropped=none(),
            key_scale=scale_of_keys,
            value_scale=scale_of_values,
        )

    @keeping_shardings
    def append(self, key: ArrayLike, value: ArrayLike, lengths: ArrayLike | None = None) -> KeyValueCache:
        """Returns the cache with rows written behind those that are there.

        In a `jax.jit` to which the cache is donated (`donate_argnums`), and in the carry of a scan or a loop, this is
        done in place. Rows that do not fit are not written, and are counted in `dropped`.

        Args:
          key: [B, T, K, H], in the dtype of the cache, as it is to be kept. To a cache of 8 bits rows of more may be given,
            which are divided by the scale and rounded; what is past the largest number of the dtype becomes that.
          value: [B, T, K, Hv], likewise.
          lengths: int [B], how many of the T rows are real in each sequence, as for prompts of different lengths; None for
            all. The others are not written.

        Raises:
          ValueError, TypeError: a shape or a dtype does not fit the cache, or T exceeds its room for a sequence.
        """
        lengths_before, (B, S) = self._checked_lengths(), self.key.shape[:2]
        dropped = rows.checked_dropped(self.dropped, B)
        kept, kept_scales = (self.key, self.value), scales.of(self, self.key.dtype)
        key_scale, value_scale = kept_scales
        new = rows.new_rows(key, value, lengths, batch=B, kept=kept, kept_scales=kept_scales, capacity=S)
        row = jnp.arange(new.key.shape[1], dtype=jnp.int32)[None]
        position = lengths_before[:, None] + row
        placed = rows.place(new, lengths_before, dropped, (position >= 0) & (position < S))
        # What is not written goes past the end, each row to a place of its own, where the scatter drops it.
        position = jnp.where(placed.writes, position, S + row)
        write = jax.vmap(lambda x, new, at: x.at[at].set(new, mode="drop", unique_indices=True))
        return dataclasses.replace(
            self,
            key=write(self.key, new.key, position),
            value=write(self.value, new.value, position),
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
        """Returns causal attention to the rows that are there, of the queries whose rows were appended last.

        It is `pallas_fa.dot_product_attention` with the arguments that this takes: `key_value_seq_lengths`, a mask
        `Causal(align="bottom_right")` also where T is 1, and a window that counts from the queries' own positions.

        Args:
          query: [B, T, N, H]; the last real one of a sequence sees the last row.
          mask: which of these pairs may attend, as in `dot_product_attention`. In masks and in `score`, t is the position in
            the sequence, s that of a row: what was given to a whole sequence says the same here, whatever its `align`. The
            dim T of arrays (bool masks, `bias`, segment ids, those in a mask or a score) counts these queries.
          lengths: int [B], how many of the T queries are real, as given to `append`; None for all. The others give 0.
          **arguments: as in `dot_product_attention`, but for `is_causal`, the two lengths and dropout, which are refused,
            and the layout, which is "BTNH".

        Returns:
          [B, T, N, Hv]; with `return_residual=True` also lse [B, T, N].

        Raises:
          ValueError, TypeError: an argument is wrong; or positions have no meaning here: an `offset` from the start of the
            queries, `Lengths`, the blocks of a mask.
        """
        kept = self._checked_lengths()
        given = last_rows(query, self.key.shape[:3], mask, lengths, arguments)
        key_scale, value_scale = scales.of(self, self.key.dtype)
        given = scales.with_key_scale(given, query, key_scale)
        results = dot_product_attention(query, self.key, self.value, key_value_seq_lengths=kept, **given)
        return scales.with_value_scale(results, value_scale)

    def _checked_lengths(self):
        """The lengths, of a cache whose arrays belong together."""
        rows.check_kept("[B, S, K, head dim]", key=self.key, value=self.value)
        B, S = self.key.shape[:2]
        lengths = rows.checked_lengths(self.lengths, B)
        rows.check_room(self.lengths, S)
        return lengths
