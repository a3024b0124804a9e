"""Decoding steps: few queries of each sequence against its cache, and how each implementation is asked for one."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import pallas_fa
from benchmarks.implementations import Implementation
from pallas_fa import masks

_LATENT_SCALE = 192**-0.5  # of DeepSeek-V3


@dataclasses.dataclass(frozen=True)
class Step:
    """T queries of each of B sequences, N heads on K, with S keys; `length` of them real, `window` of these seen.

    `page`: rows of a page, for a cache in pages; None for one in one piece. `Hv`: columns of the keys that are values, in
    latent attention; None where values are an array of their own. `sinks`: heads have sinks. `kv_dtype`: of the cache.
    """

    B: int
    S: int
    N: int = 32
    K: int = 8
    H: int = 128
    T: int = 1
    length: int | None = None
    window: int | None = None
    page: int | None = None
    Hv: int | None = None
    sinks: bool = False
    kv_dtype: str = "bfloat16"

    @property
    def keys(self) -> int:
        """How many keys a query sees."""
        return min(self.length or self.S, self.window or self.S)

    @property
    def bytes(self) -> int:
        """Of the keys and values that must be read."""
        rows = self.B * min(self.keys + self.T - 1, self.length or self.S) * self.K
        return jnp.dtype(self.kv_dtype).itemsize * rows * (2 * self.H if self.Hv is None else self.H)

    @property
    def flops(self) -> int:
        """Of both matmuls, of the keys that each query sees; windows are taken to be whole."""
        hidden = 0 if self.window else self.T * (self.T - 1) // 2
        return 2 * self.B * self.N * (self.T * self.keys - hidden) * (self.H + (self.Hv or self.H))


STEPS = {
    "b64-s8k": Step(64, 8192),
    "b32-s4k": Step(32, 4096),
    "b8-s32k": Step(8, 32768),
    "64-heads-b16-s4k": Step(16, 4096, N=64),
    "b1-s64k": Step(1, 65536),
    "4-key-heads-b1-s128k": Step(1, 131072, K=4),
    "b1-s4k": Step(1, 4096),
    "b64-lengths-4k-of-8k": Step(64, 8192, length=4096),
    "gpt-oss-window-s128": Step(64, 128, N=64, H=64, length=128, window=128, sinks=True),
    "gpt-oss-window-s32k": Step(64, 32768, N=64, H=64, length=32768, window=128, sinks=True),
    "t4-b8-s32k": Step(8, 32768, T=4),
    "t16-b8-s32k": Step(8, 32768, T=16),
    "mha-b8-s4k": Step(8, 4096, N=16, K=16),
    "mla-b64-s8k": Step(64, 8192, N=128, K=1, H=576, Hv=512),
    "mla-b4-s8k": Step(4, 8192, N=128, K=1, H=576, Hv=512),
    "t32-b64-s8k": Step(64, 8192, T=32),
    "t64-b8-s32k": Step(8, 32768, T=64),
    "prompt-512-b4-s8k": Step(4, 8192, T=512),
    "cache-prompt-512-b4-s8k": Step(4, 8192, T=512, length=8192),
    "cache-prompt-128-b1-s32k": Step(1, 32768, T=128, length=32768),
    "cache-b32-s4k": Step(32, 4096, length=4096),
    "cache-b8-s32k": Step(8, 32768, length=32768),
}
PAGES: dict[str, tuple[int, ...]] = {
    "cache-prompt-512-b4-s8k": (16, 64, 256),
    "cache-prompt-128-b1-s32k": (16, 64, 256),
    "cache-b32-s4k": (16, 32, 64, 128, 256),
    "cache-b8-s32k": (16, 32, 64, 128, 256),
}


Attend = Callable[..., Any]  # (q, k, v, lengths) -> out; lengths are None where all keys are real


def attend(implementation: Implementation, step: Step) -> Attend:
    """Returns the function of an implementation."""
    if step.Hv is not None:
        return _attend_latent(implementation, step)
    if implementation.library != "pallas_fa":
        return _attend_peer(implementation, step)
    bottom_right = masks.Causal(align="bottom_right") if step.T > 1 or step.window else None
    common: dict[str, Any] = dict(implementation=implementation.backend, config=implementation.config)
    common["sinks"] = jnp.linspace(-1, 1, step.N) if step.sinks else None

    def ours(q, k, v, lengths):
        mask = bottom_right
        if step.window:
            assert mask is not None
            mask = mask & masks.Window(step.window - 1, None, offset=lengths - step.T)
        if step.page is None:
            return pallas_fa.dot_product_attention(q, k, v, mask=mask, key_value_seq_lengths=lengths, **common)
        k, v = (x.reshape(-1, step.page, step.K, step.H) for x in (k, v))
        return pallas_fa.paged_attention(q, k, v, page_table(step), lengths, mask=mask, **common)

    return ours


def _attend_latent(implementation, step):
    backend = implementation.backend
    if implementation.library == "pallas_fa":
        common: dict[str, Any] = dict(scale=_LATENT_SCALE, value_dim=step.Hv, implementation=backend)
        return lambda q, k, v, lengths: pallas_fa.mla_decode_attention(q, k[:, :, 0], lengths=lengths, **common)
    peer = _peer(implementation)
    return lambda q, k, v, lengths: peer(q, k, k[..., : step.Hv], scale=_LATENT_SCALE, implementation=backend)


def _attend_peer(implementation, step):
    name, backend, peer = implementation.library, implementation.backend, _peer(implementation)
    if step.window or step.sinks:
        raise NotImplementedError(f"{name} counts a window from key 0, or has no sinks")
    if name == "dew_flash_attn":
        if step.length is not None:
            raise NotImplementedError("dew_flash_attn has no lengths of caches")
        return lambda q, k, v, lengths: peer(q, k, v, is_causal=step.T > 1)  # aligned bottom-right
    if step.T > 1:
        raise NotImplementedError("jax.nn has no bottom-right alignment")
    return lambda q, k, v, lengths: peer(q, k, v, key_value_seq_lengths=lengths, implementation=backend)


def _peer(implementation) -> Any:
    if implementation.library == "dew_flash_attn":
        from dew_flash_attn import flash_mha  # pyright: ignore[reportMissingImports]

        return flash_mha
    return jax.nn.dot_product_attention


def page_table(step: Step) -> Any:
    """Returns the table [B, S / page] of pages in random order, as caches whose sequences have grown together have them."""
    assert step.page is not None
    count = step.B * step.S // step.page
    return jax.random.permutation(jax.random.key(1), count).astype(jnp.int32).reshape(step.B, -1)
