"""`mla_decode_attention`: multi-head latent attention (MLA) with absorbed weights, where keys and values are one array."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
from jax.typing import ArrayLike

from pallas_fa import masks
from pallas_fa.api import explain_normalised
from pallas_fa.arguments.arrays import float_array
from pallas_fa.attention import run
from pallas_fa.operands.offsets import broadcast_remedy, int_array
from pallas_fa.operands.pages import Paged, checked_table
from pallas_fa.operands.pytree import as_flag, is_finite, is_static_int, is_static_number
from pallas_fa.problem import normalise
from pallas_fa.sharding.explicit_axes import with_automatic_axes


@overload
def mla_decode_attention(
    query: ArrayLike,
    cache: ArrayLike,
    *,
    scale: float,
    value_dim: int = 512,
    lengths: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def mla_decode_attention(
    query: ArrayLike,
    cache: ArrayLike,
    *,
    scale: float,
    value_dim: int = 512,
    lengths: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def mla_decode_attention(
    query: ArrayLike,
    cache: ArrayLike,
    *,
    scale: float,
    value_dim: int = 512,
    lengths: ArrayLike | None = None,
    page_table: ArrayLike | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of all query heads to one latent vector per position, which is key and value at once.

    Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) caches one latent vector and one rotary key per position. In
    decoding the projections of keys and values are absorbed: that of keys into the queries, that of values into what
    follows. What remains is attention with one key head, whose values are the first columns of its keys.

    Shapes: B batch (any number of dims, none included), T query length, S key length, N query heads, H head dim of queries
    and cache, Hv = `value_dim`. DeepSeek-V2 and V3 have H=576, the 512 columns of the latent vector and 64 of the rotary
    key, and Hv=512.

    Args:
      query: [*B, T, N, H], any float dtype: queries times the absorbed projection, then their rotary part.
      cache: [*B, S, H], the same dtype: latent vectors, then rotary keys. With `page_table`, pages [P, page, H].
      scale: factor of the logits, that of the attention before absorption, such as 1 / sqrt(128 + 64). H does not tell it,
        so there is no default.
      value_dim: how many columns of the cache are values, 1 to H.
      lengths: int [*B], how many positions of each cache are filled, the new ones included; default S. What lies past them
        may hold NaN. The last query sees the last filled position, and each query before it one position fewer.
      page_table: int [B, pages per sequence], where the cache is in pages: `pallas_fa.paged_attention` says what its entries
        mean. There is one batch dim then, `lengths` must be given, and there are no gradients.
      implementation: as in `pallas_fa.dot_product_attention`. 'mosaic_gpu' reads the cache once, for H=576 and Hv=512 in
        bfloat16 or float16, with N and S multiples of 8, in pages of 16, 32 or a multiple of 64 rows.
        `pallas_fa.mla.explain` says which implementation runs.
      return_residual: also return the log-sum-exp.

    Returns:
      out [*B, T, N, Hv] in the dtype of `query`, in the space of latent vectors; with `return_residual` (out, lse), lse
      [*B, T, N] float32 (float64 for float64), natural logarithm. A query without positions gives 0 and -inf. Both are
      differentiable, with gradients from XLA.

    Raises:
      ValueError, TypeError: an argument is wrong; raised before anything is computed.
      NotImplementedError: the implementation named cannot do the call; the message says why.
    """
    return_residual = as_flag("return_residual", return_residual)
    out, lse = _attend(query, cache, scale, value_dim, lengths, page_table, implementation)
    return (out, lse) if return_residual else out


def explain(
    query: Any,
    cache: Any,
    *,
    scale: float,
    value_dim: int = 512,
    lengths: Any = None,
    page_table: Any = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
) -> str:
    """Which implementation `mla_decode_attention` would run for these arguments, and why the others would not.

    Takes the same arguments; arrays may be `jax.ShapeDtypeStruct`. Nothing is computed.
    """
    as_flag("return_residual", return_residual)
    known = dict(scale=scale, value_dim=value_dim, lengths=lengths, page_table=page_table)
    return explain_normalised(_normalise, implementation, query, cache, **known)


@with_automatic_axes
def _attend(query, cache, scale, value_dim, lengths, page_table, implementation):
    known = dict(scale=scale, value_dim=value_dim, lengths=lengths, page_table=page_table)
    return run(*_normalise(query, cache, **known), implementation)


def _normalise(query, cache, *, scale, value_dim=512, lengths=None, page_table=None):
    query = float_array("query", query, "[*B, T, N, H]")
    cache = float_array("cache", cache, "[*B, S, H]" if page_table is None else "[P, page, H]")
    if page_table is not None:
        _check_pages(query, cache, lengths)
        page_table = checked_table(page_table, query.shape[0])
    elif query.ndim < 3 or cache.shape != (*query.shape[:-3], *cache.shape[-2:-1], query.shape[-1]):
        raise ValueError(
            f"query.shape={query.shape} and cache.shape={cache.shape} must be [*B, T, N, H] and [*B, S, H], with the same *B"
            " and H: the cache has no dim of heads. Squeeze it out, and concatenate latent and rotary columns in both."
        )
    if query.dtype != cache.dtype:
        raise ValueError(
            f"query.dtype={query.dtype} and cache.dtype={cache.dtype} differ: nothing is converted silently. Convert one"
            " with `.astype`."
        )
    if lengths is not None:
        lengths = int_array("lengths", lengths)
        if lengths.shape != query.shape[:-3]:
            raise ValueError(
                f"lengths.shape={tuple(lengths.shape)} must be [*B] = {query.shape[:-3]}: how many positions of each cache"
                f" are filled. {broadcast_remedy(lengths.shape, query.shape[:-3], 'Pass one int for each batch entry.')}"
            )
    if not is_static_number(scale):
        raise TypeError(f"scale={scale!r} must be a number, known while tracing, such as 192**-0.5.")
    if not is_finite(scale, query.dtype):
        raise ValueError(
            f"scale={scale} must be finite in the dtype of logits, float32 (float64 for float64). Pass that of the attention"
            " before absorption."
        )
    if not is_static_int(value_dim) or not 1 <= value_dim <= cache.shape[-1]:
        raise ValueError(
            f"value_dim={value_dim!r} must be an int from 1 to H={cache.shape[-1]}: the values are the first columns of the"
            " cache."
        )
    keys, value_dim = cache[..., None, :], int(value_dim)
    if page_table is None:
        values = keys[..., :value_dim]
    else:
        keys, values = Paged(keys, page_table), Paged(keys, page_table, columns=value_dim)
    mask = masks.Causal(align="bottom_right") if query.shape[-3] != 1 else None
    problem, operands = normalise(query, keys, values, mask=mask, scale=scale, key_value_seq_lengths=lengths)
    return dataclasses.replace(problem, values_in_keys=True), operands


def _check_pages(query, pages, lengths):
    shapes = f"query.shape={tuple(query.shape)} and cache.shape={tuple(pages.shape)}"
    if query.ndim != 4 or pages.ndim != 3 or 0 in pages.shape or query.shape[-1] != pages.shape[-1]:
        raise ValueError(
            f"{shapes} must be [B, T, N, H] and, with page_table, pages [P, page, H], with the same H and no dim of size 0:"
            " pages have no dim of heads. Squeeze it out, and concatenate latent and rotary columns in both."
        )
    if lengths is None:
        raise ValueError(
            "lengths=None with page_table: a table does not say how many rows each sequence has. Pass them, int [B];"
            " jnp.full for one length of all."
        )
