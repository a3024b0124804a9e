"""`paged_attention`: attention to keys and values in pages."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import jax
import numpy as np
from jax.typing import ArrayLike

from pallas_fa.api import explain_normalised
from pallas_fa.arguments.arrays import float_array
from pallas_fa.arguments.keywords import Arguments, with_signature
from pallas_fa.arguments.shapes import check_dtypes
from pallas_fa.attention import attend
from pallas_fa.masks import Mask
from pallas_fa.operands.offsets import int_array
from pallas_fa.operands.pages import PAGE_LAYOUTS, Paged, PageLayout, checked_table
from pallas_fa.operands.pytree import as_flag, is_one_of
from pallas_fa.problem import normalise
from pallas_fa.sharding.explicit_axes import with_automatic_axes

_attend = with_automatic_axes(attend)
# What cannot be given: the value that says nothing, and why.
_REFUSED = {
    "key_value_seq_lengths": (None, "it is the argument lengths"),
    "layout": ("BTNH", "query and output are [B, T, N, head dim], and page_layout says how pages are laid out"),
    "forward_mode": (False, "keys and values in pages are for inference"),
    "dropout_rate": (0, "keys and values in pages are for inference"),
}


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    page_layout: PageLayout = "PSKH",
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> jax.Array: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    page_layout: PageLayout = "PSKH",
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[jax.Array, jax.Array]: ...


@with_signature
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    page_layout: PageLayout = "PSKH",
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    **arguments: Unpack[Arguments],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention to keys and values in pages: `pallas_fa.dot_product_attention` to the rows that a table finds.

    Row s of sequence b is row s % page of page `page_table[b, s // page]` (PagedAttention, Kwon et al., arXiv
    2309.06180). Sequences may share pages, and pages may lie in any order. For inference: only `reference` has gradients.

    Shapes: B sequences, T query length, N query heads, K key/value heads (N % K == 0), H head dim of query and key, Hv of
    value, P pages of `page` rows, S = page * pages per sequence.

    Args:
      query: [B, T, N, H], any float dtype.
      key_pages: [P, page, K, H], the same dtype, or one of 8 bits.
      value_pages: [P, page, K, Hv], the dtype of key_pages.
      page_table: int [B, pages per sequence]. Entries past a sequence's length are never used: they may be -1, or anything.
        An entry before it must be in [0, P); what stands for another one is the nearest page, page 0 or P - 1.
      lengths: int [B], how many rows of each sequence are there; clipped to [0, S]. They bound what is read.
      bias: as in `dot_product_attention`, as are all arguments that are not listed; s counts the rows of a sequence.
      mask: likewise. `masks.Causal(align="bottom_right")` lets the last query see the last row. As there, masks and scores
        count queries from position 0 unless their `align` is "bottom_right"; `PagedCache.attend` sets it.
      page_layout: "PSKH", or "KPSH" where pages are [K, P, page, H] and [K, P, page, Hv], as in JAX's TPU kernel
        `paged_attention`, which does not scale logits: queries made for it take `scale=1.0`. Neither is copied.
      implementation: as in `dot_product_attention`. 'xla' gathers the pages of one chunk of keys at a time, 'reference' all.
      key_value_seq_lengths: refused, as are `layout`, `forward_mode` and dropout.
      return_residual: also return the log-sum-exp.

    Returns:
      out [B, T, N, Hv] in the dtype of `query`; with `return_residual` (out, lse), lse [B, T, N] float32.

    Raises:
      ValueError, TypeError: an argument is wrong; raised before anything is computed.
      NotImplementedError: the implementation cannot do the call, or gradients are asked for of another than `reference`.
    """
    return_residual = as_flag("return_residual", return_residual)
    key, value, given = _in_pages(query, key_pages, value_pages, page_table, lengths, page_layout, arguments)
    out, lse = _attend(query, key, value, bias, mask, implementation=implementation, **given)
    return (out, lse) if return_residual else out


