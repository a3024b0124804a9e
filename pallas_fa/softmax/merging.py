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
    out = sum((weight / total)[..., None] * result.out for weight, result in zip(weights, results, strict=True))
    return PartialResult(out, jnp.where(empty, -jnp.inf, top + jnp.log(total)))


def merge_along(axis: int, parts: PartialResult) -> PartialResult:
    """Returns attention to the keys of all parts, which lie along `axis` of both arrays; of any shape, with lse that of out
    without the last dim.

    One reduction, which XLA computes in one GPU kernel.
    """

    def combine(a, b):
        top = jnp.maximum(a[0], b[0])
        finite = jnp.where(top == -jnp.inf, 0, top)
        weights = [jnp.exp(x[0] - finite) for x in (a, b)]
        return top, *(x * weights[0] + y * weights[1] for x, y in zip(a[1:], b[1:], strict=True))

    top = jnp.broadcast_to(parts.lse[..., None], parts.out.shape)
    zero = jnp.zeros((), top.dtype)
    start = jnp.asarray(-jnp.inf, top.dtype), zero, zero
    top, total, out = lax.reduce((top, jnp.ones_like(top), parts.out), start, combine, (axis,))
    empty = top == -jnp.inf
    total = jnp.where(empty, 1, total)
    return PartialResult(jnp.where(empty, 0, out) / total, (top + jnp.log(total))[..., 0])
