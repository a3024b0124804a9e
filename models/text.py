"""The task of `--task text`: the GPT as a language model of bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from models.attention import Dropout
from models.baseline import OrderTwo
from models.data import Corpus
from models.gpt import GPT, SIZES, GPTConfig, first_and_rest
from models.mesh import ONE_DEVICE, Layout
from models.step import Batch, Params


def model_config(
    size: str, dtype: str, implementation: str | None, context: int, sinks: bool = False, dropout: float = 0.0
) -> GPTConfig:
    fields = {"implementation": implementation, "sinks": sinks, "dropout": dropout}
    return dataclasses.replace(SIZES[size], context=context, dtype=jnp.dtype(dtype), **fields)


class Sequences(NamedTuple):
    """A batch: bytes and those that follow them, in the order in which the layout places a sequence."""

    tokens: jax.Array  # uint8 [B,T]
    targets: jax.Array  # uint8 [B,T]
    positions: jax.Array  # int32 [T], where in the sequence they stand
    dropout_key: jax.Array | None = None  # a raw key; None without dropout


class TextTask:
    """Next-byte prediction on a corpus. Losses are reported in bits per byte."""

    name = "GPT on text"
    unit = "bits per byte"
    per_unit = math.log(2)  # nats in one unit
    items = "tokens"

    def __init__(
        self,
        config: GPTConfig,
        corpus: Corpus,
        batch: int,
        seed: int,
        validation_bytes: int,
        layout: Layout = ONE_DEVICE,
    ):
        if layout.mesh is not None:  # on one device, the config's own attention stays
            config = dataclasses.replace(config, attention=layout.attention, gather=layout.gather)
        self.config, self.corpus, self.seed, self.layout = config, corpus, seed, layout
        self.batch_size = batch
        self.items_per_step = batch * config.context
        self.attention_shape = (config.context, config.heads, config.kv_heads, config.head_dim)  # T, N, K, H
        self.source = f"{corpus.files} file{'s' * (corpus.files != 1)} of {corpus.source}"
        self.graph, _ = nnx.split(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))))
        self.validation_bytes = validation_bytes
        self._sum_of_losses = jax.jit(self._sum_of_losses_of_first)

    def data_digest(self) -> str:
        """Names the data, so that a resumed run can tell whether they have changed."""
        return self.corpus.digest()

    def init(self) -> Params:
        """The parameters at step 0, as a nested dict."""

        @jax.jit
        def init(key: jax.Array) -> Params:
            return nnx.to_pure_dict(nnx.state(GPT(self.config, nnx.Rngs(key))))

        return init(jax.random.key(self.seed))

    def options(self, params: Params) -> dict[str, Any]:
        """XLA's options for a step with these parameters."""
        _, rest = first_and_rest(params["blocks"])
        return self.layout.options(rest, self.config.dtype)

    def attention(self, query: jax.Array, key: jax.Array, value: jax.Array, implementation: str | None) -> jax.Array:
        sinks = jnp.zeros(query.shape[2]) if self.config.sinks else None
        dropout = Dropout(self.config.dropout, self._dropout_key(0)) if self.config.dropout else None
        return self.config.attention(query, key, value, implementation, sinks, dropout)

    def batch(self, step: int) -> Batch:
        placed = self._placed(self.corpus.batch(self.seed, step, self.batch_size, self.config.context))
        return (
            placed._replace(dropout_key=self.layout.place(self._dropout_key(step))) if self.config.dropout else placed
        )

    def _dropout_key(self, step: int) -> jax.Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.key(self.seed), step))

    def _placed(self, windows: np.ndarray) -> Sequences:
        """windows: uint8 [B,T+1]."""
        positions = self.layout.positions(self.config.context)
        pair = windows[:, positions], windows[:, positions + 1]
        tokens, targets = self.layout.place(pair, "data", "context")
        return Sequences(tokens, targets, self.layout.place(positions, "context"))

    def loss(self, params: Params, batch: Sequences) -> jax.Array:
        """Mean cross-entropy in nats, float32 []."""
        return self._losses(params, batch).mean()

    def _losses(self, params: Params, batch: Sequences) -> jax.Array:
        model = nnx.merge(self.graph, self.layout.in_parts(params, self.config.dtype))
        tokens = batch.tokens.astype(jnp.int32)
        logits, _ = model(tokens, positions=batch.positions, dropout_key=batch.dropout_key)  # [B,T,V]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets.astype(jnp.int32))  # [B,T]

    def _sum_of_losses_of_first(self, params: Params, batch: Sequences, count: jax.Array) -> jax.Array:
        losses = self._losses(params, batch).sum(axis=1)  # [B]
        return jnp.where(jnp.arange(len(losses)) < count, losses, 0.0).sum()

    def validate(self, params: Params) -> dict[str, float]:
        windows = self.corpus.validation_windows(self.config.context, self.validation_bytes)
        total = 0.0
        for start in range(0, len(windows), self.batch_size):
            part = windows[start : start + self.batch_size]
            padded = np.zeros((self.batch_size, windows.shape[1]), np.uint8)  # one shape, so one compilation
            padded[: len(part)] = part
            total += float(self._sum_of_losses(params, self._placed(padded), len(part)))
        return {"validation_loss": total / (len(windows) * self.config.context) / self.per_unit}

    def order_two(self) -> float:
        """Bits per byte of the order-2 model on the very bytes that `validate` predicts."""
        bits = OrderTwo(self.corpus.train).bits(self.corpus.validation)
        starts = self.corpus.validation_starts(self.config.context, self.validation_bytes)
        # bits[i] belongs to byte i + 2, and a window's first target is start + 1.
        return float(bits[starts[:, None] + np.arange(self.config.context) - 1].mean())
