"""`dot_product_attention` and `explain`: the contract."""

from typing import Any

import jax

from pallas_fa.backends import dispatch, reference
from pallas_fa.operands.pytree import arrays_of
from pallas_fa.problem import Operands, Problem, normalise
from pallas_fa.sharding import explicit_axes


def dot_product_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    scale=None,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    logits_soft_cap=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
    score=None,
    precision=None,
    deterministic_gradients=False,
    forward_mode=False,
    implementation=None,
    config=None,
    return_residual=False,
) -> Any:
    """Attention: softmax(scores(scale * query key^T), masked) value, in O(T) memory.

    The signature of `jax.nn.dot_product_attention`, and more. The order is: scale, `bias`, `logits_soft_cap`, `score`,
    then masks, then the softmax in float32 (float64 for float64).

    Shapes: B batch (any number of dims, none included), T query length, S key length, N query heads, K key/value heads
    (N % K == 0; query head n reads key head n // (N // K)), H head dim of query and key, Hv head dim of value.

    Args:
      query: [*B, T, N, H], any float dtype.
      key: [*B, S, K, H], the same dtype.
      value: [*B, S, K, Hv], the same dtype.
      bias: float of any float dtype, broadcastable to [*B, N, T, S], added to the scaled logits; gets a gradient.
      mask: bool, broadcastable to [*B, N, T, S], True where a query may attend; or a `pallas_fa.masks.Mask`.
      scale: factor of the logits, a float or a scalar array (which gets a gradient); default 1 / sqrt(H).
      is_causal: query t attends to keys s <= t only (aligned top-left also where T != S; other alignments:
        `masks.Causal`).
      query_seq_lengths: int [*B]; queries at and past it are padding and give 0.
      key_value_seq_lengths: int [*B]; keys and values at and past it are padding. Padding may hold NaN or Inf; it
        changes nothing else, and its gradients are 0.
      local_window_size: (left, right), or an int for both: query t attends to t - left <= s <= t + right only; None is
        no bound on that side.
      logits_soft_cap: cap > 0; logits become cap * tanh(logits / cap).
      query_segment_ids: int [*B, T]; a query attends only to keys of the same id. Give both ids or neither.
      key_value_segment_ids: int [*B, S].
      score: a `pallas_fa.scores.Score`, any other function of the logits; its arrays get gradients.
      precision: of the matmuls, as in JAX; honoured by 'xla' and 'reference'.
      deterministic_gradients: gradients bitwise equal from run to run on one device.
      forward_mode: True where `jax.jvp` (`jax.jacfwd`, `jax.linearize`, `jax.hessian`) goes through the call; without it JAX
        raises "can't apply forward-mode autodiff (jvp) to a custom_vjp function". Values still come from the
        implementation; tangents, and here gradients too, from XLA in O(T) memory, in any order.
      implementation: 'mosaic_gpu' (kernels for NVIDIA Hopper), 'xla' (any platform), 'reference' (dense, for tests; always
        differentiates forward-mode), a tuple of names to try in order, or None: the fastest that can do the call.
      config: tiles of the kernels, for tuning; None for the library's tables.
      return_residual: also return the log-sum-exp of the masked logits.

    Returns:
      out [*B, T, N, Hv] in the dtype of `query`; with `return_residual` (out, lse), lse [*B, T, N] float32 (float64 for
      float64), natural logarithm, differentiable. A query with nothing to attend to gives 0 and -inf, and no gradient.

    Raises:
      ValueError, TypeError: an argument is wrong; raised before anything is computed.
      NotImplementedError: the implementation named cannot do the call; the message says why.
    """
    arguments = dict(
        query=query,
        key=key,
        value=value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        score=score,
        precision=precision,
        deterministic_gradients=deterministic_gradients,
        forward_mode=forward_mode,
        config=config,
    )
    out, lse = explicit_axes.run(_attend, arguments, implementation=implementation)
    return (out, lse) if return_residual else out


def _attend(*, implementation, **arguments) -> tuple[Any, Any]:
    return attend(*normalise(**arguments), implementation)


def attend(problem: Problem, operands: Operands, implementation: Any) -> tuple[Any, Any]:
    """(out [*B, T, N, Hv], log-sum-exp [*B, T, N]) of arguments that `normalise` has checked."""
    chosen = dispatch.choose(problem, implementation)
    if chosen.name == "reference":
        out, lse = reference.attention(problem, *operands)
    else:
        from pallas_fa.autodiff import jvp, vjp

        derivatives = jvp if problem.forward_mode else vjp
        out, lse = derivatives.attention(chosen, problem, *operands)
    out, lse = (x.reshape(problem.dims.batch + x.shape[1:]) for x in (out, lse))
    return out, lse


def explain(
    *args: Any, implementation: Any = None, return_residual: bool = False, dropout_rate: float = 0.0, **kwargs: Any
) -> str:
    """Which implementation `dot_product_attention` would run for these arguments, and why the others would not.

    Takes the same arguments; arrays may be `jax.ShapeDtypeStruct`. Nothing is computed. `dropout_rate` > 0 asks for
    `pallas_fa.nn.attention_fn`, which has dropout.
    """
    del return_residual
    arrays, rebuild = arrays_of((args, kwargs))
    problems = []

    def record(arrays):
        args, kwargs = rebuild(arrays)
        problems.append(normalise(*args, **kwargs)[0])

    jax.eval_shape(record, arrays)
    return dispatch.explain_choice(problems[0], implementation, dropout=dropout_rate > 0)
