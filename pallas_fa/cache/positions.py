"""The arguments of attention that say where queries stand that are the last rows of a cache."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from pallas_fa import masks
from pallas_fa.arguments import mask as checked_mask
from pallas_fa.arguments import score as checked_score
from pallas_fa.arguments import window_sides
from pallas_fa.masks.base import all_of
from pallas_fa.operands.offsets import int_array

_SAID_BY_CACHE = {
    "is_causal": "attention to a cache is causal, aligned to its last row",
    "query_seq_lengths": "it is lengths=",
    "key_value_seq_lengths": "the cache has it",
    "layout": 'caches are "BTNH"',
}
_DROPOUT = "a cache is for inference, and what is dropped would depend on how the queries are cut into calls"


def last_rows(query: Any, mask: Any, lengths: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of causal attention to a cache, beside the cache and its own lengths.

    The query's position t in masks and scores becomes that in the sequence: the last real query stands at the last row.

    Args:
      query: [B, T, N, H].
      mask: an array, a `Mask`, or None.
      lengths: int [B], how many of the queries are real; None for all.
      given: the other arguments of the caller.
    """
    for name, why in _SAID_BY_CACHE.items():
        if name in given:
            raise ValueError(f"{name}={given[name]!r} cannot be given here: {why}. Leave it out.")
    if given.get("dropout_rate"):
        raise ValueError(f"dropout_rate={given['dropout_rate']!r} cannot be given here: {_DROPOUT}. Leave it out.")
    if lengths is not None:
        lengths, batch = int_array("lengths", lengths), jnp.shape(query)[:1]
        if jnp.shape(lengths) != batch:
            raise ValueError(
                f"lengths.shape={jnp.shape(lengths)} must be [B]={batch}: how many of the queries are real in each"
                " sequence, as given to `append`. Leave it out where all are."
            )
    rest = dict(given)
    window = rest.pop("local_window_size", None)
    alone = jnp.shape(query)[-3:-2] == (1,) and lengths is None  # a query that sees all that is there
    causal = None if alone else masks.Causal(align="bottom_right")
    behind = None if window is None else masks.Window(*window_sides(window), align="bottom_right")
    mask, score = checked_mask(mask), checked_score(rest.get("score"))
    if score is not None:
        rest["score"] = score.at_end()
    rules = [x for x in (causal, behind, None if mask is None else mask.at_end()) if x is not None]
    return rest | {"mask": all_of(rules), "query_seq_lengths": lengths}
