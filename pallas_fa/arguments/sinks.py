"""The logits of attention sinks."""

import math
from typing import Any

import jax.numpy as jnp

from pallas_fa.arguments.arrays import array
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.pytree import is_float


def sink_logits(dims: Dims, sinks: Any) -> Any:
    """Returns `sinks` [N] or [*B, N] as [B|1, N, 1, 1]."""
    if sinks is None:
        return None
    x = array("sinks", sinks, "a float array [N] or [*B, N]")
    if not is_float(x.dtype):
        raise TypeError(
            f"sinks.dtype={x.dtype} must be a float type: a sink is a logit. Convert it, e.g. with"
            " `.astype(jnp.float32)`."
        )
    shapes = (dims.N,), (*dims.batch, dims.N)
    if tuple(x.shape) not in shapes:
        as_many = [shape for shape in shapes if math.prod(shape) == math.prod(x.shape)]
        shared = f"full({shapes[0]}, sink) for one sink that all heads share"
        raise ValueError(
            f"sinks.shape={tuple(x.shape)} must be [N] = {shapes[0]}, one logit for each query head, or [*B, N] ="
            f" {shapes[1]}. Use jnp.{f'reshape(sinks, {as_many[0]})' if as_many else shared}."
        )
    return jnp.reshape(x, (dims.B if x.ndim > 1 else 1, dims.N, 1, 1))
