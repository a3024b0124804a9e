"""The arguments of attention that say where queries stand that are the last rows of a cache."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_fa import masks
from pallas_fa.arguments.arrays import float_array
from pallas_fa.arguments.dropout import check_dropout_rate
from pallas_fa.arguments.masks import as_mask, window_mask
from pallas_fa.arguments.scores import check_score
from pallas_fa.masks.base import all_of
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.offsets import int_array
from pallas_fa.operands.pytree import is_array

_SAID_BY_CACHE = {
    "is_causal": "attention to a cache is causal, aligned to its last row",
    "query_seq_lengths": "it is lengths=",
    "key_value_seq_lengths": "the cache has it",
    "layout": 'caches are "BTNH"',
    "page_layout": 'pages of a cache are "PSKH"',
    **dict.fromkeys(("key", "value", "key_pages", "value_pages", "page_table"), "the cache has it"),
}
_DROPOUT = "a cache is for inference, and what is dropped would depend on how the queries are cut into calls"


def last_rows(query: Any, sizes: tuple[int, ...], mask: Any, lengths: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of causal attention to a cache, beside the cache and its own lengths.

    The query's position t in masks and scores becomes that in the sequence: the last real query stands at the last row.

    Args:
      query: [B, T, N, H].
      sizes: (B, S, K) of the cache: sequences, rows that each may have, key heads.
      mask: an array, a `Mask`, or None.
      lengths: int [B], how many of the queries are real; None for all.
      given: the other arguments of the caller.
    """
    for name, why in _SAID_BY_CACHE.items():
        if name in given:
            shown = f" of shape {jnp.shape(given[name])}" if is_array(given[name]) else f"={given[name]!r}"
            raise ValueError(f"{name}{shown} cannot be given here: {why}. Leave it out.")
    rate = given.get("dropout_rate")
    if rate is not None and check_dropout_rate(rate) > 0:
        raise ValueError(f"dropout_rate={rate!r} cannot be given here: {_DROPOUT}. Leave it out.")
    dims = _dims(float_array("query", query).shape, sizes)
    if lengths is not None:
        lengths, batch = int_array("lengths", lengths), dims.batch
        if jnp.shape(lengths) != batch:
            raise ValueError(
                f"lengths.shape={jnp.shape(lengths)} must be [B]={batch}: how many of the queries are real in each"
                " sequence, as given to `append`. Leave it out where all are."
            )
    rest = dict(given)
    behind = window_mask(dims, rest.pop("local_window_size", None), align="bottom_right")
    alone = dims.T == 1 and lengths is None  # a query that sees all that is there
    causal = None if alone else masks.Causal(align="bottom_right")
    mask, score = as_mask(mask), check_score(rest.get("score"))
    if score is not None:
        rest["score"] = score.at_end()
    rules: list[masks.Mask | None] = [causal, behind, None if mask is None else mask.at_end()]
    return rest | {"mask": all_of([x for x in rules if x is not None]), "query_seq_lengths": lengths}


def _dims(query, sizes):
    """The sizes of a call; raises where queries of this shape are none of the cache."""
    B, S, K = sizes
    if len(query) != 4 or query[0] != B:
        raise ValueError(
            f"query.shape={tuple(query)} must be [B, T, N, H], with a query for each of the B={B} sequences of the cache."
            " Reshape it; a single query of each is T=1."
        )
    _, T, N, _ = query
    if N % K:
        raise ValueError(
            f"query.shape={tuple(query)} has N={N} heads, and the cache K={K}: N must be a multiple of K, since query head n"
            " reads key head n // (N // K). If heads and length are swapped, transpose it to [B, T, N, H]."
        )
    return Dims((B,), T, S, N)
