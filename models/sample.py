"""How the next token is drawn from a model's logits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sampling:
    """First the logits are divided by `temperature`, then all but the `top_k` most probable tokens are left out, then those
    that come after the most probable ones which together have the probability `top_p` (Holtzman et al., 2020).

    At a temperature of 0 the most probable token is taken: greedy. None leaves out nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def draw(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """logits float32 [B,V], a key for each sequence [B] -> int32 [B]."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            probabilities = jax.nn.softmax(ordered, axis=-1)
            before = jnp.cumsum(probabilities, axis=-1) - probabilities  # the first token's is 0: it always stays
            least = jnp.where(before < self.top_p, ordered, jnp.inf).min(axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
