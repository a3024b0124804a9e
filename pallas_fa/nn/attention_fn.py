"""`attention_fn`: one function for the `attention_fn=` of Flax linen and of Flax nnx.

The signature names every keyword that linen or nnx passes: nnx passes all of its keywords, and linen silently drops those
that the signature does not name.
"""

import functools
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from pallas_fa.api import dot_product_attention
from pallas_fa.arguments.arrays import array
from pallas_fa.arguments.dropout import check_dropout_rate
from pallas_fa.arguments.keywords import Arguments, with_signature
from pallas_fa.arguments.masks import mask_array
from pallas_fa.masks import Mask
from pallas_fa.nn.visible_keys import bounded
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import as_flag, is_one_of, names_float
from pallas_fa.scores import Score


@functools.partial(with_signature, broadcast_dropout=True)
def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    dropout_rng: Any = None,
    deterministic: bool = False,
    dtype: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    input_positions: Any = None,
    implementation: str | Sequence[str] | None = None,
    **arguments: Unpack[Arguments],
) -> jax.Array:
    """Computes attention for the `attention_fn` of Flax's attention modules, in linen and nnx.

    To set other arguments, bind them: `functools.partial(attention_fn, logits_soft_cap=50.0)`. Arguments that the module
    passes (`mask`, and in nnx `is_causal`) override those of the partial.

    Shapes: *B batch (any number of dims, none included), T and S query and key length, N query heads, K key/value heads
    (N % K == 0), H head dim of query and key, Hv head dim of value. Arguments that are not listed are those of
    `pallas_fa.dot_product_attention`.

    Args:
      query: [*B, T, N, H].
      key: [*B, S, K, H].
      value: [*B, S, K, Hv].
      bias: float, broadcastable to [*B, N, T, S], added to the scaled logits.
      mask: broadcastable to [*B, N, T, S], bool or a number (Flax's mask makers give float32): a query may attend where
        it is not 0; or a `pallas_fa.masks.Mask`. Of a single query, as in decoding from Flax's cache, keys before the
        first and past the last that the array allows are not read.
      broadcast_dropout: whether all batch entries and heads share their draws, as in Flax.
      dropout_rng: JAX PRNG key; required if `dropout_rate > 0 and not deterministic`. `dropout_key` is another name for it.
      dropout_rate: in [0, 1), the share of weights that are set to 0. The draws differ from those of Flax for the same key.
      deterministic: no dropout. (For gradients bitwise equal from run to run: `deterministic_gradients`.)
      dtype: dtype to which query, key and value are converted; None for the one they promote to, as in Flax.
      precision: of the matmuls.
      module: refused if not None (`sow_weights=True`): the weights are never in memory.
      force_fp32_for_softmax: no effect, since the softmax is always in float32 (float64 for float64). (Flax's output
        becomes float32 with it; this one keeps its dtype.)
      qk_attn_weights_einsum: refused if not None.
      attn_weights_value_einsum: refused if not None.
      is_causal: query t attends to keys s <= t.
      layout: refused unless "BTNH", which is Flax's.
      input_positions: refused if not None: this function applies no rotary embedding.
      local_window_size: refused, like `is_causal`, for a single query with several keys. Such a call decodes from a cache,
        and only the module knows the query's position.
      score: what counts positions from the start is refused there, too, in a score and in a `Mask`. With
        `align="bottom_right"` a query stands at the last key that the array `mask` allows, so that a bound
        `score=Alibi(slopes, align="bottom_right")` serves training and decoding alike.

    Returns:
      [*B, T, N, Hv] in the promoted dtype. A query with nothing to attend to gives 0, where Flax gives the mean of all
      values.

    Raises:
      ValueError, TypeError: an argument is wrong.
      NotImplementedError: Flax's function supports an argument and this one does not.
    """
    del force_fp32_for_softmax
    layout = arguments.get("layout")
    if not is_one_of(layout, (None, "BTNH")):
        raise ValueError(
            f"{layout=}: Flax's modules pass [*B, T, N, H]. Leave it out, or call pallas_fa.dot_product_attention."
        )
    _refuse(module, qk_attn_weights_einsum, attn_weights_value_einsum, input_positions)
    query, key, value = _promoted(query, key, value, dtype)
    if mask is not None and not isinstance(mask, Mask):
        mask = jnp.asarray(mask_array(mask, "bool or number")).astype(jnp.bool_)  # nonzero is True, as in Flax
    if min(query.ndim, key.ndim) >= 3 and query.shape[-3] == 1 < key.shape[-3]:  # with fewer dims, `normalise` says so
        dims = Dims(query.shape[:-3], 1, key.shape[-3], query.shape[-2])
        refuse_single_query(1, dims.S, arguments.get("is_causal"), arguments.get("local_window_size"))
        for name, rule in (("mask", mask), ("score", arguments.get("score"))):
            _refuse_counting_from_start(name, rule, dims)
        mask = bounded(mask, dims) if isinstance(mask, jax.Array) else mask
    _set_dropout(arguments, dropout_rng, deterministic)
    return dot_product_attention(query, key, value, bias, mask, implementation=implementation, **arguments)


