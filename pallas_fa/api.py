"""`dot_product_attention` and `explain`: the contract."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_fa.arguments.keywords import Arguments, with_signature
from pallas_fa.attention import attend
from pallas_fa.backends import choice
from pallas_fa.masks import Mask
from pallas_fa.operands.pytree import arrays_of, as_flag, is_array
from pallas_fa.problem import normalise
from pallas_fa.sharding.explicit_axes import with_automatic_axes

_attend = with_automatic_axes(attend)


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[jax.Array, jax.Array]: ...


@with_signature
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    **arguments: Unpack[Arguments],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention: softmax(scores(scale * query key^T), masked) value, in O(T) memory.

    The signature of `jax.nn.dot_product_attention`, and more. The order is: scale, `bias`, `logits_soft_cap`, `score`,
    then masks, then `sinks`, then the softmax in float32 (float64 for float64). The algorithm is FlashAttention-2 (Dao,
    arXiv 2307.08691), in the kernels for Hopper FlashAttention-3 (Shah et al., arXiv 2407.08608).

    Shapes: B batch (any number of dims, none included), T query length, S key length, N query heads, K key/value heads
    (N % K == 0; query head n reads key head n // (N // K)), H head dim of query and key, Hv head dim of value.

    Args:
      query: [*B, T, N, H], any float dtype.
      key: [*B, S, K, H], the same dtype; or, like value, a float dtype of 8 bits beside a wider one of query, as of a cache:
        what is read is converted, exactly, and there are no gradients but by 'reference'.
      value: [*B, S, K, Hv], the dtype of key.
      bias: float of any float dtype, broadcastable to [*B, N, T, S], added to the scaled logits; gets a gradient.
      mask: bool, broadcastable to [*B, N, T, S], True where a query may attend; or a `pallas_fa.masks.Mask`.
      scale: factor of the logits, a float or a scalar array (which gets a gradient); default 1 / sqrt(H).
      is_causal: query t attends to keys s <= t only, aligned top-left also where T != S, as in `jax.nn`: one query with a
        cache of keys reads key 0 alone. Where the last query is to see the last key, pass
        `mask=masks.Causal(align="bottom_right")`.
      query_seq_lengths: int [*B]; queries at and past it are padding and give 0.
      key_value_seq_lengths: int [*B]; keys and values at and past it are padding. Padding may hold NaN or Inf; it
        changes nothing else, and its gradients are 0.
      local_window_size: (left, right), or an int for both: query t attends to t - left <= s <= t + right only; None is
        no bound on that side. Each may be an int array, traced as under a scan over layers: a scalar, [*B], or
        [*B, N, 1, 1] for a window per head.
      logits_soft_cap: cap > 0; logits become cap * tanh(logits / cap). For 16-bit inputs the kernels' tanh has a relative
        error of some 2^-11.
      query_segment_ids: int [*B, T]; a query attends only to keys of the same id. Give both ids or neither. Ids that JAX
        would wrap around (64 bits without `jax_enable_x64`) raise where their values are known.
      key_value_segment_ids: int [*B, S].
      score: a `pallas_fa.scores.Score`, any other function of the logits; its arrays get gradients.
      sinks: float [N] or [*B, N] of any float dtype: one logit per query head that joins the softmax's denominator and
        has no value (gpt-oss, arXiv 2508.10925). It is neither scaled nor capped, and no mask hides it; lse includes it,
        and it gets a gradient. -inf is no sink.
      precision: of the matmuls, as in JAX. 'mosaic_gpu' makes those of float32 from three bfloat16 products, and from six
        for 'highest'; None is `jax_default_matmul_precision`.
      deterministic_gradients: gradients bitwise equal from run to run on one device.
      forward_mode: True where `jax.jvp` (`jax.jacfwd`, `jax.linearize`, `jax.hessian`) goes through the call; without it JAX
        raises "can't apply forward-mode autodiff (jvp) to a custom_vjp function". Values still come from the
        implementation; tangents, and here gradients too, from XLA in O(T) memory, in any order.
      dropout_rate: in [0, 1), static: the share of probabilities that are set to 0, after the softmax; the others are
        divided by 1 - rate, and lse is that without dropout. Rounded to a multiple of 2^-15, which the scale follows.
      dropout_key: one JAX PRNG key, typed or raw; required if `dropout_rate` > 0. What is dropped is a function of its bits
        and of the indices (b, n, t, s) in the whole problem: of no implementation, tile size, direction or sharding. Inside
        `jax.shard_map` the whole problem is that of the shard: fold the position of the device into the key.
      broadcast_dropout: True drops the same (t, s) in all batch entries and query heads.
      implementation: 'mosaic_gpu' (the kernels for this NVIDIA GPU), 'mma' (those for GPUs before and after Hopper, on any),
        'xla' (any platform), 'reference' (dense, for tests; always differentiates forward-mode), a tuple of names to try in
        order, or None: what is fastest on this platform, as `explain` says.
      layout: "BTNH", or "BNTH" where query is [*B, N, T, H], key [*B, K, S, H] and value [*B, K, S, Hv], as in PyTorch; the
        output is [*B, N, T, Hv] then. lse, bias and masks do not change, and the kernels copy nothing for it.
      config: tiles of the kernels, for tuning, a `pallas_fa.mosaic_gpu.config.Config`; None for the library's tables.
      return_residual: also return the log-sum-exp of the masked logits.

    Returns:
      out [*B, T, N, Hv] in the dtype of `query`; with `return_residual` (out, lse), lse [*B, T, N] float32 (float64 for
      float64), natural logarithm, differentiable. A query with nothing to attend to gives 0 and -inf, and no
      gradient; with sinks it gives 0 and its head's sink.

    Raises:
      ValueError, TypeError: an argument is wrong; raised before anything is computed.
      NotImplementedError: the implementation named cannot do the call; the message says why.
    """
    return_residual = as_flag("return_residual", return_residual)
    out, lse = _attend(query, key, value, bias, mask, implementation=implementation, **arguments)
    return (out, lse) if return_residual else out


@with_signature
def explain(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    **arguments: Unpack[Arguments],
) -> str:
    """Which implementation `dot_product_attention` would run for these arguments, and why the others would not.

    Takes the same arguments, and raises the same errors for wrong ones; arrays may be `jax.ShapeDtypeStruct`. Nothing is
    computed. Returns a line for each implementation.
    """
    as_flag("return_residual", return_residual)
    return explain_normalised(normalise, implementation, query, key, value, bias, mask, **arguments)


def explain_normalised(normalise: Callable[..., Any], implementation: Any, *args: Any, **kwargs: Any) -> str:
    """Returns what `explain` does, of the problem in `normalise(*args, **kwargs)`, which is (problem, operands)."""
    # Scalars of NumPy, its integers and what is no number stay what they are, to be checked as in the call.
    is_abstract = lambda x: jnp.issubdtype(x.dtype, jnp.inexact) or x.dtype == np.bool_
    stays = lambda x: isinstance(x, np.generic) or (isinstance(x, np.ndarray) and not is_abstract(x))
    arrays, rebuild = arrays_of((args, kwargs), lambda x: is_array(x) and not stays(x))
    problems = []

    def record(arrays):
        args, kwargs = rebuild(arrays)
        problems.append(normalise(*args, **kwargs)[0])

    jax.eval_shape(record, arrays)
    return choice.explain(problems[0], implementation)
