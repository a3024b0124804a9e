"""A GPT in Flax NNX: RoPE, RMSNorm, SwiGLU, grouped query heads, a tied embedding, key/value caches.

Shape letters are those of `pallas_fa.dot_product_attention`: B batch, T query length, S key length, N query heads,
K key/value heads, H head dim; D is the model's width and V its vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from models.attention import CausalAttention, Dropout, causal_attention
from pallas_fa.cache import KeyValueCache, PagedCache

type Cache = KeyValueCache | PagedCache  # of one layer
# (x [B,T,D], parameters of the first block, of the others) -> the same three, where the first block takes x
type Gather = Callable[[jax.Array, Any, Any], tuple[jax.Array, Any, Any]]


def first_and_rest(blocks: dict[Any, Any]) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """The parameters of the first block and of the others, which are gathered apart."""
    return {0: blocks[0]}, {layer: block for layer, block in blocks.items() if layer > 0}


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """What fixes a GPT's parameters, and how it computes. Parameters are float32 whatever `dtype` is."""

    layers: int
    width: int  # D
    heads: int  # N
    kv_heads: int  # K
    hidden: int  # inner width of the SwiGLU
    context: int  # T in training; RoPE itself knows no limit
    vocab: int = 256  # V: one token is one byte
    rope_base: float = 10_000.0
    dropout: float = 0.0  # of the attention's probabilities, in training
    sinks: bool = False  # learned attention sinks, one for each query head of a layer
    dtype: Any = jnp.float32
    implementation: str | None = None  # of the attention, as in pallas_fa.dot_product_attention
    attention: CausalAttention = causal_attention  # without a cache; says on which devices
    gather: Gather | None = None  # brings the parts together that devices keep of blocks' parameters

    def __post_init__(self):
        if self.width % self.heads or self.head_dim % 2:
            raise ValueError(
                f"width={self.width} with heads={self.heads}: RoPE needs an even head dim, so width must be an even "
                "multiple of heads; change one of the two."
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; each key head serves a whole "
                "number of query heads: choose a divisor of heads."
            )

    @property
    def head_dim(self) -> int:  # H
        return self.width // self.heads


# The shapes of gpt2-small and gpt2-medium are GPT-2's; the SwiGLU's three matrices have the parameters of its two.
SIZES = {
    "nano": GPTConfig(layers=2, width=32, heads=4, kv_heads=2, hidden=96, context=32),
    "tiny": GPTConfig(layers=3, width=128, heads=4, kv_heads=2, hidden=384, context=128),
    "small": GPTConfig(layers=6, width=384, heads=6, kv_heads=2, hidden=1024, context=512),
    "gpt2-small": GPTConfig(layers=12, width=768, heads=12, kv_heads=12, hidden=2048, context=1024),
    "gpt2-medium": GPTConfig(layers=24, width=1024, heads=16, kv_heads=16, hidden=2736, context=1024),
    "1b": GPTConfig(layers=16, width=2048, heads=16, kv_heads=8, hidden=8192, context=2048),
}


def rope(x: jax.Array, positions: jax.Array, base: float) -> jax.Array:
    """Rotates each pair (x[i], x[i + H/2]) by position * base**(-2i/H) (Su et al., 2021).

    x [B,T,N,H], positions [T] or [B,T].
    """
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [H/2]
    # Angles in float32: bfloat16 can't tell position 1000 from 1001.
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies  # [..., T, 1, H/2]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _linear(inputs: int, outputs: int, config: GPTConfig, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    init = nnx.initializers.variance_scaling(scale, "fan_in", "truncated_normal")
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, dtype=config.dtype, rngs=rngs)


