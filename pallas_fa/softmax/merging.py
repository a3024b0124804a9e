"""Attention to some keys and attention to others, merged into attention to all of them by the log-sum-exps."""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax


class Seen(NamedTuple):
    """Attention to the keys seen so far: out [B, T, N, Hv] and lse [B, T, N]."""

    out: Any
    lse: Any

    @classmethod
    def nothing(cls, shape: tuple[int, ...], dtype: Any) -> "Seen":
        """No keys yet; `shape` is that of out."""
        return cls(jnp.zeros(shape, dtype), jnp.full(shape[:3], -jnp.inf, dtype))

    def only_if(self, condition: Any) -> "Seen":
        """This, or, merged into anything, nothing."""
        return self._replace(lse=jnp.where(condition, self.lse, -jnp.inf))


def merged(*parts: Seen) -> Seen:
    """All of them, in the dtype of the log-sum-exps."""
    top = lax.stop_gradient(functools.reduce(jnp.maximum, (part.lse for part in parts)))
    top = jnp.where(top == -jnp.inf, 0, top)  # a row that has attended to nothing: exp(-inf - 0) = 0, not NaN
    weights = [jnp.exp(part.lse - top) for part in parts]
    total = sum(weights)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    out = sum((weight / total)[..., None] * part.out for weight, part in zip(weights, parts, strict=True))
    return Seen(out, jnp.where(empty, -jnp.inf, top + jnp.log(total)))
