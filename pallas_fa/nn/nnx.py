"""`MultiHeadAttention`: a drop-in replacement for `flax.nnx.MultiHeadAttention`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from pallas_fa.nn.attention_fn import attention_fn as pallas_attention_fn
from pallas_fa.nn.module_inputs import module_inputs
from pallas_fa.nn.module_mask import module_mask
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import as_flag


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Flax's module on `pallas_fa`, with the same arguments, parameters and cache: checkpoints load into either.

    Grouped key/value heads are Flax's argument `num_kv_heads`. Additional and changed arguments:

    Args:
      is_causal: default of the call's `is_causal`. With a cache (`decode`), attention is always causal.
      local_window_size: (left, right), or an int for both: query t attends to t - left <= s <= t + right. None in a
        pair is no bound. With a cache, t is the position in the cache.
      logits_soft_cap: cap > 0; logits become cap * tanh(logits / cap).
      use_sinks: whether there is a parameter `sinks` [N], the attention sinks of `pallas_fa.dot_product_attention`.
      sinks_init: its initializer.
      implementation: as in `pallas_fa.dot_product_attention`.
      attention_fn: `pallas_fa.nn.attention_fn`, or a function that calls it, for example after a rotary embedding.
    """

    def __init__(
        self,
        *args: Any,
        is_causal: bool = False,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        use_sinks: bool = False,
        sinks_init: Callable[..., Any] = nnx.initializers.zeros,
        implementation: str | tuple[str, ...] | None = None,
        attention_fn: Callable[..., Any] = pallas_attention_fn,
        rngs: nnx.Rngs,
        **kwargs: Any,
    ) -> None:
        self.is_causal = as_flag("is_causal", is_causal)
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.implementation = implementation
        super().__init__(*args, attention_fn=attention_fn, rngs=rngs, **kwargs)
        # Drawn last, so that the other parameters are those of Flax's module.
        draw = lambda: nnx.Param(sinks_init(rngs.params(), (self.num_heads,), self.param_dtype))
        self.sinks = draw() if as_flag("use_sinks", use_sinks) else None

    @property
    def attention_fn(self) -> Callable[..., Any]:
        """The `attention_fn` passed to the constructor, with this module's soft cap, sinks and implementation bound."""
        sinks = None if self.sinks is None else self.sinks[...]
        options = {"logits_soft_cap": self.logits_soft_cap, "sinks": sinks, "implementation": self.implementation}
        return functools.partial(self._attention_fn, **{k: v for k, v in options.items() if v is not None})

    @attention_fn.setter
    def attention_fn(self, fn: Callable[..., Any]) -> None:
        # Stored without the options: partials of one function never compare equal, so storing them would recompile jitted
        # functions of the module.
        self._attention_fn = fn

    def __call__(
        self,
        inputs_q: Any,
        inputs_k: Any = None,
        inputs_v: Any = None,
        *,
        mask: Any = None,
        is_causal: bool | None = None,
        decode: bool | None = None,
        query_segment_ids: Any = None,
        key_value_segment_ids: Any = None,
        **kwargs: Any,
    ) -> jax.Array:
        """Projects [*B, T, features] and [*B, S, features], attends, and projects back: [*B, T, out_features].

        Arguments that are not listed are those of Flax's module.

        Args:
          mask: as in Flax, of any dtype (nonzero: may attend), or a `pallas_fa.masks.Mask`.
          is_causal: None for the default of the module.
          query_segment_ids: int [*B, T]; a query attends only to keys of the same id. Give both ids or neither.
          key_value_segment_ids: int [*B, S]. With a cache, S is its length.
        """
        inputs_q, inputs_k, inputs_v = module_inputs(inputs_q=inputs_q, inputs_k=inputs_k, inputs_v=inputs_v)
        is_causal = self.is_causal if is_causal is None else as_flag("is_causal", is_causal)
        decode = self.decode if decode is None else decode
        S, cache_index = (inputs_q if inputs_k is None else inputs_k).shape[-2], None
        if decode and self.cached_key is not None and self.cache_index is not None:
            S, cache_index = self.cached_key.shape[-3], self.cache_index[...]
        mask = module_mask(
            mask,
            Dims(inputs_q.shape[:-2], inputs_q.shape[-2], S, self.num_heads),
            local_window_size=self.local_window_size,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            cache_index=cache_index,
        )
        return super().__call__(inputs_q, inputs_k, inputs_v, mask=mask, is_causal=is_causal, decode=decode, **kwargs)
