"""The arguments that change logits: the scale, and all that becomes a score."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_fa import masks, scores
from pallas_fa.arguments.arrays import array
from pallas_fa.operands.pytree import is_array, is_finite, is_float, is_static_number
from pallas_fa.scores.soft_cap import check_cap


def split_scale(scale: Any, head_dim: int, dtype: Any) -> tuple[float, scores.Score | None]:
    """Returns (static scale, score that scales logits of inputs of `dtype` by a traced one, or None)."""
    if scale is None:
        return head_dim**-0.5, None
    if is_static_number(scale):
        if not is_finite(scale, dtype):
            raise ValueError(
                f"scale={scale} must be finite in the dtype of logits, float32 (float64 for float64). Leave it out for"
                f" 1/sqrt(head dim) = {head_dim**-0.5:.4g}."
            )
        return float(scale), None
    rule = "must be a float, a scalar float or int array, or None for 1/sqrt(head dim)"
    if not is_array(scale):
        raise TypeError(f"scale={scale!r} {rule}. {'Pass 1.0 for no scale.' if isinstance(scale, bool) else _FLOAT}")
    if not is_float(scale.dtype) and not jnp.issubdtype(scale.dtype, jnp.integer):
        raise TypeError(f"scale={scale!r} {rule}. {_FLOAT}")
    if scale.ndim != 0:
        one = math.prod(scale.shape) == 1
        remedy = "Use scale.reshape(())." if one else "Pass scale=1.0, and multiply the query by it."
        raise TypeError(f"scale={scale!r} {rule}. {remedy}")
    if jnp.issubdtype(scale.dtype, jnp.integer):
        scale = jnp.asarray(scale).astype(np.promote_types(dtype, np.float32))  # as a Python int
    return 1.0, scores.Custom(_times, jnp.asarray(scale))


_FLOAT = "Convert it, e.g. with `float`, or an array with `.astype(jnp.float32)`."


def _times(x, b, n, t, s, factor):
    return x * factor


def bias_score(bias: Any) -> scores.Bias | None:
    """Returns `bias` as a score."""
    if bias is None:
        return None
    x = array("bias", bias, "an array, broadcastable to [*B, N, T, S]")
    if jnp.issubdtype(x.dtype, jnp.integer):
        x = x.astype(jnp.float32)  # as in jax.nn, where it is added all the same
    if not is_float(x.dtype):
        raise TypeError(
            f"bias.dtype={x.dtype} must be a float type: a bias is added to the logits. Pass a bool array as `mask=`; to"
            " add it as 0 and 1, convert it with `.astype(jnp.float32)`."
        )
    return scores.Bias(x)


def soft_cap_score(cap: Any) -> scores.SoftCap | None:
    """Returns `logits_soft_cap` as a score."""
    return None if cap is None else scores.SoftCap(check_cap("logits_soft_cap", cap, "Use None"))


def check_score(score: Any) -> scores.Score | None:
    """Returns `score`; raises unless it is a `Score` or None."""
    if score is None or isinstance(score, scores.Score):
        return score
    if isinstance(score, masks.Mask):
        raise TypeError(f"score is a {type(score).__name__}, a mask. Pass it as `mask=`.")
    if isinstance(score, type) and issubclass(score, scores.Score):
        raise TypeError(f"score is the class {score.__name__}. Make one and pass it: `score={score.__name__}(...)`.")
    raise TypeError(
        f"score is a {type(score).__name__}; it must be a pallas_fa.scores.Score. Wrap a function fn(x, b, n, t, s) as"
        " scores.Custom(fn), an additive array as scores.Bias(array)."
    )