def _set_dropout(arguments: Arguments, rng: Any, deterministic: bool) -> None:
    """Brings the arguments of dropout to those of `dot_product_attention`."""
    rate, key = arguments.get("dropout_rate"), arguments.get("dropout_key")
    rate = 0.0 if rate is None else check_dropout_rate(rate)
    if as_flag("deterministic", deterministic) or rate == 0:
        arguments["dropout_rate"] = 0.0
        return
    if rng is not None and key is not None:
        raise ValueError("dropout_rng and dropout_key are both given, and are two names for one key. Leave one out.")
    if rng is None and key is None:
        raise ValueError(
            f"dropout_rng=None, but dropout is active ({rate=}, deterministic=False). Pass a key:"
            " `rngs={'dropout': key}` in linen's apply, `rngs=` in nnx; or switch dropout off with deterministic=True."
        )
    arguments["dropout_key"] = key if rng is None else rng
    broadcast = arguments.get("broadcast_dropout")
    arguments["broadcast_dropout"] = True if broadcast is None else broadcast


def refuse_single_query(T: int, S: int, is_causal: bool | None, local_window_size: Any) -> None:
    """Raises ValueError if `is_causal` or a window would take a query that decodes from a cache for position 0.

    Args:
      T: query length.
      S: key length.
      is_causal: as in `attention_fn`.
      local_window_size: as in `attention_fn`.
    """
    named = "is_causal=True" if is_causal else f"{local_window_size=}"
    if T == 1 < S and (is_causal or local_window_size is not None):
        raise ValueError(
            f"{named} counts positions from the start, so that one query with {S} keys would be taken for position 0,"
            " which it is not in a decode cache. Use the modules of pallas_fa.nn.linen and pallas_fa.nn.nnx, which know"
            " its position; or leave it out (the mask that Flax makes for its cache is causal), or pass a mask."
        )


def _refuse_counting_from_start(name: str, rule: Any, dims: Dims) -> None:
    """Raises ValueError if a mask or score would take the single query of a decoding step for position 0."""
    kind = rule.counted_from_start(dims) if isinstance(rule, (Mask, Score)) else None
    if kind is not None:
        raise ValueError(
            f"{name} holds a {kind} that counts positions from the start, so that one query with {dims.S} keys would be"
            " taken for position 0, which it is not in a decode cache. Pass align='bottom_right' to it, in training too:"
            " then the last query stands at the last key, in a cache at the last one that its mask allows. (In place of a"
            " BlockMask pass its mask.)"
        )


def _refuse(module, qk_attn_weights_einsum, attn_weights_value_einsum, input_positions):
    if module is not None:
        raise NotImplementedError(
            f"module is a {type(module).__name__}: sow_weights=True stores the attention weights, but these are never"
            " in memory here. Use sow_weights=False; to look at weights, run the same parameters with Flax's own"
            " attention_fn, flax.linen.dot_product_attention or flax.nnx.dot_product_attention."
        )
    for name, einsum in (
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if einsum is not None:
            raise NotImplementedError(
                f"{name}={einsum!r}: the matmuls are fused with the softmax and cannot be replaced. Leave"
                f" {name}_cls=None, or use Flax's own attention_fn, flax.linen.dot_product_attention."
            )
    if input_positions is not None:
        raise NotImplementedError(
            f"input_positions of shape {jnp.shape(input_positions)} would have no effect: attention_fn rotates nothing."
            " Use an attention_fn of your own, fn(query, key, value, *, input_positions=None, **kwargs), that applies"
            " flax.nnx.RoPE to query and key and then calls pallas_fa.nn.attention_fn(query, key, value, **kwargs)."
        )


def _promoted(query, key, value, dtype):
    """Converts to `dtype`, or to the float type that the three promote to, as flax.linen.dtypes.promote_dtype does."""
    what, named = "a float array [*B, length, heads, head dim]", {"query": query, "key": key, "value": value}
    query, key, value = (array(name, x, what, "Pass an array of JAX or NumPy.") for name, x in named.items())
    if dtype is not None and not names_float(dtype):
        raise TypeError(
            f"dtype={dtype!r} must be a float dtype, such as jnp.bfloat16. Leave it out for the one that query, key and"
            " value promote to."
        )
    if dtype is None:
        dtype = jnp.result_type(query, key, value)
        dtype = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.promote_types(jnp.float32, dtype)
    return tuple(jnp.asarray(x, dtype) for x in (query, key, value))
