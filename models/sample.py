"""How the next token is drawn from a model's logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """First the logits are divided by `temperature`, then all but the `top_k` most probable tokens are left out, then those
    that come after the fewest most probable ones which together have at least the probability `top_p` (Holtzman et al.,
    2020). Of tokens that are as probable as each other, those with lower numbers come first.

    At a temperature of 0 the most probable token is taken: greedy. None leaves out nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def draw(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """logits float32 [B,V], a key for each sequence [B] -> int32 [B]."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
        # The largest becomes 0, so that the smallest temperature gives -inf at worst.
        logits = (logits - logits.max(axis=-1, keepdims=True)) / self.temperature
        if self.top_k is not None or self.top_p is not None:
            ordered = jnp.take_along_axis(logits, order, axis=-1)
            taken = jnp.arange(logits.shape[-1]) < (logits.shape[-1] if self.top_k is None else self.top_k)
            ordered = jnp.where(taken, ordered, -jnp.inf)
            if self.top_p is not None and self.top_p < 1:
                reached = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1)
                before = jnp.pad(reached[:, :-1], ((0, 0), (1, 0)))  # the first token's is 0: it always stays
                ordered = jnp.where(before < self.top_p, ordered, -jnp.inf)
            logits = jnp.take_along_axis(ordered, jnp.argsort(order, axis=-1), axis=-1)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