@with_signature
def explain(
    query: Any,
    key_pages: Any,
    value_pages: Any,
    page_table: Any,
    lengths: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    page_layout: PageLayout = "PSKH",
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    **arguments: Unpack[Arguments],
) -> str:
    """Which implementation `paged_attention` would run for these arguments, and why the others would not.

    Takes the same arguments; arrays may be `jax.ShapeDtypeStruct`. Nothing is computed.
    """
    as_flag("return_residual", return_residual)
    pages = query, key_pages, value_pages, page_table, lengths, bias, mask
    return explain_normalised(_normalise, implementation, *pages, page_layout=page_layout, **arguments)


def _normalise(query, key_pages, value_pages, page_table, lengths, bias, mask, *, page_layout, **arguments):
    key, value, given = _in_pages(query, key_pages, value_pages, page_table, lengths, page_layout, arguments)
    return normalise(query, key, value, bias, mask, **given)


def _in_pages(query, key_pages, value_pages, page_table, lengths, page_layout, arguments):
    """Returns key, value, and the other arguments of attention to them."""
    for name, (nothing, why) in _REFUSED.items():
        given = arguments.get(name)
        is_said = nothing is None or isinstance(given, (jax.Array, np.ndarray)) or given != nothing
        if given is not None and is_said:
            raise ValueError(f"{name}={given!r} cannot be given here: {why}. Leave it out.")
    key, value = in_pages(query, key_pages, value_pages, page_table, page_layout)
    lengths = int_array("lengths", lengths, "Pass how many rows each sequence has; jnp.full for one length of all.")
    if tuple(lengths.shape) != key.shape[:1]:
        raise ValueError(
            f"lengths.shape={tuple(lengths.shape)} must be [B]={key.shape[:1]}: how many rows each sequence has. Use"
            " jnp.full for one length of all."
        )
    return key, value, {**arguments, "key_value_seq_lengths": lengths}


def in_pages(query: Any, key_pages: Any, value_pages: Any, page_table: Any, layout: Any) -> tuple[Paged, Paged]:
    """Returns keys and values in pages, checked; arguments as in `paged_attention`."""
    if not is_one_of(layout, PAGE_LAYOUTS):
        raise ValueError(
            f"page_layout={layout!r} is not one of {', '.join(map(repr, PAGE_LAYOUTS))}: pages [P, page, K, H], or"
            " [K, P, page, H]. Transpose other arrays."
        )
    dims = "[P, page, K, head dim]" if layout == "PSKH" else "[K, P, page, head dim]"
    query = float_array("query", query, "[B, T, N, H]")
    key_pages, value_pages = float_array("key_pages", key_pages, dims), float_array("value_pages", value_pages, dims)
    for name, x in (("key_pages", key_pages), ("value_pages", value_pages)):
        if x.ndim != 4 or 0 in x.shape[:3]:
            raise ValueError(f"{name}.shape={tuple(x.shape)} must be {dims}, with no dim of size 0. Reshape it.")
    if key_pages.shape[:3] != value_pages.shape[:3]:
        raise ValueError(
            f"key_pages.shape={tuple(key_pages.shape)} and value_pages.shape={tuple(value_pages.shape)} must agree but for"
            f" the head dim: {dims}. Give each key one value."
        )
    shape = tuple(query.shape)
    if query.ndim != 4:
        one_query = "If it is [B, N, H], one query of each sequence, pass query[:, None]."
        remedy = one_query if query.ndim == 3 else "Reshape it: pages belong to sequences of one batch dim."
        raise ValueError(f"query.shape={shape} must be [B, T, N, H]. {remedy}")
    if shape[-1] != key_pages.shape[-1]:
        raise ValueError(
            f"query.shape={shape} and key_pages.shape={tuple(key_pages.shape)} have different head dims H. Project them to"
            " one head dim."
        )
    N, K = shape[2], key_pages.shape[2 if layout == "PSKH" else 0]
    if N % K:
        raise ValueError(
            f"query.shape={shape} has N={N} heads and key_pages.shape={tuple(key_pages.shape)}, {dims}, has K={K}: N must be"
            " a multiple of K. If heads and rows are swapped, pass another page_layout."
        )
    check_dtypes(query=query, key_pages=key_pages, value_pages=value_pages)
    table = checked_table(page_table, shape[0])
    return Paged(key_pages, table, layout), Paged(value_pages, table, layout)
