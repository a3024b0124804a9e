"""Merges partial results, each attention to some of the keys, by their log-sum-exps."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from pallas_fa.softmax.sinks import per_row


class PartialResult(NamedTuple):
    """Attention to some of the keys.

    Attributes:
      out: [B, T, N, Hv].
      lse: log-sum-exp [B, T, N] of the logits of these keys.
    """

    out: Any
    lse: Any

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any, sinks: Any = None) -> "PartialResult":
        """Returns the result for no keys, but for `sinks` [B|1, N, 1, 1] if given; `shape` is that of out."""
        lse = -jnp.inf if sinks is None else per_row(sinks)
        return cls(jnp.zeros(shape, dtype), jnp.full(shape[:3], lse, dtype))


def merge(*results: PartialResult) -> PartialResult:
    """Returns attention to the keys of all `results`, in the dtype of their log-sum-exps."""
    top = lax.stop_gradient(functools.reduce(jnp.maximum, (result.lse for result in results)))
    top = jnp.where(top == -jnp.inf, 0, top)  # a row without keys in any result: exp(-inf - 0) = 0, not NaN
    weights = [jnp.exp(result.lse - top) for result in results]
    total = sum(weights)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    weighted = lambda weight, result: (weight / total)[..., None] * result.out.astype(weight.dtype)
    out = sum(map(weighted, weights, results))
    return PartialResult(out, jnp.where(empty, -jnp.inf, top + jnp.log(total)))


def merge_per_element(*results: PartialResult) -> PartialResult:
    """Returns what `merge` does, of any shapes [...] of lse and [..., Hv] of out.

    Every element of out computes its weights anew, so that XLA can fuse all of it with what uses the result, where `merge`
    takes two GPU kernels (evidence: decode/latent-attention).
    """
    lses = [jnp.broadcast_to(result.lse[..., None], result.out.shape) for result in results]
    top = functools.reduce(jnp.maximum, lses)
    finite = jnp.where(top == -jnp.inf, 0, top)
    weights = [jnp.exp(lse - finite) for lse in lses]
    total = sum(weights)
    lse = jnp.where(total == 0, -jnp.inf, finite + jnp.log(total))
    out = sum(weight * result.out.astype(weight.dtype) for weight, result in zip(weights, results, strict=True))
    return PartialResult(out / jnp.where(total == 0, 1, total), lse[..., 0])
