"""Text from a GPT, one byte at a time, each read once: keys and values wait in a cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.gpt import GPTConfig, KVCache
from models.step import Params


def sample_text(
    graph: nnx.GraphDef, config: GPTConfig, params: Params, prompt: str, count: int, temperature: float, seed: int
) -> str:
    """`prompt` and `count` bytes that follow it.

    A window of `config.context` bytes is filled, then its last half becomes the prompt of the next one: the model
    knows no distance greater than its context.
    """
    text = prompt.encode(errors="surrogateescape")  # also the bytes of a command line that is not UTF-8
    key = jax.random.key(seed)
    half = max(1, config.context // 2)
    while count > 0:
        window = np.frombuffer(text[-half:], np.uint8).astype(np.int32)[None]  # [1,T]
        key, use = jax.random.split(key)
        # Always a full window, so that few shapes are compiled; what is too much is cut.
        new = generate(graph, params, jnp.asarray(window), use, config, config.context - window.shape[1], temperature)
        text += np.asarray(new[0], np.uint8).tobytes()[:count]
        count -= new.shape[1]
    return text.decode("utf-8", errors="replace")


@functools.partial(jax.jit, static_argnames=("graph", "config", "count"))
def generate(
    graph: nnx.GraphDef,
    params: Params,
    prompt: jax.Array,
    key: jax.Array,
    config: GPTConfig,
    count: int,
    temperature: float,
) -> jax.Array:
    """prompt int32 [B,T] -> int32 [B,count], drawn from softmax(logits / temperature)."""
    model = nnx.merge(graph, params)
    cache = KVCache.empty(config, prompt.shape[0], prompt.shape[1] + count)
    logits, cache = model(prompt, cache)

    def draw(carry: tuple[KVCache, jax.Array], step_key: jax.Array):
        cache, last = carry  # last: the logits [B,V] of the byte to come
        token = jax.random.categorical(step_key, last / temperature)  # [B]
        logits, cache = model(token[:, None], cache)
        return (cache, logits[:, 0]), token

    _, tokens = jax.lax.scan(draw, (cache, logits[:, -1]), jax.random.split(key, count))  # [count,B]
    return tokens.T
