"""`MultiHeadDotProductAttention` and its alias `MultiHeadAttention`: drop-in replacements for those of `flax.linen`.

`__call__` does not reuse Flax's, whose projections give keys as many heads as queries.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from pallas_fa.nn.attention_fn import attention_fn as pallas_attention_fn
from pallas_fa.nn.module_inputs import module_inputs
from pallas_fa.nn.module_mask import module_mask
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import as_count, as_flag


class MultiHeadDotProductAttention(nn.MultiHeadDotProductAttention):
    """Flax's module on `pallas_fa`, with the same fields, parameters and cache: checkpoints load into either.

    Automatic names are the same, too (`MultiHeadDotProductAttention_0`), since linen derives them from the class name.
    Additional and changed fields:

    Attributes:
      attention_fn: `pallas_fa.nn.attention_fn`, or a function that calls it, for example after a rotary embedding.
      num_kv_heads: key/value heads K, a divisor of num_heads; None for num_heads. With fewer, the key and value kernels
        are [D, K, H], as in flax.nnx.MultiHeadAttention.
      is_causal: query t attends to keys s <= t. With a cache (`decode`), attention is always causal.
      local_window_size: (left, right), or an int for both: query t attends to t - left <= s <= t + right. None in a
        pair is no bound. With a cache, t is the position in the cache.
      logits_soft_cap: cap > 0; logits become cap * tanh(logits / cap).
      use_sinks: whether there is a parameter `sinks` [N], the attention sinks of `pallas_fa.dot_product_attention`.
      sinks_init: its initializer.
      implementation: as in `pallas_fa.dot_product_attention`.
    """

    attention_fn: Callable[..., Any] = pallas_attention_fn
    num_kv_heads: int | None = None
    is_causal: bool = False
    local_window_size: int | tuple[int | None, int | None] | None = None
    logits_soft_cap: float | None = None
    use_sinks: bool = False
    sinks_init: Callable[..., Any] = nn.initializers.zeros
    implementation: str | tuple[str, ...] | None = None

    @nn.compact
    def __call__(
        self,
        inputs_q: Any,
        inputs_k: Any = None,
        inputs_v: Any = None,
        *,
        inputs_kv: Any = None,
        mask: Any = None,
        deterministic: bool | None = None,
        dropout_rng: Any = None,
        sow_weights: bool = False,
        query_segment_ids: Any = None,
        key_value_segment_ids: Any = None,
    ) -> jax.Array:
        """Projects [*B, T, features] and [*B, S, features], attends, and projects back: [*B, T, out_features].

        Arguments that are not listed are those of Flax's module.

        Args:
          mask: as in Flax, of any dtype (nonzero: may attend), or a `pallas_fa.masks.Mask`.
          query_segment_ids: int [*B, T]; a query attends only to keys of the same id. Give both ids or neither.
          key_value_segment_ids: int [*B, S]. With a cache, S is its length.
        """
        inputs_k, inputs_v = _key_value_inputs(inputs_q, inputs_k, inputs_v, inputs_kv)
        inputs_q, inputs_k, inputs_v = module_inputs(inputs_q=inputs_q, inputs_k=inputs_k, inputs_v=inputs_v)
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)
        cache_index = None
        if self.decode:
            key, value, cache_index = self._cached(query, key, value)
        mask = module_mask(
            mask,
            Dims(query.shape[:-3], query.shape[-3], key.shape[-3], self.num_heads),
            # Later positions of the cache hold zeros.
            is_causal=as_flag("is_causal", self.is_causal) or cache_index is not None,
            local_window_size=self.local_window_size,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            cache_index=cache_index,
        )
        if self.dropout_rate > 0:  # `deterministic` is required only then, as in Flax
            deterministic = nn.merge_param("deterministic", self.deterministic, deterministic)
            if not deterministic and dropout_rng is None:
                dropout_rng = self.make_rng("dropout")
        else:
            deterministic = True
        use_sinks = as_flag("use_sinks", self.use_sinks)
        sinks = self.param("sinks", self.sinks_init, (self.num_heads,), self.param_dtype) if use_sinks else None
        x = self._attend(
            query, key, value, sow_weights, mask=mask, dropout_rng=dropout_rng, deterministic=deterministic, sinks=sinks
        )
        return nn.DenseGeneral(
            features=self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )(x)

    @nn.nowrap
    def _project(self, inputs_q, inputs_k, inputs_v):
        """Returns query [*B, T, N, H], key and value [*B, S, K, H]."""
        features = self.qkv_features or inputs_q.shape[-1]
        as_many = "Use None for as many as query heads."
        kv_heads = self.num_heads if self.num_kv_heads is None else as_count("num_kv_heads", self.num_kv_heads, as_many)
        if self.num_heads < 1 or features % self.num_heads:
            raise ValueError(
                f"qkv_features={features} must be a multiple of num_heads={self.num_heads}. Change one of them."
            )
        if self.num_heads % kv_heads:
            raise ValueError(f"num_kv_heads={kv_heads} must divide num_heads={self.num_heads}. {as_many}")
        head_dim = features // self.num_heads
        dense = functools.partial(
            nn.DenseGeneral,
            axis=-1,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            use_bias=self.use_bias,
            precision=self.precision,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )
        query = dense(features=(self.num_heads, head_dim), name="query")(inputs_q)
        key = dense(features=(kv_heads, head_dim), name="key")(inputs_k)
        value = dense(features=(kv_heads, head_dim), name="value")(inputs_v)
        if self.normalize_qk:
            norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=self.dtype, param_dtype=self.param_dtype)
            query, key = norm(name="query_ln")(query), norm(name="key_ln")(key)
        return query, key, value

    @nn.nowrap
    def _cached(self, query, key, value):
        """Adds one position to the cache; returns all its keys and values, and the query's position (None in `init`)."""
        is_initialized = self.has_variable("cache", "cached_key")
        cached_key = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        cached_value = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        cache_index = self.variable("cache", "cache_index", lambda: jnp.array(0, dtype=jnp.int32))
        if not is_initialized:
            return key, value, None
        *batch, _, kv_heads, head_dim = cached_key.value.shape
        if query.shape[:-2] != (*batch, 1) or key.shape != (*batch, 1, kv_heads, head_dim):
            raise ValueError(
                f"query.shape={query.shape}, key.shape={key.shape}, but decode=True takes one position at a time, for a"
                f" cache of shape {cached_key.value.shape}. Pass inputs of shape {(*batch, 1, 'features')}, or make a"
                " cache for other batch dims with `init`."
            )
        index = cache_index.value
        cached_key.value = lax.dynamic_update_slice_in_dim(cached_key.value, key, index, axis=-3)
        cached_value.value = lax.dynamic_update_slice_in_dim(cached_value.value, value, index, axis=-3)
        cache_index.value = index + 1
        return cached_key.value, cached_value.value, index

    @nn.nowrap
    def _attend(self, query, key, value, sow_weights, sinks, **kwargs):
        """Calls `attention_fn` with all keywords, where Flax silently drops those that its signature does not name."""
        for name in ("qk_attn_weights_einsum", "attn_weights_value_einsum"):
            make = getattr(self, f"{name}_cls")
            kwargs[name] = make() if make else None
        options = {"logits_soft_cap": self.logits_soft_cap, "sinks": sinks, "implementation": self.implementation}
        return self.attention_fn(
            query,
            key,
            value,
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            dtype=self.dtype,
            precision=self.precision,
            force_fp32_for_softmax=self.force_fp32_for_softmax,
            module=self if sow_weights else None,
            **kwargs,
            **{name: x for name, x in options.items() if x is not None},
        )


class MultiHeadAttention(MultiHeadDotProductAttention):
    """`MultiHeadDotProductAttention` under Flax's other name; automatic names are `MultiHeadAttention_0`."""


def _key_value_inputs(inputs_q, inputs_k, inputs_v, inputs_kv):
    """Returns the inputs of the key and value projections, with Flax's defaults."""
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError("inputs_kv is given beside inputs_k or inputs_v. Pass inputs_k and inputs_v only.")
        warnings.warn("inputs_kv is deprecated in Flax. Use inputs_k and inputs_v.", DeprecationWarning, stacklevel=2)
        return inputs_kv, inputs_kv
    if inputs_k is None and inputs_v is not None:
        raise ValueError("inputs_v is given without inputs_k. To have both be the same array, pass it as inputs_k.")
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v
