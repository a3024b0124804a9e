"""Attention sinks: one logit per query head in the softmax's denominator, without a value (gpt-oss, arXiv 2508.10925).

A sink enters the forward's row sums, and so log-sum-exp and output. The probabilities of the keys, and their gradients,
follow from these as without a sink.
"""

from typing import Any

import jax.numpy as jnp


def per_row(sinks: Any) -> Any:
    """Returns sinks [B|1, N, 1, 1] as [B|1, 1, N], broadcastable to row statistics [B, T, N]."""
    return sinks[:, None, :, 0, 0]


def add(sinks: Any, lse: Any) -> tuple[Any, Any]:
    """Returns (log-sum-exp with the sinks, the share of the keys in it), both like lse [B, N, T]; sinks [B|1, N, 1, 1]."""
    both = jnp.logaddexp(lse, sinks[..., 0].astype(lse.dtype))
    return both, jnp.exp(lse - jnp.where(both == -jnp.inf, jnp.inf, both))


def probabilities(sinks: Any, lse: Any) -> Any:
    """Returns the probability [B, T, N] that each row gives its sink; 0 for a sink of -inf.

    Args:
      sinks: [B|1, N, 1, 1].
      lse: [B, T, N], with the sinks; -inf for rows that have neither keys nor a sink.
    """
    return jnp.exp(per_row(sinks).astype(lse.dtype) - jnp.where(lse == -jnp.inf, jnp.inf, lse))


def gradient(sinks: Any, lse: Any, delta: Any) -> Any:
    """Returns the gradient of sinks, in their shape and dtype; the sums are in the dtype of `lse`.

    A sink is a key whose value is 0, so dP = 0 in dS = P (dP - delta).

    Args:
      sinks: [B|1, N, 1, 1].
      lse: [B, T, N].
      delta: [B, T, N], rowsum(out * d_out) - d_lse.
    """
    p = probabilities(sinks, lse)
    d = jnp.where(p > 0, -p * delta, 0)  # where p is 0, delta may be anything
    return d.sum(axis=1 if sinks.shape[0] != 1 else (0, 1)).reshape(sinks.shape).astype(sinks.dtype)
