"""Attention with dropout of its weights, in plain jnp: dense, T x S weights in memory, until kernels have it."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.backends import reference
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.problem import Operands, Problem
from pallas_fa.softmax import tile


def attention(problem: Problem, operands: Operands, rng: Any, broadcast: bool) -> jax.Array:
    """[*B, T, N, Hv]: `reference.attention`, each weight kept with probability 1 - dropout_rate, and then divided by that.

    `broadcast`: one draw for all batch entries and heads. The draws are those of flax.linen.dot_product_attention and
    flax.nnx.dot_product_attention for the same key.
    """
    rate = problem.dropout_rate
    if rng is None:
        raise ValueError(
            f"dropout_rng=None, but dropout is active ({rate=}, deterministic=False). Pass a key:"
            " `rngs={'dropout': key}` in linen's apply, `rngs=` in nnx; or switch dropout off with deterministic=True."
        )
    lengths, dims = lengths_of(operands.mask), problem.dims
    q = tile.zero_padding(operands.q, lengths.q_lengths)
    k, v = (tile.zero_padding(x, lengths.kv_lengths) for x in (operands.k, operands.v))
    p, _ = reference.probabilities(problem, operands._replace(q=q, k=k, v=v))

    # The shape drawn is Flax's, batch dims not flattened, for then the bits are too.
    heads = (1,) * (len(dims.batch) + 1) if broadcast else (*dims.batch, dims.N)
    keep = jax.random.bernoulli(rng, 1.0 - rate, (*heads, dims.T, dims.S))
    keep = keep.reshape((1, 1, dims.T, dims.S) if broadcast else p.shape)
    p = jnp.where(keep, p / (1.0 - rate), 0)

    v = jnp.repeat(v.astype(problem.acc_dtype), problem.group, axis=2)
    out = jnp.einsum("bnts,bsnh->btnh", p, v, precision=problem.precision)
    return out.astype(problem.dtype).reshape(dims.batch + out.shape[1:])
