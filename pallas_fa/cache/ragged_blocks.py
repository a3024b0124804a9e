"""The queries of many sequences, one behind the other, in blocks of one size, which are the entries of a batch."""

from typing import Any, NamedTuple

import jax.numpy as jnp


class Sequences(NamedTuple):
    """Of each sequence: its first token, how many queries it has from there on, and how many keys the last one sees."""

    first: Any
    queries: Any
    keys: Any

    @classmethod
    def of(cls, kv_lens: Any, starts: Any, num_seqs: Any) -> "Sequences":
        """Those of `ragged_paged_attention`'s arguments; those past `num_seqs` have no queries and start at the end."""
        is_there = jnp.arange(kv_lens.shape[0], dtype=jnp.int32) < num_seqs
        queries = jnp.where(is_there, jnp.maximum(starts[1:] - starts[:-1], 0), 0)
        return cls(jnp.where(is_there, starts[:-1], starts[num_seqs]), queries, kv_lens)

    def cut(self, size: int) -> tuple["Sequences", "Sequences"]:
        """Returns the first queries of each sequence, as many as fill blocks of `size`, and the others."""
        rest = self.queries % size
        whole = self.queries - rest
        return Sequences(self.first, whole, self.keys - rest), Sequences(self.first + whole, rest, self.keys)


class Blocks(NamedTuple):
    """Blocks of `size` queries, the last of them first: of prompts these see the most keys, and take longest.

    A block that a sequence does not fill begins with rows that nobody reads: so its last query is its last row, as
    bottom-right alignment has it, and no mask need tell queries from padding.

    sequence: [blocks], whose they are. Blocks of no sequence have no keys.
    end: [blocks], the token behind the last one of each.
    queries: [blocks], how many of the last rows are queries.
    keys: [blocks], how many the last query sees.
    row: [tokens], where each token is among the rows of all blocks; negative if it is in none.
    """

    size: int
    sequence: Any
    end: Any
    queries: Any
    keys: Any
    row: Any

    @classmethod
    def of(cls, sequences: Sequences, size: int, tokens: Any, most: Any) -> "Blocks":
        """Cuts the queries of `sequences`, which are `tokens` at most and fill `most` blocks at most."""
        count = -(-sequences.queries // size)
        ends = jnp.cumsum(count, dtype=jnp.int32)

        number = most - 1 - jnp.arange(most, dtype=jnp.int32)
        of_block = jnp.minimum(_last_at_or_before(ends, number) + 1, count.shape[0] - 1)
        done = (number - (ends - count)[of_block]) * size
        own = sequences.queries[of_block]
        queries = jnp.minimum(own - done, size)
        keys = jnp.where(number < ends[-1], sequences.keys[of_block] - (own - done - queries), 0)
        end = sequences.first[of_block] + done + queries

        token = jnp.arange(tokens, dtype=jnp.int32)
        of_token = jnp.maximum(_last_at_or_before(sequences.first, token), 0)
        at, own = token - sequences.first[of_token], sequences.queries[of_token]
        block = (ends - count)[of_token] + at // size
        empty = jnp.maximum((at // size + 1) * size - own, 0)
        row = (most - 1 - block) * size + empty + at % size
        return cls(size, of_block, end, queries, keys, jnp.where((at >= 0) & (at < own), row, -1))

    def of_tokens(self, x: Any) -> Any:
        """Returns the rows [blocks, size, ...] of `x` [tokens, ...]; 0 where there is no query."""
        before_end = self.size - jnp.arange(self.size, dtype=jnp.int32)[None]
        rows = jnp.take(x, self.end[:, None] - before_end, axis=0, mode="clip")
        is_query = (before_end <= self.queries[:, None]).reshape(*rows.shape[:2], *[1] * (rows.ndim - 2))
        return jnp.where(is_query, rows, jnp.zeros((), x.dtype))


def _last_at_or_before(ascending, x):
    """Returns the index of the last of `ascending` that is not past each `x`; -1 where all are.

    All are compared: a search would be a loop of many small GPU kernels.
    """
    return jnp.sum(ascending[None] <= x[:, None], axis=1, dtype=jnp.int32) - 1
