"""The task of `--task images`: the ViT on handwritten digits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import pallas_fa
from models.data import Digits
from models.mesh import ONE_DEVICE, Layout
from models.step import Batch, Params
from models.vit import SIZES, ViT, ViTConfig


def model_config(size: str, dtype: str, implementation: str | None, dropout: float = 0.0) -> ViTConfig:
    return dataclasses.replace(SIZES[size], dtype=jnp.dtype(dtype), implementation=implementation, dropout=dropout)


class Images(NamedTuple):
    """A batch."""

    images: jax.Array  # float32 [B,8,8,1]
    labels: jax.Array  # int32 [B]
    dropout_key: jax.Array | None = None  # a raw key; None without dropout


class ImageTask:
    """Classification. Losses are reported in nats."""

    name = "ViT on digits"
    unit = "nats"
    per_unit = 1.0
    items = "images"

    def __init__(self, config: ViTConfig, digits: Digits, batch: int, seed: int, layout: Layout = ONE_DEVICE):
        self.model, self.digits, self.seed, self.layout = ViT(config), digits, seed, layout
        self.batch_size = self.items_per_step = batch
        tokens = (digits.train_images.shape[1] // config.patch) ** 2
        self.attention_shape = (tokens, config.heads, config.heads, config.width // config.heads)  # T, N, K, H
        self.source = (
            f"scikit-learn's digits: {len(digits.train_labels)} to train on, {len(digits.validation_labels)} held out"
        )
        self._logits = jax.jit(self.logits)

    def data_digest(self) -> str:
        return "digits"  # which never change

    def init(self) -> Params:
        images = jnp.zeros((1, *self.digits.train_images.shape[1:]))
        return jax.jit(self.model.init)(jax.random.key(self.seed), images)["params"]

    def options(self, params: Params) -> dict[str, Any]:
        """XLA's options for a step with these parameters."""
        return self.layout.options(params, self.model.config.dtype)

    def attention(self, query: jax.Array, key: jax.Array, value: jax.Array, implementation: str | None) -> jax.Array:
        rate = self.model.config.dropout
        options: dict[str, Any] = {"dropout_rate": rate, "dropout_key": self._dropout_key(0)} if rate else {}
        attend = functools.partial(pallas_fa.dot_product_attention, implementation=implementation, **options)
        return cast(jax.Array, attend(query, key, value))

    def batch(self, step: int) -> Batch:
        batch = Images(*self.layout.place(self.digits.batch(self.seed, step, self.batch_size), "data"))
        rate = self.model.config.dropout
        return batch._replace(dropout_key=self.layout.place(self._dropout_key(step))) if rate else batch

    def _dropout_key(self, step: int) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.key(self.seed), step))

    def logits(self, params: Params, images: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """images [B,8,8,1] -> float32 [B,10]; with a key, as in training."""
        params = self.layout.gathered(params, self.model.config.dtype)
        rngs = {} if dropout_key is None else {"dropout": dropout_key}
        return cast(jax.Array, self.model.apply({"params": params}, images, bool(rngs), rngs=rngs))

    def loss(self, params: Params, batch: Images) -> jax.Array:
        """Mean cross-entropy in nats, float32 []."""
        logits = self.logits(params, batch.images, batch.dropout_key)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

    def validate(self, params: Params) -> dict[str, float]:
        logits = self._logits(params, self.digits.validation_images)
        labels = self.digits.validation_labels
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        accuracy = (np.asarray(logits).argmax(axis=1) == labels).mean()
        return {"validation_loss": float(losses.mean()), "validation_accuracy": float(accuracy)}
