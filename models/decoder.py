"""A GPT that continues sequences: keys and values of what it has read wait in caches, so that a token costs one step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.attention import causal_attention
from models.gpt import GPT, Cache, GPTConfig
from models.sample import Sampling
from models.step import Params
from pallas_fa.cache import KeyValueCache, PageAllocator, PagedCache


class Decoder:
    """Two programs, compiled once for a batch: `read` takes prompts into the caches, `step` one token of each sequence.

    Both return the caches, which they take over (donated), and the tokens drawn. Runs on one device.
    """

    def __init__(self, config: GPTConfig, params: Params, sampling: Sampling, page_size: int | None = None):
        """`page_size`: tokens in a page of the caches; None for contiguous ones."""
        self.config = dataclasses.replace(config, attention=causal_attention, gather=None)  # those of one device
        self.page_size = page_size
        graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(self.config, nnx.Rngs(0))))
        # Steps read all parameters: the matrices lie in the dtype in which they are used. Sinks and norms stay float32.
        cast = lambda x: x.astype(config.dtype) if x.ndim > 1 else x
        self.params = jax.device_put(jax.tree.map(cast, params), jax.devices()[0])
        self.read = jax.jit(functools.partial(_read, graph, sampling), donate_argnums=1)
        self.step = jax.jit(functools.partial(_step, graph, sampling), donate_argnums=1)

    def tokens(self, prompts: Sequence[Sequence[int]], count: int, seed: int) -> Iterator[np.ndarray]:
        """Yields int32 [B] `count` times: the tokens that follow `prompts`, none of which is empty or exceeds the context.

        The next step is under way while one's tokens are looked at. The seed, the place of a prompt in the batch and that
        of a token say what is drawn.
        """
        ahead = itertools.pairwise(itertools.chain(self._tokens(prompts, count, seed), [None]))
        return (np.asarray(tokens) for tokens, _ in ahead)

    def _tokens(self, prompts, count, seed):
        """What `tokens` does, on the device.

        A window of `config.context` tokens is filled; then its last half is read anew: the model knows no distance greater
        than its context.
        """
        context, half = self.config.context, max(1, self.config.context // 2)
        windows = [np.asarray(prompt, np.int32) for prompt in prompts]
        slides = max(map(len, windows)) + count - 1 > context
        width = context if slides else max(map(len, windows))
        caches = self.empty_caches([min(len(window) + count, context) for window in windows])
        key, drawn, tokens = jax.random.key(seed), [], None  # drawn: since prompts were read
        for index in range(count):
            if drawn and max(map(len, windows)) + len(drawn) <= context:
                caches, tokens = self.step(self.params, caches, tokens, key, index)
            else:
                if drawn:
                    windows = [np.append(*pair) for pair in zip(windows, np.stack(drawn, axis=1), strict=True)]
                    windows = [window[-half:] if len(window) > context else window for window in windows]
                padded = np.stack([np.pad(window, (0, width - len(window))) for window in windows])
                lengths = np.asarray([len(window) for window in windows], np.int32)
                caches, tokens = self.read(self.params, caches, padded, lengths, key, index)
                drawn = []
            drawn.append(tokens)
            yield tokens

    def empty_caches(self, lengths: Sequence[int]) -> tuple[Cache, ...]:
        """A cache for each layer, with room for so many tokens of each sequence."""
        c = self.config
        sizes = dict(batch=len(lengths), kv_heads=c.kv_heads, head_dim=c.head_dim, dtype=c.dtype)
        if self.page_size is None:
            make = functools.partial(KeyValueCache.empty, length=max(lengths), **sizes)
            return jax.device_put(tuple(make() for _ in range(c.layers)), jax.devices()[0])
        pages = [-(-length // self.page_size) for length in lengths]
        allocator = PageAllocator(sum(pages), self.page_size)
        table = allocator.page_table([allocator.allocate(length) for length in lengths], max(pages))
        make = functools.partial(
            PagedCache.empty, pages_per_sequence=max(pages), num_pages=sum(pages), page_size=self.page_size, **sizes
        )
        with_table = lambda: dataclasses.replace(make(), page_table=jnp.asarray(table))  # made for each: it is donated
        return jax.device_put(tuple(with_table() for _ in range(c.layers)), jax.devices()[0])


def _read(graph, sampling, params, caches, tokens, lengths, key, index):
    """tokens [B,T], of which `lengths` [B] are real -> (caches that hold these alone, the tokens [B] that follow)."""
    caches = tuple(dataclasses.replace(cache, lengths=jnp.zeros_like(cache.lengths)) for cache in caches)
    logits, caches = nnx.merge(graph, params)(tokens, caches, lengths=lengths)
    last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)[:, 0]
    return caches, _draw(sampling, last, key, index)


def _step(graph, sampling, params, caches, tokens, key, index):
    """The last tokens [B] -> (caches with these, the tokens [B] that follow)."""
    logits, caches = nnx.merge(graph, params)(tokens[:, None], caches)
    return caches, _draw(sampling, logits[:, 0], key, index)


def _draw(sampling, logits, key, index):
    key = jax.random.fold_in(key, index)
    return sampling.draw(logits, jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(len(logits))))
