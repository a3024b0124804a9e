"""Attention to a sequence that is sharded over devices, for use inside `jax.shard_map`.

Two ways. `ring_attention` sends keys and values round while it computes: any number of devices, and memory that falls as
one over it. `all_to_all_attention` exchanges heads for sequence before and after: less communication, up to one device
for each query head. Both equal `dot_product_attention` of the whole arrays, with the same gradients.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_fa import masks
from pallas_fa.api import attend
from pallas_fa.context_parallel import placement as placements
from pallas_fa.context_parallel.placement import from_zigzag as from_zigzag
from pallas_fa.context_parallel.placement import to_zigzag as to_zigzag
from pallas_fa.operands import manual_axes
from pallas_fa.operands.dims import Dims, ShardedDims
from pallas_fa.operands.part import Part
from pallas_fa.problem import Operands, abstract, normalise, segment_mask


def ring_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    axis_name,
    placement="zigzag",
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
    implementation=None,
    config=None,
    return_residual=False,
) -> Any:
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
      placement: "zigzag": the sequence is cut into 2R blocks, and device i holds blocks i and 2R - 1 - i; so causal masks
        give all devices the same work. `to_zigzag` brings a whole array into this order. "contiguous": device i holds
        the i-th of R pieces; the better choice for a causal window, since the ring then stops where the window ends.
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
    size = _ring_size(axis_name)
    placement = placements.checked(placement)
    _check_implementation(implementation)
    _check_sharded(axis_name, query=query, key=key, value=value)
    problem, operands = normalise(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        score=score,
        precision=precision,
        deterministic_gradients=deterministic_gradients,
        config=config,
        whole=lambda dims: ShardedDims(dims.batch, dims.T * size, dims.S * size, dims.N, rows=dims.T),
    )
    dims = problem.dims
    segments = segment_mask(dims, query_segment_ids, key_value_segment_ids)
    segments = segments and segments.bind(dims, masks.Lengths())
    if operands.mask is None and operands.score is None and segments is None:
        placement = "contiguous"  # nothing depends on positions: larger blocks
    _check_blocks(dims, size, placement)

    from pallas_fa.context_parallel import ring

    names = tuple(implementation) if isinstance(implementation, list) else implementation
    static = ring.Ring(problem, names, axis_name, size, placement)
    out, lse = (x.reshape(dims.batch + x.shape[1:]) for x in ring.attention(static, *operands, segments))
    return _results(out, lse, return_residual)


def all_to_all_attention(
    query,
    key,
    value,
    bias=None,
    mask=None,
    *,
    axis_name,
    placement="contiguous",
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
    implementation=None,
    config=None,
    return_residual=False,
) -> Any:
    """Attention to a sharded sequence, with heads exchanged for sequence before and after (Jacobs et al., arXiv 2309.14509).

    For use inside `jax.shard_map`. Each of the R devices along `axis_name` comes with 1/R of the sequence and all heads,
    attends with 1/R of the query heads to the whole sequence, and gets its 1/R of the sequence back. R must divide N. Where
    it does not divide K, key heads are repeated as little as it takes: R / gcd(K, R) times.

    What is not said here is as in `dot_product_attention`, with T and S the lengths of the whole sequences:

    Args:
      query: [*B, T/R, N, H], this device's shard.
      key: [*B, S/R, K, H], this device's shard.
      value: [*B, S/R, K, Hv], this device's shard.
      bias: float, broadcastable to [*B, N, T, S]: all of it, the same on all devices, in the order of the sequence. Each
        device reads its heads; for a large bias `ring_attention` takes less memory.
      mask: bool, broadcastable to [*B, N, T, S], all of it; or a `pallas_fa.masks.Mask` of the whole problem.
      axis_name: the mesh axis, one name, over which the sequence is sharded.
      placement: how the sequence lies on the devices, as in `ring_attention`; the work is balanced in any case.
      query_seq_lengths: int [*B], lengths of the whole sequences.
      key_value_seq_lengths: int [*B], lengths of the whole sequences.
      query_segment_ids: int [*B, T/R], this device's shard; gathered, being small.
      key_value_segment_ids: int [*B, S/R], this device's shard.
      score: a `pallas_fa.scores.Score` of the whole problem.

    Returns:
      out [*B, T/R, N, Hv], with `return_residual` (out, lse), lse [*B, T/R, N]; differentiable.

    Raises:
      ValueError, TypeError: an argument is wrong; raised while tracing.
      NotImplementedError: the implementation named cannot do the call; the message says why.
    """
    size = _ring_size(axis_name)
    placement = placements.checked(placement)
    _check_sharded(axis_name, query=query, key=key, value=value)
    local, _ = normalise(query, key, value)
    N, K = local.dims.N, local.K
    if N % size:
        raise ValueError(
            f"query has N={N} heads, which the {size} devices along axis_name={axis_name!r} cannot share evenly:"
            " all_to_all_attention gives each device the same number of heads. Use ring_attention, or a smaller axis."
        )
    _check_blocks(local.dims, size, placement)
    if K % size:
        key, value = (jnp.repeat(x, size // math.gcd(K, size), axis=-2) for x in (key, value))

    def in_order(x, axis):
        return from_zigzag(x, axis, size) if placement == "zigzag" else x

    def whole_sequence(x):
        return in_order(lax.all_to_all(x, axis_name, x.ndim - 2, x.ndim - 3, tiled=True), -3)

    def shard(x, head_axis):
        x = to_zigzag(x, head_axis - 1, size) if placement == "zigzag" else x
        return lax.all_to_all(x, axis_name, x.ndim + head_axis - 1, x.ndim + head_axis, tiled=True)

    query_ids, key_ids = (
        ids if ids is None else in_order(lax.all_gather(ids, axis_name, axis=jnp.ndim(ids) - 1, tiled=True), -1)
        for ids in (query_segment_ids, key_value_segment_ids)
    )
    problem, (q, k, v, whole_score, whole_mask) = normalise(
        whole_sequence(query),
        whole_sequence(key),
        whole_sequence(value),
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        query_segment_ids=query_ids,
        key_value_segment_ids=key_ids,
        score=score,
        precision=precision,
        deterministic_gradients=deterministic_gradients,
        config=config,
        whole=lambda dims: Dims(dims.batch, dims.T, dims.S, N),
    )
    B, heads = problem.dims.B, problem.dims.N
    part = Part((0, lax.axis_index(axis_name) * heads, 0, 0), (B, heads, problem.dims.T, problem.dims.S))
    part_score, part_mask = (tree and part.cut(tree).moved(part) for tree in (whole_score, whole_mask))
    problem = dataclasses.replace(problem, score=abstract(part_score), mask=abstract(part_mask))
    out, lse = attend(problem, Operands(q, k, v, part_score, part_mask), implementation)
    return _results(shard(out, -2), shard(lse, -1), return_residual)


def _results(out, lse, return_residual):
    return (out, lse) if return_residual else out


def _ring_size(axis_name):
    if isinstance(axis_name, (tuple, list)):
        raise TypeError(
            f"axis_name={axis_name!r} must be one name of a mesh axis. Make the mesh with one axis for the sequence, of"
            " size the product of these."
        )
    try:
        return lax.axis_size(axis_name)
    except NameError:
        raise ValueError(
            f"axis_name={axis_name!r} is not an axis of a mesh that is manual here. Call this inside jax.shard_map over a"
            " mesh with that axis (named in axis_names, if that is given); outside of it use dot_product_attention."
        ) from None


def _check_implementation(implementation):
    names = (implementation,) if isinstance(implementation, str) else implementation
    if isinstance(names, (tuple, list)) and "reference" in names:
        raise NotImplementedError(
            f"implementation={implementation!r}: 'reference' has no backward for the keys of one hop. Use 'xla' or None."
        )


def _check_sharded(axis_name, **arrays):
    for name, x in arrays.items():
        if not isinstance(x, jax.Array):
            continue
        explicit = [axis for axis in jax.typeof(x).sharding.spec if axis is not None]
        if explicit:
            raise ValueError(
                f"{name} is sharded over the explicit mesh axes {explicit} inside of a jax.shard_map that is manual over"
                f" axis_name={axis_name!r}. Make them manual too (name them in its axis_names and in_specs), or make the"
                " mesh with jax.sharding.AxisType.Auto for these axes."
            )
        if manual_axes.known_alike(x, axis_name):
            raise ValueError(
                f"{name} is the same on all devices along axis_name={axis_name!r}, but each must hold its own shard of the"
                f" sequence. Shard it: in_specs=PartitionSpec(None, {axis_name!r}) for [B, length, heads, dim] (and if these"
                f" are shards, say so with jax.lax.pcast(x, {axis_name!r}, to='varying'))."
            )


def _check_blocks(dims, size, placement):
    for name, length in (("query", dims.T), ("key", dims.S)):
        if length % placements.blocks_of(placement):
            raise ValueError(
                f"placement={placement!r} gives each device two blocks of one size, but {name} has the odd length {length}"
                f" on each of {size} devices. Make the whole length a multiple of {2 * size} (pad it, and give"
                " key_value_seq_lengths), or use placement='contiguous'."
            )
