"""Computes attention with dropout, in plain jnp, with T x S weights in memory. The kernels have no dropout yet."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_fa.backends import reference
from pallas_fa.masks.lengths import lengths_of
from pallas_fa.problem import Operands, Problem
from pallas_fa.softmax import tile


def attention(problem: Problem, operands: Operands, rng: Any, broadcast: bool) -> jax.Array:
    """Returns `reference.attention` [*B, T, N, Hv], whose weights are dropped with probability `dropout_rate`.

    The other weights are divided by 1 - dropout_rate. The draws are those of flax.linen.dot_product_attention and
    flax.nnx.dot_product_attention for the same key.

    Args:
      problem: the problem, with its dropout_rate.
      operands: its operands.
      rng: PRNG key; None raises ValueError.
      broadcast: whether all batch entries and heads share one draw.
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

    # The same shape as in Flax, batch dims not flattened, gives the same bits.
    heads = (1,) * (len(dims.batch) + 1) if broadcast else (*dims.batch, dims.N)
    keep = jax.random.bernoulli(rng, 1.0 - rate, (*heads, dims.T, dims.S))
    keep = keep.reshape((1, 1, dims.T, dims.S) if broadcast else p.shape)
    p = jnp.where(keep, p / (1.0 - rate), 0)

    v = jnp.repeat(v.astype(problem.acc_dtype), problem.group, axis=2)
    out = jnp.einsum("bnts,bsnh->btnh", p, v, precision=problem.precision)
    return out.astype(problem.dtype).reshape(dims.batch + out.shape[1:])
