"""A small vision transformer in Flax Linen, on Flax's own attention module with `pallas_fa` as its `attention_fn`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from pallas_fa.nn import attention_fn


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """What fixes a ViT's parameters, and how it computes."""

    layers: int
    width: int  # D
    heads: int  # N
    hidden: int
    patch: int  # pixels along a side
    classes: int = 10
    dropout: float = 0.0  # of the attention's probabilities, in training
    dtype: Any = jnp.float32  # of the computation; parameters are float32
    implementation: str | None = None  # of the attention, as in pallas_fa.dot_product_attention


SIZES = {
    "nano": ViTConfig(layers=1, width=32, heads=2, hidden=64, patch=2),
    "tiny": ViTConfig(layers=4, width=64, heads=4, hidden=128, patch=2),
}


class Block(nn.Module):
    """Attention, then an MLP, each after a norm and added to what it takes."""

    config: ViTConfig

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """[B,T,D] -> [B,T,D]."""
        c = self.config
        y = nn.LayerNorm(dtype=c.dtype, name="attention_norm")(x)
        x = x + nn.MultiHeadDotProductAttention(
            num_heads=c.heads,
            dropout_rate=c.dropout,
            broadcast_dropout=False,
            deterministic=not train,
            dtype=c.dtype,
            attention_fn=functools.partial(attention_fn, implementation=c.implementation),
            name="attention",
        )(y)
        y = nn.LayerNorm(dtype=c.dtype, name="mlp_norm")(x)
        y = nn.gelu(nn.Dense(c.hidden, dtype=c.dtype, name="up")(y))
        return x + nn.Dense(c.width, dtype=c.dtype, name="down")(y)


class ViT(nn.Module):
    """Patches -> tokens with a learned position -> blocks -> mean over tokens -> logits."""

    config: ViTConfig

    @nn.compact
    def __call__(self, images: jax.Array, train: bool = False) -> jax.Array:
        """images [B, height, width, channels] -> logits float32 [B, classes]; `train`: with dropout."""
        c = self.config
        side = (c.patch, c.patch)
        x = nn.Conv(c.width, side, strides=side, padding="VALID", dtype=c.dtype, name="patches")(images)
        x = x.reshape(x.shape[0], -1, c.width)  # [B,T,D]
        # Of the size of a bright patch's token: the many blank patches have nothing but their place to be told by.
        position = self.param("position", nn.initializers.normal(1.0), (x.shape[1], c.width))
        x = x + position.astype(c.dtype)
        for layer in range(c.layers):
            x = Block(c, name=f"block_{layer}")(x, train)
        x = nn.LayerNorm(dtype=c.dtype, name="norm")(x).mean(axis=1)  # [B,D]
        return nn.Dense(c.classes, dtype=jnp.float32, name="logits")(x)
