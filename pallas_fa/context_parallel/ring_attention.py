"""`ring_attention`: keys and values travel round a ring of devices."""

from collections.abc import Hashable, Sequence
from typing import Literal, Unpack, overload

import jax
from jax.typing import ArrayLike

from pallas_fa.arguments.keywords import Arguments, with_signature
from pallas_fa.arguments.masks import segment_mask
from pallas_fa.arguments.settings import refuse_forward_mode
from pallas_fa.context_parallel import checks
from pallas_fa.context_parallel import placement as placements
from pallas_fa.context_parallel.placement import Placement
from pallas_fa.masks import Lengths, Mask
from pallas_fa.operands.dims import ShardedDims
from pallas_fa.operands.layout import transpose
from pallas_fa.operands.pytree import as_flag
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
    """Computes attention of this device's queries to the keys of all devices along a mesh axis, which travel round a ring.

    Liu et al., arXiv 2310.01889. For use inside `jax.shard_map` (or `pmap`), with its checks on or off. Each of the R
    devices along `axis_name` holds 1/R of the queries and of the keys. Keys and values travel while the device computes:
    R - 1 hops, or fewer if the mask is static and needs fewer. Nothing is gathered, forward or backward.

    Masks and scores see positions in the whole sequence. T and S are the lengths of the whole sequences. Arguments that are
    not listed, and shape letters, are those of `dot_product_attention`.

    Args:
      query: [*B, T/R, N, H], this device's shard.
      key: [*B, S/R, K, H], this device's shard.
      value: [*B, S/R, K, Hv], this device's shard.
      bias: float, broadcastable to [*B, N, T/R, S]: the rows of this device's queries, in the order of the placement, and
        the columns of all keys, in the order of the sequence.
      mask: bool, broadcastable to [*B, N, T/R, S], ordered like `bias`; or a `pallas_fa.masks.Mask`, whose arrays also have
        this device's rows and all columns.
      axis_name: the mesh axis, one name, over which the sequence is sharded.
      placement: the order of the sequence on the devices. Required: the wrong one gives wrong results without an error.
        "zigzag": the sequence is split into 2R blocks, and device i holds blocks i and 2R - 1 - i. Every device then has
        equal work under a causal mask. `to_zigzag` permutes a whole array to this order. "contiguous": device i holds the
        i-th of R shards. Better for a causal window, since the ring stops where the window ends.
      query_seq_lengths: int [*B], lengths of the whole sequences.
      key_value_seq_lengths: int [*B], lengths of the whole sequences.
      query_segment_ids: int [*B, T/R], this device's shard.
      key_value_segment_ids: int [*B, S/R], this device's shard; the ids travel with the keys. (Ids in a `masks.Segments`,
        as arrays of a mask, have all S columns.)
      score: a `pallas_fa.scores.Score`, whose arrays have this device's rows and all columns. The strip of a
        `RelativeBias` has all T + S - 1 offsets.
      layout: the order of the dims of query, key, value and output; "BNTH" is transposed before and after the ring.
      sinks: float [N] or [*B, N], the same on all devices of the ring; a sink counts once.
      implementation: 'mosaic_gpu', 'xla', a tuple of them, or None; computes each hop.

    Returns:
      out [*B, T/R, N, Hv], with `return_residual` (out, lse), lse [*B, T/R, N]. Differentiable, twice in reverse; the second
      derivative keeps the operands of every hop, which takes the memory of whole sequences. `jax.shard_map` sums the
      gradients of replicated arrays (slopes, a bias without T) over the devices.

    Raises:
      ValueError, TypeError: an argument is wrong; raised while tracing.
      NotImplementedError: the named implementation cannot do the call; the message says why.
    """
    from pallas_fa.context_parallel import hops  # only rings need it: `import pallas_fa` stays fast
    from pallas_fa.context_parallel.ring import Ring, with_sharded_segments

    size = checks.axis_size(axis_name)
    placement = placements.check(placement)
    return_residual = as_flag("return_residual", return_residual)
    checks.refuse_reference(implementation)
    checks.require_shards(axis_name, query=query, key=key, value=value)
    refuse_forward_mode(arguments)
    # Segment ids are shards, and travel with the keys. The arrays of other masks span all keys.
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
    checks.refuse_narrow_keys(problem)
    layout, dims = problem.layout, problem.dims
    problem, operands = problem.in_btnh(operands)
    segments = segment_mask(dims, *ids)
    if segments is not None:
        operands = operands._replace(mask=with_sharded_segments(operands.mask, segments.bind(dims, Lengths())))
        problem = problem.with_operands(operands)
    if operands.mask is None and operands.score is None and operands.dropout is None:
        placement = "contiguous"  # nothing depends on positions: larger blocks
    checks.require_blocks(dims, size, placement)

    names = tuple(implementation) if isinstance(implementation, list) else implementation
    ring = Ring(problem, names, axis_name, size, placement)
    out, lse = (x.reshape(dims.batch + x.shape[1:]) for x in hops.attention(ring, operands))
    out = transpose(layout, out)
    return (out, lse) if return_residual else out
