"""How arrays [B, length, heads, dim] are cut, and filled, chunk by chunk of the rows of logits."""

from typing import Any, Protocol

import jax.numpy as jnp

from pallas_fa.backends.xla.chunks import Chunks
from pallas_fa.backends.xla.matmuls import heads_first
from pallas_fa.problem import Problem


class ChunksOfRows(Protocol):
    """The chunks. Their parts of arrays are [B, heads, length, dim]; `keys` and `j` are an interval of keys."""

    def prepared(self, x: Any) -> Any:
        """Returns x [B, length, heads, dim] in the form that is cut; also the inverse."""
        ...

    def cut(self, x: Any, i: Any) -> Any:
        """Returns chunk i of an array of queries."""
        ...

    def replace(self, x: Any, update: Any, i: Any) -> Any:
        """Returns an array of queries with another chunk i."""
        ...

    def add(self, x: Any, update: Any, i: Any) -> Any:
        """Returns an array of queries, 0 before, with another chunk i; of two chunks that overlap, the sum."""
        ...

    def cut_keys(self, x: Any, i: Any, keys: Chunks, j: Any) -> Any:
        """Returns what chunk i attends to of an array of keys."""
        ...

    def zeros_of_keys(self, x: Any) -> Any:
        """Returns the gradient of x, an array of keys that is prepared, before anything is added."""
        ...

    def add_keys(self, d: Any, update: Any, i: Any, keys: Chunks, j: Any) -> Any:
        """Adds to the gradient of an array of keys what chunk i adds to it."""
        ...


def chunks_of_rows(problem: Problem, rows: Chunks) -> ChunksOfRows:
    """Returns how arrays are cut into `rows`, the query heads or the queries in chunks."""
    return _OfHeads(problem, rows) if rows.axis == 1 else _OfQueries(problem, rows)


class _OfHeads:
    """Chunks of query heads, with the key heads that they attend to, whose gradients are no sums over chunks.

    Arrays stay [B, length, heads, dim], and a part is transposed. Cut along one axis [heads * dim], it is so in one pass;
    from the four axes XLA would transpose the whole array first.
    """

    def __init__(self, problem: Problem, rows: Chunks):
        self._heads, self._key_heads = rows.chunk, problem.K // rows.count

    def prepared(self, x: Any) -> Any:
        return x

    def cut(self, x: Any, i: Any) -> Any:
        return _cut_heads(x, i, self._heads)

    def replace(self, x: Any, update: Any, i: Any) -> Any:
        return _replace_heads(x, update, i, self._heads)

    add = replace  # no chunks overlap

    def cut_keys(self, x: Any, i: Any, keys: Chunks, j: Any) -> Any:
        return _cut_heads(x, i, self._key_heads)

    def zeros_of_keys(self, x: Any) -> Any:
        return jnp.zeros(x.shape, x.dtype)

    def add_keys(self, d: Any, update: Any, i: Any, keys: Chunks, j: Any) -> Any:
        return _replace_heads(d, update, i, self._key_heads)


class _OfQueries:
    """Chunks of queries, which share keys and values, whose gradients are sums. Arrays are [B, heads, length, dim]."""

    def __init__(self, problem: Problem, rows: Chunks):
        self._rows, self._acc_dtype = rows, problem.acc_dtype

    def prepared(self, x: Any) -> Any:
        return heads_first(x)

    def cut(self, x: Any, i: Any) -> Any:
        return self._rows.cut(x, i)

    def replace(self, x: Any, update: Any, i: Any) -> Any:
        return self._rows.replace(x, update.astype(x.dtype), i, 2)

    def add(self, x: Any, update: Any, i: Any) -> Any:
        return self._rows.add(x, update.astype(x.dtype), i)

    def cut_keys(self, x: Any, i: Any, keys: Chunks, j: Any) -> Any:
        return keys.cut(x, j, 2)

    def zeros_of_keys(self, x: Any) -> Any:
        return jnp.zeros(x.shape, self._acc_dtype)

    def add_keys(self, d: Any, update: Any, i: Any, keys: Chunks, j: Any) -> Any:
        return keys.add(d, update, j, 2)


def _cut_heads(x, i, heads):
    """Cuts chunk i of so many heads [B, heads, length, dim] out of x [B, length, all heads, dim]."""
    B, length, _, dim = x.shape
    return heads_first(_features(x, heads).cut(x.reshape(B, length, -1), i).reshape(B, length, heads, dim))


def _replace_heads(x, update, i, heads):
    """Replaces in x [B, length, all heads, dim] chunk i by `update` [B, heads, length, dim]."""
    B, length, *_ = x.shape
    update = heads_first(update.astype(x.dtype)).reshape(B, length, -1)
    return _features(x, heads).replace(x.reshape(B, length, -1), update, i, 2).reshape(x.shape)


def _features(x, heads):
    *_, all_heads, dim = x.shape
    return Chunks(2, all_heads * dim, heads * dim)
