"""`all_to_all_attention`: exchanges heads for sequence before and after attention."""

import math
from collections.abc import Hashable, Sequence
from typing import Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from pallas_fa.arguments.keywords import Arguments, with_signature
from pallas_fa.arguments.masks import segment_mask
from pallas_fa.arguments.settings import refuse_forward_mode
from pallas_fa.attention import run
from pallas_fa.context_parallel import checks
from pallas_fa.context_parallel import placement as placements
from pallas_fa.context_parallel.placement import Placement, from_zigzag, to_zigzag
from pallas_fa.masks import Mask
from pallas_fa.operands.dims import Dims
from pallas_fa.operands.part import Part
from pallas_fa.operands.pytree import as_flag
from pallas_fa.problem import normalise


@overload
def all_to_all_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: Hashable,
    placement: Placement = "contiguous",
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> jax.Array: ...


@overload
def all_to_all_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: Hashable,
    placement: Placement = "contiguous",
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[jax.Array, jax.Array]: ...


@with_signature
def all_to_all_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: Hashable,
    placement: Placement = "contiguous",
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    **arguments: Unpack[Arguments],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention to a sharded sequence, exchanging heads for sequence before and after.

    Jacobs et al., arXiv 2309.14509. For use inside `jax.shard_map`. Each of the R devices along `axis_name` starts with 1/R
    of the sequence and all heads. It attends with 1/R of the query heads to the whole sequence, and gets its 1/R of the
    sequence back. R must divide N. If R does not divide K, key heads are repeated R / gcd(K, R) times.

    T and S are the lengths of the whole sequences. Arguments that are not listed are those of `dot_product_attention`.

    Args:
      query: [*B, T/R, N, H], this device's shard.
      key: [*B, S/R, K, H], this device's shard.
      value: [*B, S/R, K, Hv], this device's shard.
      bias: float, broadcastable to [*B, N, T, S]: the whole array, replicated, in the order of the sequence. Each device
        reads its heads; for a large bias `ring_attention` takes less memory.
      mask: bool, broadcastable to [*B, N, T, S]: the whole array, replicated; or a `pallas_fa.masks.Mask` of the whole
        problem.
      axis_name: the mesh axis, one name, over which the sequence is sharded.
      placement: the order of the sequence on the devices, as in `ring_attention`. All devices have equal work either way.
      query_seq_lengths: int [*B], lengths of the whole sequences.
      key_value_seq_lengths: int [*B], lengths of the whole sequences.
      query_segment_ids: int [*B, T/R], this device's shard. The shards of all devices are gathered.
      key_value_segment_ids: int [*B, S/R], this device's shard.
      score: a `pallas_fa.scores.Score` of the whole problem.
      sinks: float [N] or [*B, N], those of all heads.

    Returns:
      out [*B, T/R, N, Hv], with `return_residual` (out, lse), lse [*B, T/R, N]; differentiable.

    Raises:
      ValueError, TypeError: an argument is wrong; raised while tracing.
      NotImplementedError: the named implementation cannot do the call; the message says why.
    """
    size = checks.axis_size(axis_name)
    placement = placements.check(placement)
    return_residual = as_flag("return_residual", return_residual)
    checks.require_shards(axis_name, query=query, key=key, value=value)
    refuse_forward_mode(arguments)
    local, _ = normalise(query, key, value, layout=arguments.get("layout") or "BTNH")
    checks.refuse_narrow_keys(local)
    length_axis, head_axis = (-3, -2) if local.layout == "BTNH" else (-2, -3)
    N, K = local.dims.N, local.K
    if N % size:
        raise ValueError(
            f"query has N={N} heads, which the {size} devices along axis_name={axis_name!r} do not divide:"
            " all_to_all_attention gives each device the same number of heads. Use ring_attention, or a smaller axis."
        )
    checks.require_blocks(local.dims, size, placement)
    segment_mask(local.dims, arguments.get("query_segment_ids"), arguments.get("key_value_segment_ids"))  # raises
    if K % size:
        key, value = (jnp.repeat(x, size // math.gcd(K, size), axis=head_axis) for x in (key, value))

    def in_order(x, axis):
        return from_zigzag(x, axis, size) if placement == "zigzag" else x

    def whole_sequence(x):
        exchanged = lax.all_to_all(x, axis_name, x.ndim + head_axis, x.ndim + length_axis, tiled=True)
        return in_order(exchanged, length_axis)

    def shard(x, length_axis, head_axis):
        x = to_zigzag(x, length_axis, size) if placement == "zigzag" else x
        return lax.all_to_all(x, axis_name, x.ndim + length_axis, x.ndim + head_axis, tiled=True)

    query_ids, key_ids = (
        ids if ids is None else in_order(lax.all_gather(ids, axis_name, axis=jnp.ndim(ids) - 1, tiled=True), -1)
        for ids in (arguments.get("query_segment_ids"), arguments.get("key_value_segment_ids"))
    )
    if query_ids is not None:
        arguments["query_segment_ids"] = query_ids
    if key_ids is not None:
        arguments["key_value_segment_ids"] = key_ids
    problem, operands = normalise(
        whole_sequence(query),
        whole_sequence(key),
        whole_sequence(value),
        bias,
        mask,
        **arguments,
        whole=lambda dims: Dims(dims.batch, dims.T, dims.S, N),
    )
    B, heads = problem.dims.B, problem.dims.N
    part = Part((0, lax.axis_index(axis_name) * heads, 0, 0), (B, heads, problem.dims.T, problem.dims.S))
    score, own_mask = (None if tree is None else part.cut(tree).moved(part) for tree in (operands.score, operands.mask))
    sinks, dropout = part.cut((operands.sinks, operands.dropout))
    operands = operands._replace(score=score, mask=own_mask, sinks=sinks, dropout=dropout)
    out, lse = run(problem.with_operands(operands), operands, implementation)
    out, lse = shard(out, length_axis, head_axis), shard(lse, -2, -1)
    return (out, lse) if return_residual else out