class Attention(nnx.Module):
    """Causal self-attention with RoPE. With a cache, its queries also see what the cache holds."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = config
        self.query = _linear(config.width, config.heads * config.head_dim, config, rngs)
        self.key = _linear(config.width, config.kv_heads * config.head_dim, config, rngs)
        self.value = _linear(config.width, config.kv_heads * config.head_dim, config, rngs)
        # The residual stream sums 2 * layers such outputs; dividing the variance keeps its size (GPT-2).
        self.out = _linear(config.width, config.width, config, rngs, scale=0.5 / config.layers)
        self.sinks = nnx.Param(jnp.zeros(config.heads)) if config.sinks else None

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None = None,
        lengths: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """x [B,T,D], positions [T] or [B,T] -> ([B,T,D], the cache with x added).

        With a cache, `lengths`, int [B], says how many of the T are real; None: all.
        """
        c = self.config
        b, t, _ = x.shape
        query = rope(self.query(x).reshape(b, t, c.heads, c.head_dim), positions, c.rope_base)
        key = rope(self.key(x).reshape(b, t, c.kv_heads, c.head_dim), positions, c.rope_base)
        value = self.value(x).reshape(b, t, c.kv_heads, c.head_dim)
        sinks = None if self.sinks is None else self.sinks[...]
        if cache is None:
            out = c.attention(query, key, value, c.implementation, sinks, dropout)  # [B,T,N,H]
        else:
            cache = cache.append(key, value, lengths)
            out = cache.attend(query, lengths=lengths, sinks=sinks, implementation=c.implementation)
        return self.out(out.reshape(b, t, c.width)), cache


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer, 2020)."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.gate = _linear(config.width, config.hidden, config, rngs)
        self.up = _linear(config.width, config.hidden, config, rngs)
        self.down = _linear(config.hidden, config.width, config, rngs, scale=0.5 / config.layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    """Attention, then a SwiGLU, each after a norm and added to what it takes."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.attention = Attention(config, rngs)
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)
        self.mlp = SwiGLU(config, rngs)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        cache: Cache | None = None,
        lengths: jax.Array | None = None,
        dropout: Dropout | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        out, cache = self.attention(self.attention_norm(x), positions, cache, lengths, dropout)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), cache


class GPT(nnx.Module):
    """Embedding -> blocks -> norm -> logits by the embedding, transposed (Press and Wolf, arXiv 1608.05859)."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Embed(config.vocab, config.width, embedding_init=init, dtype=config.dtype, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, dtype=config.dtype, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        caches: Sequence[Cache] | None = None,
        positions: jax.Array | None = None,
        lengths: jax.Array | None = None,
        dropout_key: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Cache, ...] | None]:
        """tokens int [B,T] -> (logits float32 [B,T,V], the caches with these tokens added).

        Without caches the tokens stand at 0..T-1, or at `positions`, int [T], where they lie in the order that
        `config.attention` expects. With caches, one for each layer, they follow what is there; `lengths`, int [B], says how
        many of the T are real in each sequence, None that all are. Tokens for which there is no room are not kept: that
        there is room is the caller's to count. With `dropout_key`, a raw key, there is dropout, as in training; not with
        caches.
        """
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
            positions = positions if caches is None else caches[0].lengths[:, None] + positions
        x, blocks = self._gathered(self._embedded(tokens))
        added = []
        for layer, block in enumerate(blocks):
            dropout = None
            if self.config.dropout and dropout_key is not None:
                dropout = Dropout(self.config.dropout, jax.random.fold_in(dropout_key, layer))
            x, cache = block(x, positions, None if caches is None else caches[layer], lengths, dropout)
            added.append(cache)
        return self.embedding.attend(self.norm(x)).astype(jnp.float32), None if caches is None else tuple(added)

    def _gathered(self, x: jax.Array) -> tuple[jax.Array, list[Block]]:
        """(x, the blocks ready for use), where the first block takes x."""
        if self.config.gather is None:
            return x, [*self.blocks]
        graph, params = nnx.split([*self.blocks])
        x, first, rest = self.config.gather(x, *first_and_rest(nnx.to_pure_dict(params)))
        return x, nnx.merge(graph, first | rest)

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        """int [B,T] -> [B,T,D], by a matmul with one-hot rows.

        The gradient of a lookup adds up row by row, in no fixed order on a GPU, and slowly: with 256 tokens, most
        additions wait for others.
        """
        one_hot = jax.nn.one_hot(tokens, self.config.vocab, dtype=self.config.dtype)
        table = self.embedding.embedding[...].astype(self.config.dtype)
        return jnp.matmul(one_hot, table, precision=jax.lax.Precision.HIGHEST)  # the table's very numbers
