"""`ring_attention`: keys and values go round in a ring of devices."""

from collections.abc import Hashable, Sequence
from typing import Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from pallas_fa.arguments import Arguments, refuse_dropout, refuse_forward_mode, segment_mask, with_signature
from pallas_fa.context_parallel import checks
from pallas_fa.context_parallel import placement as placements
from pallas_fa.context_parallel.placement import Placement
from pallas_fa.masks import Lengths, Mask
from pallas_fa.operands.dims import ShardedDims
from pallas_fa.problem import normalise


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: Hashable,
    placement: Placement,
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[False] = False,
    **arguments: Unpack[Arguments],
) -> jax.Array: ...


@overload
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: Hashable,
    placement: Placement,
    implementation: str | Sequence[str] | None = None,
    return_residual: Literal[True],
    **arguments: Unpack[Arguments],
) -> tuple[jax.Array, jax.Array]: ...


@with_signature
def ring_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | Mask | None = None,
    *,
    axis_name: Hashable,
    placement: Placement,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    **arguments: Unpack[Arguments],
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of this device's queries to the keys of all devices along a mesh axis, which go round in a ring.

    For use inside `jax.shard_map` (or `pmap`), with its checks on or off. Each of the R devices along `axis_name` holds 1/R
    of the queries and of the keys. Keys and values travel (R - 1 of R hops are needed, and fewer where the mask is known to
    need fewer) while the device computes; nothing is ever gathered, forward or backward. Liu et al., arXiv 2310.01889.

    Positions are those in the whole sequence, for every mask and score. What is not said here is as in
    `dot_product_attention`, whose shape letters these are, with T and S the lengths of the whole sequences:

    Args:
      query: [*B, T/R, N, H], this device's shard.
      key: [*B, S/R, K, H], this device's shard.
      value: [*B, S/R, K, Hv], this device's shard.
      bias: float, broadcastable to [*B, N, T/R, S]: the rows of this device's queries, the columns of all keys. Its rows
        and its columns are in the order of the placement for T, and in that of the sequence for S.
      mask: bool, broadcastable to [*B, N, T/R, S], as `bias`; or a `pallas_fa.masks.Mask`, whose arrays likewise have this
        device's rows and all columns.
      axis_name: the mesh axis, one name, over which the sequence is sharded.
      placement: how the sequence lies on the devices; required, since keys in another order give wrong results without an
        error. "zigzag": the sequence is cut into 2R blocks, and device i holds blocks i and 2R - 1 - i, so that
        causal masks give all devices the same work; `to_zigzag` brings a whole array into this order. "contiguous": device
        i holds the i-th of R pieces; the better choice for a causal window, since the ring then stops where the window ends.
      query_seq_lengths: int [*B], lengths of the whole sequences.
      key_value_seq_lengths: int [*B], lengths of the whole sequences.
      query_segment_ids: int [*B, T/R], this device's shard.
      key_value_segment_ids: int [*B, S/R], this device's shard; the ids travel with the keys. (Ids in a `masks.Segments` are
        arrays of a mask: all S columns.)
      score: a `pallas_fa.scores.Score`, whose arrays have this device's rows and all columns.
      implementation: 'mosaic_gpu', 'xla', a tuple of them, or None; computes each hop.

    Returns:
      out [*B, T/R, N, Hv], with `return_residual` (out, lse), lse [*B, T/R, N]; differentiable, twice in reverse (the second
      derivative keeps what each hop saw, so that it takes the memory of whole sequences). The gradient of an array that is
      the same on all devices (slopes, a bias without T) is summed over them by `jax.shard_map`, as always there.

    Raises:
      ValueError, TypeError: an argument is wrong; raised while tracing.
      NotImplementedError: the implementation named cannot do the call; the message says why.
    """
    from pallas_fa.context_parallel import hops  # only rings need it: `import pallas_fa` stays fast
    from pallas_fa.context_parallel.ring import Ring, with_sharded_segments

    size = checks.axis_size(axis_name)
    placement = placements.checked(placement)
    checks.not_reference(implementation)
    checks.is_sharded(axis_name, query=query, key=key, value=value)
    refuse_dropout(arguments)
    refuse_forward_mode(arguments)
    # The ids are shards, and those of the keys travel with these; the arrays of other masks hold all keys.
    ids = arguments.pop("query_segment_ids", None), arguments.pop("key_value_segment_ids", None)
    problem, operands = normalise(
        query,
        key,
        value,
        bias,
        mask,
        **arguments,
        whole=lambda dims: ShardedDims(dims.batch, dims.T * size, dims.S * size, dims.N, rows=dims.T),
    )
    dims = problem.dims
    segments = segment_mask(dims, *ids)
    if segments is not None:
        operands = operands._replace(mask=with_sharded_segments(operands.mask, segments.bind(dims, Lengths())))
        problem = problem.with_operands(operands)
    if operands.mask is None and operands.score is None:
        placement = "contiguous"  # nothing depends on positions: larger blocks
    checks.has_blocks(dims, size, placement)

    names = tuple(implementation) if isinstance(implementation, list) else implementation
    static = Ring(problem, names, axis_name, size, placement)
    out, lse = (x.reshape(dims.batch + x.shape[1:]) for x in hops.attention(static, operands))
    return (out, lse) if return_residual else out
